"""The layer around all routes: who may come in, and an answer whatever happens inside."""

import logging

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_router.api.answers import error_answer, unforeseen
from space_router.api_keys import ApiKeys
from space_router.metrics import Metrics

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/readyz", "/ping", "/livez", "/startupz", "/version", "/metrics"})
"""What probes and scrapers reach without a key."""


def key_of(request: Request) -> str:
    """The name of the API key that a request came with, a hash of it; "" where the server has no keys."""
    name: str = request.scope.get("spaceserve.key", "")
    return name


class Access:
    """ASGI middleware: checks the API key and notes its name; makes an unforeseen exception an error with an id."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], metrics: Metrics) -> None:
        self._app = app
        self._keys = ApiKeys(keys)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = self._keys.name_of(Headers(scope=scope).get("authorization", ""))
        scope["spaceserve.key"] = name or ""
        if name is None and scope["path"] not in OPEN_PATHS:
            self._metrics.rejected_total.labels(reason="unauthorized").inc()
            await error_answer(self._keys.refusal(), scope["path"])(scope, receive, send)
            return
        begun = False

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            answer = error_answer(unforeseen(error), scope["path"])
            if not begun:
                await answer(scope, receive, send)
