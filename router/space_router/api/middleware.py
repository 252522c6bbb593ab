"""ASGI middleware around all routes: API keys, rate limits and error responses; tracing spans."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from space_common.tracing import parent_of
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_router.api.service import Service
from space_router.api.usage import RECEIVED
from space_router.errors import ApiError, Unauthorized
from space_router.http_server.responses import GENERATING_PATHS, as_api_error, error_response, is_open

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


log = logging.getLogger(__name__)


class HttpAccess:
    """Checks the API key and its limits, and records its name and the arrival time in the scope.

    A full queue refuses requests before their body is read. Unexpected exceptions become errors with a log id.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[RECEIVED] = time.monotonic()
        begun = False

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        with ExitStack() as taken:
            try:
                self._enter(scope, taken)
                await self._app(scope, receive, watched_send)
            except ApiError as error:
                self._service.metrics.rejected_total.labels(reason=error.reason).inc()
                await error_response(error, scope["path"])(scope, receive, send)
            except Exception as error:
                answer = error_response(as_api_error(error), scope["path"])
                if not begun:
                    await answer(scope, receive, send)

    def _enter(self, scope: Scope, taken: ExitStack) -> None:
        """Check API key, queue and key limits. Raises ApiError. `taken` frees the key's slot when the request ends."""
        keys = self._service.keys
        name = keys.name_of(Headers(scope=scope).get("authorization", ""))
        scope["spaceserve.key"] = name or ""
        if name is None and not is_open(scope["path"], scope["method"]):
            raise Unauthorized
        if name is not None and scope["method"] == "POST" and scope["path"] in GENERATING_PATHS:
            self._service.check_room()
            taken.enter_context(self._service.rate_limits[name].request())


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
