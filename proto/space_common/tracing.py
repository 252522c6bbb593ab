"""OpenTelemetry where it is asked for: spans sent over OTLP, as the standard OTEL_* variables say.

Neither SDK nor exporter is imported before that, so that a server without it pays nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
SPOKEN = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""Variables of which one value is understood here; every other OTEL_* variable is the library's own."""


class TracingUnavailable(Exception):
    """Spans cannot be sent as asked; the message names what is missing and the cure."""


def check_tracing(environment: Mapping[str, str]) -> None:
    """Raises TracingUnavailable."""
    for package in PACKAGES:
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # of a parent
            found = False
        if not found:
            raise TracingUnavailable(
                f"--tracing on: {package} is not installed. Do `pip install 'spaceserve[tracing]'`, or leave it off."
            )
    for name, value in SPOKEN.items():
        if environment.get(name, value) not in ("", value):
            raise TracingUnavailable(f"{name}={environment[name]!r}: spans are sent as {value} only. Unset it.")
    propagators = environment.get("OTEL_PROPAGATORS") or "tracecontext"
    if "tracecontext" not in propagators.replace(" ", "").split(","):
        raise TracingUnavailable(
            f"OTEL_PROPAGATORS={propagators!r}: W3C's traceparent is taken only; name tracecontext, or unset it."
        )


@contextmanager
def exporting(service: str, environment: Mapping[str, str]) -> Iterator[Tracer]:
    """A tracer whose spans go to OTEL_EXPORTER_OTLP_ENDPOINT (http://localhost:4318 where it is unset), in batches and
    beside the server's work; what is left is sent at the end of the block.

    `service`: its name where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES give none. Raises TracingUnavailable.
    """
    check_tracing(environment)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider.get_tracer("spaceserve")
    finally:
        provider.shutdown()


def parent_of(traceparent: str, tracestate: str = "") -> Context:
    """The span that a W3C traceparent names; none where it is empty or says nothing valid."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def traceparent_of(span: Span) -> str:
    """What names a span to another process."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
