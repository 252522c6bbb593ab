"""The layer around all routes: who may come in, and an answer whatever happens inside."""

import hashlib
import hmac
import logging

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_router.api.answers import error_answer, unforeseen
from space_router.errors import Unauthorized
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
        self._keys = [key.encode() for key in keys]
        self._names = [hashlib.sha256(key).hexdigest()[:16] for key in self._keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = self._name(Headers(scope=scope)) if self._keys else ""
        scope["spaceserve.key"] = name or ""
        if name is None and scope["path"] not in OPEN_PATHS:
            error = Unauthorized("The API key is missing or not known. Send `Authorization: Bearer KEY`.")
            self._metrics.rejected_total.labels(reason="unauthorized").inc()
            await error_answer(error, scope["path"])(scope, receive, send)
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

    def _name(self, headers: Headers) -> str | None:
        """The name of the key that was sent; compares with all, in time that does not depend on which one fits."""
        # Headers are bytes that were read as Latin-1.
        kind, _, given = headers.get("authorization", "").partition(" ")
        offered = given.strip().encode("latin-1") if kind.lower() == "bearer" else b""
        known = [hmac.compare_digest(offered, key) for key in self._keys]
        return self._names[known.index(True)] if any(known) else None
