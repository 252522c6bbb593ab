"""Whole servers: router and worker processes on real sockets, with a model small enough to start in seconds."""

import importlib.resources
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from space_common.process import ServerProcess
from tiny_checkpoints import tiny_checkpoint

SECONDS = 60.0  # longest wait for anything: far beyond what a busy machine needs, and short of the test's own limit


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.e2e)


class Live:
    """A running server, as a test talks to it."""

    def __init__(self, server: ServerProcess, key: str = "") -> None:
        """`key`: an API key to send."""
        self.server = server
        self.url = server.url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(
            base_url=server.url, timeout=SECONDS, headers=headers
        )  # its connections stay open until `close`
        self.model = self.get("/v1/models")["data"][0]["id"]

    def close(self) -> None:
        self.http.close()

    def get(self, path: str) -> dict[str, Any]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """A whole answer: greedy, 24 tokens and no EOS unless `fields` say otherwise."""
        answer = self.http.post("/v1/completions", json=asked(prompt, **fields))
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def ids(self, prompt: str, **fields: Any) -> list[int]:
        value: list[int] = self.complete(prompt, return_token_ids=True, **fields)["choices"][0]["token_ids"]
        return value

    def stream(self, prompt: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer; closing the iterator closes the connection."""
        with self.http.stream("POST", "/v1/completions", json=asked(prompt, stream=True, **fields)) as answer:
            assert answer.status_code == 200, answer.read()
            yield from events(answer)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What an OpenAI route tells, joined from its events where `body` asks for a stream: the same form for both.

        {"choices": [{"text", "token_ids", "logprobs", "finish_reason", ...}], "usage", "spaceserve"}; `message` is
        written flat. "steps": the step of each token, where a stream's `stream_options` ask for them.
        """
        if not body.get("stream"):
            answer = self.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            return {**whole, "choices": [joined([choice]) for choice in whole["choices"]], "steps": []}
        options = {"include_usage": True, **body.get("stream_options", {})}
        with self.http.stream("POST", path, json=body | {"stream_options": options}) as answer:
            assert answer.status_code == 200, answer.read()
            reported = list(events(answer))
        assert not any("error" in event for event in reported), reported[-1]
        pieces: dict[int, list[dict[str, Any]]] = {}
        for event in reported:
            for choice in event["choices"]:
                pieces.setdefault(choice["index"], []).append(choice)
        steps = [token["step"] for event in reported for token in event.get("spaceserve", {}).get("tokens", ())]
        return {**reported[-1], "choices": [joined(pieces[index]) for index in sorted(pieces)], "steps": steps}

    def connect(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A connection on which a request has been sent and nothing has been read."""
        place = urlsplit(self.url)
        content = json.dumps(body).encode()
        connection = socket.create_connection((place.hostname, place.port), timeout=SECONDS)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, such as `spaceserve_requests{state=queued}`."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {sample.name + _labels(sample.labels): sample.value for sample in samples}

    def wait_for(self, holds: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
        """Read /metrics until `holds`; the reading."""
        limit = time.monotonic() + SECONDS
        while not holds(found := self.metrics()):
            assert time.monotonic() < limit, f"{what}: not within {SECONDS:g} s; {self.server.last_words()}"
            time.sleep(0.05)  # a reading takes both processes 10 ms
        return found

    def wait_idle(self) -> dict[str, float]:
        """Until nothing is queued, runs or holds a block: every block is free or cached then."""
        found = self.wait_for(_idle, "every block free or cached")
        num_blocks = self.get("/info")["num_blocks"]
        assert found["spaceserve_kv_blocks{state=free}"] + found["spaceserve_kv_blocks{state=cached}"] == num_blocks
        return found

    def wait_worker(self) -> int:
        """The worker's process id, once there is one that is up."""
        self.wait_for(lambda now: now["spaceserve_worker_up"] == 1 and bool(self.server.worker_pids()), "a worker")
        return self.server.worker_pids()[-1]


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{name}={value}" for name, value in sorted(labels.items())) + "}" if labels else ""


def _idle(now: dict[str, float]) -> bool:
    return not (
        now["spaceserve_requests{state=queued}"]
        or now["spaceserve_requests{state=running}"]
        or now["spaceserve_kv_blocks{state=held}"]
    )


def asked(prompt: str, **fields: Any) -> dict[str, Any]:
    """A request body: greedy, 24 tokens, EOS ignored, unless `fields` say otherwise."""
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """One choice from its pieces: texts and lists one behind the other, of other things the last that was said."""
    whole: dict[str, Any] = {}
    for piece in pieces:
        said = piece.get("message") or piece.get("delta") or {}
        flat = {key: value for key, value in piece.items() if key not in ("message", "delta")}
        if "message" in piece or "delta" in piece:
            flat = {"text": said.get("content") or "", "tool_calls": said.get("tool_calls") or [], **flat}
        for key, value in flat.items():
            whole[key] = _joined(whole.get(key), value)
    whole["tool_calls"] = _calls(whole.get("tool_calls") or [])
    return whole


def _joined(before: Any, more: Any) -> Any:
    if before is None or more is None:
        return before if more is None else more
    if isinstance(more, dict):
        return {key: _joined(before.get(key), more.get(key)) for key in {**before, **more}}
    return before + more if isinstance(more, str | list) else more


def _calls(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole tool calls, of a message or from the pieces of a stream."""
    calls: list[dict[str, Any]] = []
    for place, piece in enumerate(pieces):
        if piece.get("index", place) >= len(calls):
            calls.append({"id": piece["id"], "name": "", "arguments": ""})
        function = piece.get("function", {})
        for key in ("name", "arguments"):
            calls[piece.get("index", place)][key] += function.get(key) or ""
    return calls


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events up to [DONE], which must come."""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data:"):
            value: dict[str, Any] = json.loads(line.removeprefix("data:"))
            yield value
    raise AssertionError("the stream ended without [DONE]")


@pytest.fixture(scope="package", autouse=True)
def few_measurements() -> Iterator[None]:
    """Servers started without --calibration-seconds measure their steps for 0.2 s, not for the default 3 s."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPACESERVE_CALIBRATION_SECONDS", "0.2")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny SPACE checkpoint with tokenizer and chat template."""
    return tiny_checkpoint(tmp_path_factory.mktemp("e2e") / "tiny", vocab_size=300)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> str:
    """What the shared server serves: the embedded model where its weights are there, else the tiny one."""
    weights = importlib.resources.files("space_demo") / "model.safetensors"
    return "demo" if weights.is_file() else str(checkpoint)


@pytest.fixture(scope="package")
def live(model: str) -> Iterator[Live]:
    """The shared server, with room for everything; ended by SIGTERM, and it must exit 0."""
    flags = ["--model", model, "--num-threads", "1", "--num-blocks", "2048", "--grpc-port", "0"]
    flags += ["--calibration-seconds", "0.2"]  # again at each start: beside other tests no measurement is kept
    with ServerProcess(flags) as server, closing(Live(server)) as ready:
        yield ready


@pytest.fixture(scope="package")
def drafting(model: str) -> Iterator[Live]:
    """Like `live`, and drafts always, whether that pays on this machine or not."""
    flags = ["--model", model, "--num-threads", "1", "--num-blocks", "2048", "--speculation", "5"]
    with ServerProcess(flags) as server, closing(Live(server)) as ready:
        yield ready


STEADY_DRAFTS = 4


@pytest.fixture(scope="package")
def steady() -> Iterator[Live]:
    """A server whose steps are the same each time for a text that runs alone: four drafts each, from masks alone.

    In float32, so that its log-probabilities can be held to another's.
    """
    if not (importlib.resources.files("space_demo") / "model.safetensors").is_file():
        pytest.skip("the embedded model has no weights in this checkout")
    flags = ["--model", "demo", "--num-threads", "1", "--num-blocks", "64", "--block-size", "64"]
    flags += ["--dtype", "float32", "--speculation", str(STEADY_DRAFTS), "--lookup", "off"]
    with ServerProcess(flags) as server, closing(Live(server)) as ready:
        yield ready


@pytest.fixture(scope="package")
def small(checkpoint: Path) -> Iterator[Live]:
    """A server with 24 blocks of 8 slots, three sequences at once and two in the queue."""
    flags = ["--num-blocks", "24", "--block-size", "8", "--max-sequences", "3", "--max-queue", "2"]
    flags += ["--calibration-seconds", "0"]
    with (
        ServerProcess(["--model", str(checkpoint), "--num-threads", "1", *flags]) as server,
        closing(Live(server)) as ready,
    ):
        yield ready


@pytest.fixture
def serve(checkpoint: Path) -> Callable[..., AbstractContextManager[ServerProcess]]:
    """A server of one's own: `with serve(*flags, environment=...) as server`."""

    def start(*flags: str, **options: Any) -> ServerProcess:
        known = ["--model", str(checkpoint), "--num-threads", "1", "--num-blocks", "256", "--calibration-seconds", "0"]
        return ServerProcess([*known, *flags], **options)

    return start
