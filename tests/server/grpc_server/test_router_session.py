"""What is said comes in order, from any thread; silence is noticed in time."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from doubles.worker import ScriptedModel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from space_common.process import JsonLines
from space_common.tracing import TracingUnavailable, check_tracing, exporting
from space_proto import worker_pb2 as pb
from space_server.config import parse
from space_server.grpc_server import ReportQueue, RouterSession, SequenceSpans
from space_server.worker import Worker


def test_what_is_said_is_taken_in_order_whether_somebody_waits_for_it_or_not() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[int] = ReportQueue()
        report_queue.put(1)
        report_queue.put(2)
        assert [await report_queue.take(10.0), await report_queue.take(10.0)] == [1, 2]
        taking = asyncio.ensure_future(report_queue.take(10.0))
        await asyncio.sleep(0)
        threading.Thread(target=report_queue.put_from_thread, args=(3,)).start()
        assert await taking == 3
        report_queue.close()

    asyncio.run(scene())


def test_a_silence_longer_than_patience_is_noticed_though_the_timer_was_set_for_an_earlier_message() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[str] = ReportQueue()
        loop = asyncio.get_running_loop()
        loop.call_later(0.03, report_queue.put, "said")
        assert await report_queue.take(0.05) == "said"
        begun = loop.time()
        with pytest.raises(TimeoutError):
            await report_queue.take(0.05)
        assert loop.time() - begun >= 0.045
        report_queue.put("again")
        assert await report_queue.take(0.05) == "again"
        report_queue.close()

    asyncio.run(scene())


def test_less_patience_than_before_is_kept_too() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[str] = ReportQueue()
        taking = asyncio.ensure_future(report_queue.take(60.0))
        await asyncio.sleep(0)
        report_queue.put("said")
        assert await taking == "said"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(report_queue.take(0.01), 5.0)
        report_queue.close()

    asyncio.run(scene())


def test_a_taker_that_is_cancelled_loses_nothing() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[str] = ReportQueue()
        taking = asyncio.ensure_future(report_queue.take(60.0))
        await asyncio.sleep(0)
        taking.cancel()
        report_queue.put("said")
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await report_queue.take(1.0) == "said"
        report_queue.close()

    asyncio.run(scene())


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Kept:
    """Spans that have ended, and who makes them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()


@pytest.fixture
def kept() -> Kept:
    return Kept()


def admit(seq_id: int = 1, traceparent: str = PARENT) -> pb.Command:
    limits = pb.Limits(max_tokens=6)
    return pb.Command(
        admit=pb.Admit(
            seq_id=seq_id, ids=[5, 6, 7], num_prompt=3, pages=range(8), limits=limits, traceparent=traceparent
        )
    )


def run(kept: Kept, *commands: pb.Command) -> None:
    """A worker's conversation, step by step, until it has nothing to do."""
    worker, spans = Worker(ScriptedModel(), num_blocks=64, block_size=4), SequenceSpans(kept.tracer)
    start = pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=64, max_draft_length=3))
    for command in (start, *commands):
        worker.apply(command)
        spans.applied(command)
    while worker.has_work:
        report = worker.step()
        if report is not None:
            spans.reported(report)


def test_a_sequence_has_a_span_under_its_router_s_from_admission_to_its_end(kept: Kept) -> None:
    run(kept, admit())
    (span,) = kept.spans
    assert span.name == "worker"
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:52]
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["spaceserve.outcome"] == "length"
    assert 0 < span.attributes["spaceserve.steps"] <= 6
    assert [event.name for event in span.events] == ["first token"]


def test_a_sequence_that_nobody_follows_has_none(kept: Kept) -> None:
    run(kept, admit(traceparent=""))
    assert kept.spans == ()


def test_what_cannot_be_run_is_an_error_of_its_span(kept: Kept) -> None:
    wrong = admit()
    wrong.admit.num_cached = 3  # no multiple of a page
    run(kept, wrong)
    (span,) = kept.spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["gen_ai.usage.output_tokens"] == 0


