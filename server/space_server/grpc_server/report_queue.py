"""A queue from the stepping thread to the event loop, with a timeout that is cheap per message."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ReportQueue(Generic[T]):
    """A queue with one consumer. One timer serves many messages: each only moves its deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[T] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0  # when `take` times out

    def put(self, message: T) -> None:
        """Add a message; call on the event loop."""
        self._waiting.append(message)
        self._wake()

    def put_from_thread(self, message: T) -> None:
        """Add a message; call on any other thread."""
        self._loop.call_soon_threadsafe(self.put, message)

    async def take(self, patience: float) -> T:
        """Return the next message. Raises TimeoutError after `patience` seconds without one."""
        self._deadline = self._loop.time() + patience
        while not self._waiting:
            if self._loop.time() >= self._deadline:
                raise TimeoutError
            if self._timer is None or self._timer.when() > self._deadline:
                self._set_timer()
            self._taker = self._loop.create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        return self._waiting.popleft()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def _set_timer(self) -> None:
        self.close()
        self._timer = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:  # the deadline has moved
            self._set_timer()
        else:
            self._wake()
