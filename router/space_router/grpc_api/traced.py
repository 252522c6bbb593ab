"""The span of a gRPC call, a child of the `traceparent` in its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from space_common.tracing import parent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@contextmanager
def call_span(tracer: Tracer | None, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[None]:
    """Run the block in a span; no effect without a tracer. `method`: package.Service/Method."""
    if tracer is None:
        yield
        return
    from opentelemetry.trace import SpanKind

    said = {key: str(value) for key, value in metadata or () if key in ("traceparent", "tracestate")}
    parent = parent_of(said.get("traceparent", ""), said.get("tracestate", ""))
    attributes = {"rpc.system": "grpc", "rpc.method": method}
    with tracer.start_as_current_span(method, parent, SpanKind.SERVER, attributes, record_exception=False):
        yield
