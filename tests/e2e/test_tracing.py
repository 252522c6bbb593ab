"""A trace through two real processes: router and worker send their spans to a collector, and they fit together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from space_common.process import ServerProcess
from space_proto import generate_pb2, generate_pb2_grpc

pytestmark = pytest.mark.slow  # for its own server

TRACES = {"http": "0af7651916cd43dd8448eb211c80319c", "grpc": "4bf92f3577b34da6a3ce929d0e0e4736"}
CLIENT_SPAN = "b7ad6b7169203331"
SECRET = "a platypus in the pantry"
NUM_TOKENS = 12


@dataclass(frozen=True)
class Span:
    """As the collector got it."""

    service: str
    name: str
    trace: str  # ids in hexadecimal
    id: str
    parent: str
    begin: int  # nanoseconds of the wall clock
    end: int
    attributes: dict[str, Any]


class Collector:
    """An OTLP receiver over HTTP: all spans that came, and every byte of them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self._lock = threading.Lock()

    def take(self, content: bytes) -> None:
        reported = ExportTraceServiceRequest.FromString(content)
        with self._lock:
            self.raw += content
            for resource in reported.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [_read(names["service.name"], span) for span in scope.spans]

    def of(self, trace: str) -> dict[str, Span]:
        """The spans of a trace, which all have other names."""
        found = {span.name: span for span in self.spans if span.trace == trace}
        assert len(found) == sum(span.trace == trace for span in self.spans)
        return found


def _read(service: str, span: Any) -> Span:
    values = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    return Span(service, span.name, *ids, span.start_time_unix_nano, span.end_time_unix_nano, values)


@contextmanager
def listening(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            content = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            collector.take(content)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def collector(model: str) -> Collector:
    """What it got of one streamed request over HTTP and one over gRPC, each with a client's traceparent."""
    made = Collector()
    flags = ["--model", model, "--num-threads", "1", "--num-blocks", "64", "--calibration-seconds", "0"]
    flags += ["--grpc-port", "0", "--tracing", "on"]
    with listening(made) as url, ServerProcess(flags, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": url}) as server:
        body = {"prompt": SECRET, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        headers = {"traceparent": f"00-{TRACES['http']}-{CLIENT_SPAN}-01"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.text.endswith("data: [DONE]\n\n")
        with grpc.insecure_channel(server.grpc_address) as channel:
            request = generate_pb2.GenerateRequest(prompt=SECRET, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
            metadata = (("traceparent", f"00-{TRACES['grpc']}-{CLIENT_SPAN}-01"),)
            stub = generate_pb2_grpc.GenerateStub(channel)  # type: ignore[no-untyped-call]
            assert list(stub.Generate(request, metadata=metadata, timeout=60))
        server.stop()  # and what is left is sent
    return made


@pytest.mark.parametrize(
    ("face", "outermost"), [("http", "POST /v1/completions"), ("grpc", "spaceserve.v1.Generate/Generate")]
)
def test_both_processes_spans_are_the_client_s_trace_and_nest(collector: Collector, face: str, outermost: str) -> None:
    spans = collector.of(TRACES[face])
    assert set(spans) == {outermost, "queue", "generate", "worker"}
    outer, queue, generate, worker = (spans[name] for name in (outermost, "queue", "generate", "worker"))
    assert [span.parent for span in (outer, queue, generate, worker)] == [CLIENT_SPAN, outer.id, outer.id, generate.id]
    services = [span.service for span in (outer, queue, generate, worker)]
    assert services == ["spaceserve"] * 3 + ["spaceserve-worker"]
    assert outer.begin <= queue.begin <= queue.end <= generate.begin <= worker.begin < worker.end
    assert worker.begin < generate.end <= outer.end
    assert generate.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert worker.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS


def test_no_span_holds_a_word_of_prompt_or_output(collector: Collector) -> None:
    assert {span.trace for span in collector.spans} == set(TRACES.values())
    assert len(collector.spans) == 8
    for word in ("platypus", "pantry"):
        assert word in SECRET
        assert word.encode() not in collector.raw
    for span in collector.spans:
        for name, value in span.attributes.items():
            assert not isinstance(value, str) or name.startswith(("http.", "rpc.", "spaceserve.")), name
            assert not isinstance(value, str) or len(value) < 64
