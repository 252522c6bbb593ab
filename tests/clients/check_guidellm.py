"""guidellm's benchmark of a server: chat and completions, synthetic prompts, two requests at a time."""

import importlib.metadata
import importlib.resources
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, URL, check, leave, version

version(importlib.metadata.version("guidellm"))
FOLDER = str(importlib.resources.files("space_demo"))  # the tokenizer
COUNT, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 48, 24


def benchmark(request_format: str, profile: str) -> dict[str, Any]:
    """Return the report's only benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        flags = {
            "backend": f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={request_format}",
            "profile": profile,
            "constraint": f"kind=max_requests,count={COUNT}",
            "tokenizer": f"kind=huggingface_auto,model={FOLDER}",
            "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
            "output": f"kind=json,path={report}",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        command = [str(Path(sys.executable).with_name("guidellm")), "run", *words, "--disable-console"]
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]
        (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
        return dict(found)


for request_format, profile in (
    ("/v1/chat/completions", "kind=concurrent,streams=2"), ("/v1/completions", "kind=synchronous"),
):  # fmt: skip
    with check(f"{request_format} is measured, with no error and all tokens counted"):
        found = benchmark(request_format, profile)
        made = found["scheduler_metrics"]["requests_made"]
        assert (made["successful"], made["errored"], made["incomplete"]) == (COUNT, 0, 0), made
        requests = found["requests"]["successful"]
        assert [one["output_metrics"]["text_tokens"] for one in requests] == [OUTPUT_TOKENS] * COUNT
        assert all(one["input_metrics"]["text_tokens"] >= PROMPT_TOKENS for one in requests)
        assert all(one["time_to_first_token_ms"] > 0 for one in requests)

leave()
