"""OpenTelemetry tracing, if enabled: spans are sent over OTLP, configured by the standard OTEL_* variables.

SDK and exporter are imported only then, so tracing costs nothing when it is off.
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
"""Variables with a single supported value; all other OTEL_* variables are left to the library."""


class TracingUnavailable(Exception):
    """Spans cannot be sent; the message names what is missing and what to do."""


def check_tracing(environment: Mapping[str, str]) -> None:
    """Raises TracingUnavailable if spans cannot be sent."""
    for package in PACKAGES:
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # a parent package is missing
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
    """Yield a tracer that sends spans to OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4318) in background
    batches.

    Spans that are left are sent at the end of the block. `service`: the service name if OTEL_SERVICE_NAME and
    OTEL_RESOURCE_ATTRIBUTES set none. Raises TracingUnavailable.
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
    """Return the context of a W3C traceparent; an empty context if it is empty or invalid."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def traceparent_of(span: Span) -> str:
    """Return the span's W3C traceparent."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
