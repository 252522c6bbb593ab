"""The layer around all routes: who may come in, and an answer whatever happens inside."""

import logging
import time

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_router.api.answers import error_answer, unforeseen
from space_router.api.timing import RECEIVED
from space_router.api_keys import ApiKeys
from space_router.metrics import Metrics
from space_router.page.files import PAGE_FILES

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    {"/health", "/readyz", "/ping", "/livez", "/startupz", "/version", "/metrics", "/docs", "/openapi.json"}
)
"""What probes, scrapers and readers of the documentation reach without a key."""


def is_open(path: str, method: str) -> bool:
    """Needs no key. The page asks for one itself; `POST /` is not the page."""
    return path in OPEN_PATHS or (method in ("GET", "HEAD") and path in PAGE_FILES)


def key_of(request: Request) -> str:
    """The name of the API key that a request came with, a hash of it; "" where the server has no keys."""
    name: str = request.scope.get("spaceserve.key", "")
    return name


class Access:
    """ASGI middleware: checks the API key, notes its name and the time; an unforeseen exception gets an id."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], metrics: Metrics) -> None:
        self._app = app
        self._keys = ApiKeys(keys)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[RECEIVED] = time.monotonic()
        name = self._keys.name_of(Headers(scope=scope).get("authorization", ""))
        scope["spaceserve.key"] = name or ""
        if name is None and not is_open(scope["path"], scope["method"]):
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