def test_released_and_left_sequences_end_their_spans(kept: Kept) -> None:
    spans = SequenceSpans(kept.tracer)
    for command in (admit(1), admit(2), pb.Command(release=pb.Release(seq_id=1))):
        spans.applied(command)
    spans.close()
    assert [span.attributes["spaceserve.outcome"] for span in kept.spans] == ["released", "router lost"]


async def _conversation(kept: Kept) -> None:
    worker = Worker(ScriptedModel(), num_blocks=64, block_size=4)
    conversation = RouterSession(worker, SequenceSpans(kept.tracer))
    conversation.start()
    conversation.receive([pb.Command(start=pb.Start(protocol_major=1, max_draft_length=3)), admit()])
    ended = False
    while not ended:
        message = await conversation.message(10)
        assert message is not None
        conversation.sent(message)
        ended = any(part.finish for part in message.report.sequences)
    await conversation.stop()


def test_a_conversation_tells_its_spans_what_it_does(kept: Kept) -> None:
    import asyncio

    asyncio.run(_conversation(kept))
    assert [span.attributes["spaceserve.outcome"] for span in kept.spans] == ["length"]


# ------------------------------------------------------------------------------------------------------- the sender


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """What an OTLP collector is sent: (path, body)."""
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


def test_spans_go_to_the_collector_that_the_variables_name(
    collector: tuple[str, list[tuple[str, bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    with exporting("spaceserve-worker", {}) as tracer:
        tracer.start_span("worker").end()
    ((path, body),) = got
    assert path == "/v1/traces"
    assert b"spaceserve-worker" in body


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_PROPAGATORS", "b3"),
    ],
)
def test_what_is_not_spoken_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(TracingUnavailable, match=f"{name}='{value}'"):
        check_tracing({name: value})


def test_without_the_packages_the_cure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("space_common.tracing.PACKAGES", ("opentelemetry.no_such_part",))
    with pytest.raises(TracingUnavailable, match=r"pip install 'spaceserve\[tracing\]'"):
        check_tracing({})


def test_the_worker_is_told_by_its_flag() -> None:
    assert not parse(["--listen", "h:1"]).tracing
    assert parse(["--listen", "h:1", "--tracing", "on"]).tracing


def test_a_json_line_has_the_message_the_error_and_the_span(kept: Kept) -> None:
    record = logging.LogRecord("space", logging.WARNING, "f.py", 1, "%d of %s", (3, "ü\n"), None)
    with kept.tracer.start_as_current_span("x") as span:
        line = json.loads(JsonLines().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "space", "3 of ü\n")
    assert line["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert "span_id" not in json.loads(JsonLines().format(record))


class PreparingWorker(Worker):
    """Prepares three times what no request waits for; each time goes on when it is let."""

    def __init__(self) -> None:
        super().__init__(ScriptedModel(num_masks=0), num_blocks=64, block_size=4)
        self.happened: list[str] = []
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def may_prepare(self) -> bool:
        return self.happened.count("prepared") < 3 and not (len(self.batch) or self.has_work)

    def prepare(self, seconds: float = 0.0) -> None:
        self.begun.release()
        self.go_on.acquire(timeout=30)
        self.happened.append("prepared")

    def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
        self.happened.append("stepped")
        return super().step(report)


async def test_a_request_and_the_end_of_a_session_wait_for_one_preparation_at_most() -> None:
    worker = PreparingWorker()
    session = RouterSession(worker)
    session.start()
    await asyncio.to_thread(worker.begun.acquire, timeout=30)
    limits = pb.Limits(max_tokens=1)
    session.receive(
        [
            pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=64)),
            pb.Command(admit=pb.Admit(seq_id=1, ids=[5, 6], num_prompt=2, pages=[1], limits=limits)),
        ]
    )
    worker.go_on.release()
    message = await session.message(30)
    assert message is not None
    assert [one.seq_id for one in message.report.sequences] == [1]
    await asyncio.to_thread(worker.begun.acquire, timeout=30)
    assert worker.happened == ["prepared", "stepped"]
    stopping = asyncio.create_task(session.stop())
    await asyncio.sleep(0)
    worker.go_on.release()
    await stopping
    assert worker.happened == ["prepared", "stepped", "prepared"]
