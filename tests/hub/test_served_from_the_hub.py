"""`--model HF_ID` from an empty cache to an answer, and refusals as an operator sees them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from space_eval.bench.server_process import ServerProcess
from space_model.testing import tiny_checkpoint

pytestmark = pytest.mark.e2e
FLAGS = ["--num-threads", "1", "--calibration-seconds", "0", "--num-blocks", "64"]


def test_a_model_is_downloaded_served_and_served_again_without_the_hub(
    hub: Any, repository: Any, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", words=True)
    hub.models["house/tiny"] = repository({file.name: file.read_bytes() for file in folder.iterdir()})
    known = hub.environment(tmp_path / "home")
    flags = ["--model", "house/tiny", "--download-folder", str(tmp_path / "volume"), *FLAGS]
    ids = []
    for extra in ([], ["--offline", "on"]):
        hub.asked.clear()
        with ServerProcess([*flags, *extra], environment=known) as server:
            body = {"prompt": "a b", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            ids.append(answer["choices"][0]["token_ids"])
            said = " ".join(server.lines)
        assert ("worker 0: downloaded house/tiny" in said) == (not extra)
        assert (hub.asked == []) == bool(extra)
    assert ids[0] == ids[1]


def test_a_model_that_is_not_there_ends_the_server_with_one_line(hub: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "space_router", "serve", "--model", "house/none", "--port", "0"]
    run = subprocess.run(command, env=hub.environment(tmp_path / "home"), capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith(f"spaceserve: --model='house/none' is no folder, and: {hub.url} has no model house/none")
