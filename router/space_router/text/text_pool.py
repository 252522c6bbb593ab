"""One bounded, fair pool for everything that turns long texts into tokens, or messages into prompts.

Work is charged by bytes. A job gives way between the pieces of a text, so a short one passes a long one, and clients
with different API keys take turns by the bytes that they have had.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from space_router.errors import Overloaded

T = TypeVar("T")
P = ParamSpec("P")

LONG_BODY = 16 * 1024
"""Body size in bytes from which a text is tokenised in the pool: about 40 ms of work with a slow tokenizer."""

EVENT_LOOP_SHARE, EVENT_LOOP_BURST = 0.25, 0.1
"""Short texts may take this share of the event loop's time, and this many seconds at once; more are for the pool."""

MAX_BYTES = 64 * 1024**2  # of all bodies in the pool together
_MAX_THREADS = 32  # jobs that have begun; only `num_running` of them compute
_MAX_THREADS_PER_KEY = 8
_BYTES_PER_SECOND = 1_000_000  # of a slow tokenizer; for Retry-After


class NeedsThread(Exception):
    """Work that was begun on the event loop takes too long there. It is pure, and begins again in a thread."""


class Abandoned(Exception):
    """The client of this job is gone, and its result is not needed."""


@dataclass(eq=False)
class _Job:
    key: str
    size: int
    order: int
    begin: Callable[[], None]
    num_served: int = 0  # bytes
    has_begun: bool = False
    abandoned: bool = False
    turn: threading.Event = field(default_factory=threading.Event)


_job: contextvars.ContextVar[tuple[TextPool, _Job] | None] = contextvars.ContextVar("text_job", default=None)


def checkpoint(num_bytes: int) -> None:
    """Charge the running job, and let another have its turn. Outside the pool it does nothing. Raises Abandoned."""
    if (mine := _job.get()) is not None:
        pool, job = mine
        pool._checkpoint(job, num_bytes)


_on_event_loop: contextvars.ContextVar[bool] = contextvars.ContextVar("on_event_loop", default=False)


def is_on_event_loop() -> bool:
    """Whether this work holds the event loop, so that all requests wait for it."""
    return _on_event_loop.get()


def leave_event_loop() -> None:
    """Raise NeedsThread if this work holds the event loop."""
    if is_on_event_loop():
        raise NeedsThread


def charge_seconds(seconds: float) -> None:
    """Charge the running job for its time in another process, and let another have its turn. Raises Abandoned."""
    checkpoint(int(_BYTES_PER_SECOND * seconds))


@contextmanager
def away() -> Iterator[None]:
    """Let another job have its turn while a process works for the running one. Raises Abandoned."""
    mine = _job.get()
    if mine is None:
        yield
        return
    pool, job = mine
    pool._leave(job)
    try:
        yield
    finally:
        pool._return(job)
    if job.abandoned:
        raise Abandoned


