"""What is to be said to somebody who waits for it on the event loop, as steps bring it, or for so long in vain."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ReportQueue(Generic[T]):
    """A queue with one taker, who hears of long silences. A timer runs on over many messages: each only puts it off."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[T] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0  # of the taker's patience

    def put(self, said: T) -> None:
        """Say this; on the event loop."""
        self._waiting.append(said)
        self._wake()

    def put_from_thread(self, said: T) -> None:
        """Say this; on any other thread."""
        self._loop.call_soon_threadsafe(self.put, said)

    async def take(self, patience: float) -> T:
        """The next thing to say. Raises TimeoutError after `patience` seconds without one."""
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
        """Nobody waits any more."""
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
        if self._loop.time() < self._deadline:  # it was put off
            self._set_timer()
        else:
            self._wake()
