"""A tracing span for each HTTP request; it continues the client's `traceparent`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from space_common.tracing import parent_of
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_router.http_server.paths import is_open

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class Traced:
    """ASGI middleware, installed only if tracing is on. Probes, metric scrapes and web page files get no span."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"], scope["method"]):
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, StatusCode

        headers, method = Headers(scope=scope), scope["method"]
        parent = parent_of(headers.get("traceparent", ""), headers.get("tracestate", ""))
        with self._tracer.start_as_current_span(
            method, parent, SpanKind.SERVER, {"http.request.method": method}, record_exception=False
        ) as span:

            async def watched_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, watched_send)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:  # other paths have unbounded cardinality
                    span.set_attribute("http.route", route)
                    span.update_name(f"{method} {route}")