class TextPool:
    """Runs jobs in threads, `num_running` at a time.

    await pool.run("key's name", size, tokenizer.encode, text)
    """

    def __init__(self, num_running: int | None = None, max_bytes: int = MAX_BYTES) -> None:
        """`max_bytes`: of all bodies in the pool; one API key gets half of it."""
        self._max_bytes = max_bytes
        self._num_free = num_running or max(1, len(os.sched_getaffinity(0)) // 4)
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="text")
        self._lock = threading.Lock()
        self._waiting: list[_Job] = []
        self._served: dict[str, int] = {}  # bytes, by key; only of keys with jobs
        self._num_begun: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()  # of bodies in the pool, by key
        self._order = itertools.count()
        self._spent, self._spent_at = 0.0, 0.0  # seconds of the event loop, less its share since; when

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies in the pool."""
        return self._num_bytes.total()

    async def run(self, key: str, size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns for a body of `size` bytes; most short ones are not worth a thread.

        Raises Overloaded if there is no room for the body. A cancelled job ends at its next checkpoint.
        """
        if size < LONG_BODY:
            with contextlib.suppress(NeedsThread):
                return self.attempt(function, *args, **kwargs)
        return await self.run_in_thread(key, size, function, *args, **kwargs)

    def attempt(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns on the event loop.

        Raises NeedsThread if the loop has spent its time for such work, or if the function leaves it.
        """
        now = time.monotonic()
        self._spent = max(0.0, self._spent - EVENT_LOOP_SHARE * (now - self._spent_at))
        self._spent_at = now
        if self._spent > EVENT_LOOP_BURST:
            raise NeedsThread
        begun, token = time.thread_time(), _on_event_loop.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _on_event_loop.reset(token)
            self._spent += time.thread_time() - begun

    async def run_in_thread(
        self, key: str, size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `run`, however short the body is."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            _job.set((self, job))
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                finish: tuple[Callable[[Any], None], Any] = (done.set_exception, error)
            else:
                finish = (done.set_result, result)
            finally:
                _job.set(None)
                self._end(job)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, done, *finish)

        context = contextvars.copy_context()  # of the request: warnings, spans

        def begin() -> None:
            self._threads.submit(context.run, work)

        job = _Job(key, max(1, size), next(self._order), begin)
        self._admit(job)
        try:
            return await done
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _admit(self, job: _Job) -> None:
        with self._lock:
            total, own = self.num_bytes + job.size, self._num_bytes[job.key] + job.size
            most = self._max_bytes // 2 if job.key else self._max_bytes
            # A body always fits into an empty pool, however large `--max-body` is.
            if (total > self._max_bytes and total > job.size) or (own > most and own > job.size):
                whose = "This API key has" if own > most else "The server has"
                raise Overloaded(
                    f"{whose} {(own if own > most else total) - job.size} bytes of text to tokenise already. Try again "
                    "later.",
                    retry_after=(total - job.size) / _BYTES_PER_SECOND,
                )
            if not self._num_bytes[job.key]:  # a key saves nothing up while it is away
                self._served[job.key] = min(self._served.values(), default=0)
            self._num_bytes[job.key] += job.size
            self._waiting.append(job)
            self._dispatch()

    def _checkpoint(self, job: _Job, num_bytes: int) -> None:
        with self._lock:
            job.num_served += num_bytes
            self._served[job.key] += num_bytes
            best = self._best()
            if best is not None and self._rank(best) < self._rank(job):
                self._num_free += 1
                job.turn.clear()
                self._waiting.append(job)
                self._dispatch()
        job.turn.wait()
        if job.abandoned:
            raise Abandoned

    def _leave(self, job: _Job) -> None:
        with self._lock:
            self._num_free += 1
            job.turn.clear()
            self._dispatch()

    def _return(self, job: _Job) -> None:
        with self._lock:
            self._waiting.append(job)
            self._dispatch()
        job.turn.wait()

    def _end(self, job: _Job) -> None:
        with self._lock:
            self._num_free += 1
            self._num_begun[job.key] -= 1
            self._forget(job)
            self._dispatch()

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.abandoned = True
            if not job.has_begun and job in self._waiting:
                self._waiting.remove(job)
                self._forget(job)

    def _forget(self, job: _Job) -> None:
        self._num_bytes[job.key] -= job.size
        if not self._num_bytes[job.key]:
            del self._num_bytes[job.key], self._num_begun[job.key]
            self._served.pop(job.key, None)

    def _rank(self, job: _Job) -> tuple[int, int, int]:
        if job.abandoned:  # ends at once, and frees its memory
            return -1, 0, job.order
        return self._served[job.key], job.num_served, job.order

    def _best(self) -> _Job | None:
        has_room = self._num_begun.total() < _MAX_THREADS
        able = (
            job
            for job in self._waiting
            if job.has_begun or (has_room and self._num_begun[job.key] < _MAX_THREADS_PER_KEY)
        )
        return min(able, key=self._rank, default=None)

    def _dispatch(self) -> None:
        """Give the free turns away. The lock is held."""
        while self._num_free > 0 and (job := self._best()) is not None:
            self._waiting.remove(job)
            self._num_free -= 1
            job.turn.set()
            if not job.has_begun:
                job.has_begun = True
                self._num_begun[job.key] += 1
                job.begin()


def _settle(future: asyncio.Future[Any], finish: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        finish(value)
