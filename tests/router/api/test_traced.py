"""Spans of a request, from the client's to the worker's, without text of prompt or output."""

import json
import subprocess
import sys
from typing import Any

import pytest
from doubles.router.whole_router import Start
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from space_common.tracing import parent_of
from space_proto import worker_pb2
from space_router.engine.request import worker_messages

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Followed:
    """A provider, and the spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    @property
    def names(self) -> list[str]:
        return [span.name for span in self._exporter.get_finished_spans()]

    def written(self) -> str:
        return " ".join(span.to_json() for span in self._exporter.get_finished_spans())


@pytest.fixture
def followed() -> Followed:
    return Followed()


@pytest.fixture
def traceparents(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The traceparent of each Admit."""
    said: list[str] = []
    admit = worker_messages.admit

    def noted(*arguments: Any, **bounds: int) -> worker_pb2.Command:
        command = admit(*arguments, **bounds)
        said.append(command.admit.traceparent)
        return command

    monkeypatch.setattr(worker_messages, "admit", noted)
    return said


async def test_a_client_s_trace_goes_through_http_queue_and_generation_to_the_worker(
    start: Start, followed: Followed, traceparents: list[str]
) -> None:
    async with start("hello there", tracer=followed.tracer) as router:
        body = {"prompt": "a secret word", "max_tokens": 6, "temperature": 0}
        answer = await router.client.post("/v1/completions", json=body, headers={"traceparent": CLIENT})
        assert answer.status_code == 200
    http, queue, generate = (followed.one(name) for name in ("POST /v1/completions", "queue", "generate"))
    assert {f"{span.context.trace_id:032x}" for span in (http, queue, generate)} == {CLIENT[3:35]}
    assert f"{http.parent.span_id:016x}" == CLIENT[36:52]
    assert [queue.parent.span_id, generate.parent.span_id] == [http.context.span_id] * 2
    assert queue.end_time <= generate.start_time <= generate.end_time <= http.end_time
    assert traceparents == [f"00-{generate.context.trace_id:032x}-{generate.context.span_id:016x}-01"]
    assert http.kind is SpanKind.SERVER
    assert http.attributes["http.response.status_code"] == 200
    assert generate.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert generate.attributes["spaceserve.outcome"] == "length"
    assert generate.attributes["spaceserve.steps"] > 0


async def test_no_span_holds_a_word_of_prompt_or_output(start: Start, followed: Followed) -> None:
    async with start("overheard", tracer=followed.tracer) as router:
        await router.complete(prompt="confidential", max_tokens=9, temperature=0, user="somebody")
    written = followed.written()
    assert "generate" in written
    assert not [word for word in ("overheard", "confidential", "somebody") if word in written]


async def test_each_choice_has_spans_of_its_own(start: Start, followed: Followed, traceparents: list[str]) -> None:
    async with start(tracer=followed.tracer) as router:
        await router.complete(prompt="ab", max_tokens=3, n=3)
    assert len(followed.spans("queue")) == len(followed.spans("generate")) == 3
    assert len(set(traceparents)) == 3


async def test_a_stream_s_span_ends_with_the_stream(start: Start, followed: Followed) -> None:
    async with start("one two three", tracer=followed.tracer) as router:
        body = {"prompt": "x", "max_tokens": 5, "stream": True, "temperature": 0}
        async with router.client.stream("POST", "/v1/completions", json=body) as answer:
            events = [line async for line in answer.aiter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert followed.one("generate").attributes["gen_ai.usage.output_tokens"] == 5


async def test_a_refused_request_has_the_status_it_got_and_what_is_no_route_no_name(
    start: Start, followed: Followed
) -> None:
    async with start(tracer=followed.tracer) as router:
        assert (await router.post("/v1/completions", prompt="x" * 100_000, max_tokens=1)).status_code == 400
        assert (await router.client.get("/no/such/secret-path")).status_code == 404
    assert followed.one("POST /v1/completions").attributes["http.response.status_code"] == 400
    assert followed.one("GET").attributes["http.response.status_code"] == 404
    assert "secret-path" not in followed.written()


async def test_a_request_that_ran_out_of_time_is_an_error_of_its_span(start: Start, followed: Followed) -> None:
    async with start(tracer=followed.tracer, step_seconds=0.05) as router:
        answer = await router.post("/v1/completions", prompt="x", max_tokens=200, timeout=0.2, ignore_eos=True)
        assert answer.status_code == 408
    generate = followed.one("generate")
    assert generate.status.status_code is StatusCode.ERROR
    assert generate.attributes["spaceserve.outcome"] == "deadline"


async def test_probes_and_scrapes_leave_no_spans(start: Start, followed: Followed) -> None:
    async with start(tracer=followed.tracer) as router:
        for path in ("/health", "/metrics", "/readyz"):
            await router.client.get(path)
    assert followed.names == []


async def test_without_a_tracer_nothing_is_told_to_the_worker(start: Start, traceparents: list[str]) -> None:
    async with start() as router:
        body = {"prompt": "x", "max_tokens": 2}
        await router.client.post("/v1/completions", json=body, headers={"traceparent": CLIENT})
    assert traceparents == [""]


def test_without_the_flag_no_sdk_and_no_exporter_is_loaded() -> None:
    code = "import sys, json, space_router.serve; print(json.dumps(list(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    not_wanted = ("opentelemetry.sdk", "opentelemetry.exporter")  # the interface alone is fastapi's own
    assert [name for name in json.loads(run.stdout) if name.startswith(not_wanted)] == []


@pytest.mark.parametrize("said", ["", "nonsense", "00-0-0-00", "ff-" + CLIENT[3:]])
def test_a_traceparent_that_is_none_begins_a_trace(said: str, followed: Followed) -> None:
    span = followed.tracer.start_span("x", parent_of(said))
    assert span.parent is None
