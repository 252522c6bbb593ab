"""Work that is cancelled when the client disconnects."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, ParamSpec, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from space_router.errors import ClientGone

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")


async def _gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The body must have been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancels it and raises ClientGone if the client disconnects first."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGone("The client went away.")
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


LONG_BODY = 16 * 1024
"""Body size in bytes from which a prompt is tokenised in a thread: about 40 ms of work with a slow tokenizer."""


async def beside(size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function on a body of `size` bytes; a long body in a thread, so that running streams are not delayed."""
    if size < LONG_BODY:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class EventStream(Response):
    """A response of server-sent events. `scope` stays open until the last one is sent or the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        scope: AbstractAsyncContextManager[Any],
        headers: Mapping[str, str],
        request_id: str,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._events = events
        self._scope = scope
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._scope:
            try:
                await while_connected(receive, self._send(send))
            except ClientGone:
                log.info("request %s: 499, the client went away during the stream", self._request_id)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
