"""The stream of one request's output."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from space_router.engine.errors import EngineError
from space_router.engine.request.request import Delta, Statistics, ValidRequest


class Stream:
    """Yields the deltas of one request. Leaving the block early cancels the request and frees its pages.

        async with engine.submit(request) as stream:
            async for delta in stream:
                ...

    The iterator raises `errors.Broken` after all earlier deltas. `statistics` may be read at any time. If the reader is
    more than `max_lag` tokens behind, its request gets no more pages until it has caught up; others are not affected.
    """

    def __init__(
        self,
        request: ValidRequest,
        statistics: Statistics,
        *,
        max_lag: int,
        on_leave: Callable[[], None],
        on_caught_up: Callable[[], None],
    ) -> None:
        self.request = request
        self.statistics = statistics
        self._max_lag = max_lag
        self._on_leave = on_leave
        self._on_caught_up = on_caught_up
        self._deltas: deque[Delta] = deque()
        self._num_unread = 0  # tokens in _deltas
        self._lagging = False
        self._ended = False
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def lagging(self) -> bool:
        """Whether the reader is so far behind that the request gets no more pages."""
        return self._lagging

    @property
    def num_unread(self) -> int:
        """Tokens produced and not yet read."""
        return self._num_unread

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancel the request if it has not ended, as leaving the block does."""
        self._on_leave()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.read()

    def read(self) -> Delta:
        """Return the next delta without waiting. Raises IndexError if none is ready (see `num_ready`)."""
        delta = self._deltas.popleft()
        self._num_unread -= len(delta.tokens)
        if self._lagging and self._num_unread <= self._max_lag // 2:
            self._lagging = False
            self._on_caught_up()
        return delta

    @property
    def num_ready(self) -> int:
        """Deltas that can be read without waiting."""
        return len(self._deltas)

    @property
    def error(self) -> EngineError | None:
        """The error raised after the last delta, if any."""
        return self._error

    # For the engine.

    def push(self, delta: Delta) -> None:
        """Append a delta; one with `finish` is the last."""
        if self._ended:
            return
        self._deltas.append(delta)
        self._num_unread += len(delta.tokens)
        self._lagging = self._lagging or self._num_unread > self._max_lag
        self._ended = delta.finish is not None
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error, raised after the deltas pushed before."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
