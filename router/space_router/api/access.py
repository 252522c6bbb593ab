"""ASGI middleware around all routes: API keys, rate limits, and error responses."""

import logging
import time
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_router.api.service import Service
from space_router.api.timing import RECEIVED
from space_router.errors import ApiError
from space_router.http_server.answers import error_answer, unforeseen
from space_router.http_server.paths import GENERATING_PATHS, is_open

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
                await error_answer(error, scope["path"])(scope, receive, send)
            except Exception as error:
                answer = error_answer(unforeseen(error), scope["path"])
                if not begun:
                    await answer(scope, receive, send)

    def _enter(self, scope: Scope, taken: ExitStack) -> None:
        """Check API key, queue and key limits. Raises ApiError. `taken` frees the key's slot when the request ends."""
        keys = self._service.keys
        name = keys.name_of(Headers(scope=scope).get("authorization", ""))
        scope["spaceserve.key"] = name or ""
        if name is None and not is_open(scope["path"], scope["method"]):
            raise keys.refusal()
        if name is not None and scope["method"] == "POST" and scope["path"] in GENERATING_PATHS:
            self._service.check_room()
            taken.enter_context(self._service.allowances.of(name).request())
