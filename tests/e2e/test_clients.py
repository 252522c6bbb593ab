"""Clients of a whole server: libraries, the load benchmark, connections that break off."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

SERIES = {
    "tokens_per_step": "histogram", "drafted_tokens_total": "counter", "accepted_tokens_total": "counter",
    "accepted_by_position_total": "counter", "draft_length": "histogram", "rows_total": "counter",
    "speculation_speedup": "gauge", "step_seconds": "histogram", "step_host_seconds": "histogram",
    "worker_up": "gauge", "worker_restarts_total": "counter", "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram", "request_seconds": "histogram", "queue_seconds": "histogram",
    "requests": "gauge", "requests_total": "counter", "rejected_total": "counter", "prompt_tokens_total": "counter",
    "generated_tokens_total": "counter", "prefix_cache_hit_tokens_total": "counter", "kv_blocks": "gauge",
    "preemptions_total": "counter", "energy_joules_total": "counter",
}  # fmt: skip


@pytest.fixture
def client(live: Any) -> Any:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_openai_client_streams_a_completion_that_equals_the_whole_one(live: Any, client: Any) -> None:
    wanted = {"model": live.model, "prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0.8, "seed": 7}
    whole = client.completions.create(**wanted)
    chunks = list(client.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.model_extra["spaceserve"]["seed"] == 7


def test_the_openai_client_streams_a_chat_that_equals_the_whole_one(live: Any, client: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
    wanted = {"model": live.model, "messages": messages, "max_completion_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_generate_stream_gives_the_tokens_of_generate_one_event_each(live: Any) -> None:
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 12, "details": True}}
    whole = live.http.post("/generate", json=body).json()
    with live.http.stream("POST", "/generate_stream", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["token"]["id"] for event in events] == [token["id"] for token in whole["details"]["tokens"]]
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert "".join(event["token"]["text"] for event in events) == whole["generated_text"]
    assert events[-1]["details"]["generated_tokens"] == len(events) == whole["details"]["generated_tokens"]


def test_hugging_faces_client_streams_a_text_that_equals_the_whole_one(live: Any) -> None:
    client = InferenceClient(live.url, token="none")
    whole = client.text_generation("import os", max_new_tokens=16, details=True, return_full_text=False)
    events = list(client.text_generation("import os", max_new_tokens=16, details=True, stream=True))
    assert "".join(event.token.text for event in events) == whole.generated_text != ""
    assert [event.token.logprob for event in events] == [token.logprob for token in whole.details.tokens]
    assert events[-1].details.finish_reason == whole.details.finish_reason
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation("import os", max_new_tokens=0)


def test_hugging_faces_client_gets_what_its_grammar_allows(live: Any) -> None:
    client = InferenceClient(live.url, token="none")
    grammar = {"type": "regex", "value": "[0-9]{3}-[a-f]{2}"}
    text = client.text_generation("id = '", max_new_tokens=32, grammar=grammar, return_full_text=False)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)


def test_hugging_faces_client_chats_without_knowing_the_models_name(live: Any) -> None:
    client = InferenceClient(live.url, token="none")
    messages = [{"role": "user", "content": "def add(a, b):"}]
    whole = client.chat_completion(messages, max_tokens=16, temperature=0.0)
    parts = client.chat_completion(messages, max_tokens=16, temperature=0.0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert whole.model == live.model


def test_a_seed_gives_the_same_text_alone_and_among_others(live: Any) -> None:
    def asked(seed: int) -> str:
        parameters = {"do_sample": True, "temperature": 1.0, "seed": seed, "max_new_tokens": 24}
        text: str = live.http.post("/generate", json={"inputs": "def f(", "parameters": parameters}).json()[
            "generated_text"
        ]
        return text

    alone = [asked(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(asked, range(6))) == alone
    assert len(set(alone)) > 1


def test_every_promised_series_is_in_the_metrics(live: Any) -> None:
    live.complete("x = ")
    text = live.http.get("/metrics").text
    types = dict(re.findall(r"^# TYPE spaceserve_(\w+) (\w+)$", text, re.MULTILINE))
    assert {name: types.get(name) for name in SERIES} == SERIES
    assert live.metrics()["spaceserve_tokens_per_step_count"] > 0


def test_the_model_is_listed_described_and_healthy(live: Any, client: Any) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve(listed.id).id == listed.id == live.model
    info = live.get("/info")
    assert info["ready"]
    assert info["model_id"] == live.model
    assert info["speculation"]["num_masks"] > 0
    assert live.get("/health")


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "space_eval.bench", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_smoke_bench_measures_a_running_server(live: Any, tmp_path: Path) -> None:
    out = tmp_path / "records" / "smoke.json"
    ran = bench("--url", live.url, "--smoke", "--temperature", "0.8", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["facts"]["id"] == live.model
    assert record["facts"]["speculation"]["max_draft_length"] > 0
    assert {"machine", "commit", "dtype", "window", "num_blocks"} <= record["facts"].keys()
    assert [(row["num_streams"], row["speculation"]) for row in record["rows"]] == [
        (1, "off"), (1, "auto"), (4, "off"), (4, "auto"),
    ]  # fmt: skip
    for row in record["rows"]:
        speed, per_step = row["tokens_per_second"], row["tokens_per_step"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert per_step["low"] >= 1
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"]
        assert 0 <= row["token_gap_ms"]["p50"] <= row["token_gap_ms"]["p99"]
        same, compared = row["identical"].split("/")
        assert same == compared == str(2 * row["num_streams"])
        assert (row["ratio"] is None) == (row["speculation"] == "off")
        assert str(row["num_streams"]) in ran.stdout
    live.wait_idle()


def test_a_server_that_is_not_there_is_one_line_and_exit_1() -> None:
    ran = bench("--url", "http://127.0.0.1:9", "--smoke")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines()[-1].startswith("bench: No connection to 127.0.0.1:9")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_gives_its_blocks_back(live: Any, stream: bool) -> None:
    cancelled = live.wait_idle()["spaceserve_requests_total{outcome=cancelled}"]
    body = {"prompt": "x = ", "stream": stream, "temperature": 0, "ignore_eos": True, "max_tokens": 400}
    with closing(live.connect(body)) as connection:
        now = live.wait_for(lambda now: now["spaceserve_requests{state=running}"] == 1, "it runs")
        assert now["spaceserve_kv_blocks{state=held}"] > 0
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    now = live.wait_idle()
    assert now["spaceserve_requests_total{outcome=cancelled}"] == cancelled + 1
