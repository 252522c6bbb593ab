"""The queue of texts for the workers' encoder, beside that of sequences, for encoding takes no pages and no steps.

An encoding is cut into chunks, and each chunk goes to any worker. Chunks of different API keys alternate. If a worker
is lost, its chunks go to other workers.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable

from space_router.engine.errors import EngineError, QueueFull, QueueTimeout, RequestFailed, WorkerFailed
from space_router.engine.queueing.queue import EXPECTED_SHARE
from space_router.engine.request.encoding import CHUNK_IDS, Chunk, EncodedPart, Encoding, chunks_of
from space_router.engine.scheduler import Scheduler

CHUNKS_AHEAD = 2  # at a worker at once: one that it encodes, and the next
MAX_CRASHES = 2  # of workers that had a chunk, after which its encoding fails
MAX_LOSSES = 5  # of workers for whatever reason
SECONDS_PER_ID = 0.001  # before any was encoded
MIN_MEASURED = 8  # reports before the bound on seconds holds
MAX_RETRY_AFTER = 60.0


class EncodingQueue:
    """Encodings that wait, and those at workers."""

    def __init__(
        self, max_waiting: int, max_ids: int, *, clock: Callable[[], float], max_seconds: float = math.inf
    ) -> None:
        """`max_waiting`: encodings that wait; `max_ids`: of their texts. One alone may have any number. `max_seconds`:
        longest wait; one that is expected to wait more than EXPECTED_SHARE of it is refused."""
        self._max_waiting, self._max_ids, self._max_seconds = max_waiting, max_ids, max_seconds
        self._clock = clock
        self._waiting: dict[str, deque[Chunk]] = {}  # by key; the first key's turn is next
        self._open: set[Encoding] = set()
        self._num_ids = 0  # of texts that are not encoded
        self._seconds_per_id = SECONDS_PER_ID  # moving average of what the workers achieve together
        self._num_measured = 0  # reports from which that is known
        self._last: float | None = None  # when a report came, if texts were missing after it
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_running(self) -> int:
        """Encodings that have begun."""
        return len(self._open) - self.num_queued

    @property
    def num_queued(self) -> int:
        """Encodings none of whose texts is at a worker or encoded."""
        heads = (chunk for chunks in self._waiting.values() for chunk in chunks)
        waiting: dict[Encoding, int] = {}
        for chunk in heads:
            waiting[chunk.encoding] = waiting.get(chunk.encoding, 0) + len(chunk.numbers)
        return sum(number == len(encoding.texts) for encoding, number in waiting.items())

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the texts that are at no worker and not encoded."""
        return sum(chunk.num_ids for chunks in self._waiting.values() for chunk in chunks)

    @property
    def retry_after(self) -> float:
        """Seconds in which all texts are encoded, about."""
        return max(1.0, min(MAX_RETRY_AFTER, self._num_ids * self._seconds_per_id))

    def expected_wait(self, key: str) -> float:
        """Return the seconds until a further encoding of this key begins: keys take turns, chunk by chunk."""
        waiting = {one: sum(chunk.num_ids for chunk in chunks) for one, chunks in self._waiting.items()}
        own = waiting.pop(key, 0)
        at_workers = self._num_ids - own - sum(waiting.values())
        before = at_workers + own + sum(min(ids, own + CHUNK_IDS) for ids in waiting.values())
        return before * self._seconds_per_id

    def refusal(self, key: str) -> QueueFull | None:
        """Return the error for an encoding of this key that would have to wait; None if it may."""
        if not self._open:
            return None
        seconds = self.retry_after
        if self._num_measured >= MIN_MEASURED and self._waiting:
            late = self.expected_wait(key) - EXPECTED_SHARE * self._max_seconds
            if late > 0:
                limit = f"what begins within {self._max_seconds:g} s"
                late = max(1.0, min(MAX_RETRY_AFTER, late))
                return QueueFull(f"{len(self._open)} embedding requests", limit, retry_after=late)
        if len(self._open) > self._max_waiting:
            return QueueFull(f"{len(self._open)} embedding requests", f"{self._max_waiting}", retry_after=seconds)
        if self._num_ids >= self._max_ids:
            return QueueFull(f"{self._num_ids} tokens to embed", f"{self._max_ids}", retry_after=seconds)
        return None

    def push(self, encoding: Encoding) -> None:
        """Add an encoding. Raises QueueFull."""
        if (full := self.refusal(encoding.key)) is not None:
            raise full
        self._open.add(encoding)
        self.idle.clear()
        chunks = list(chunks_of(encoding))
        self._num_ids += sum(chunk.num_ids for chunk in chunks)
        self._waiting.setdefault(encoding.key, deque()).extend(chunks)

    def dispatch(self, schedulers: Iterable[Scheduler]) -> None:
        """Give chunks to the workers that have room, the least busy first."""
        able = [one for one in schedulers if one.facts.encoder is not None and not one.closing]
        while self._waiting and able:
            scheduler = min(able, key=lambda one: len(one.encodings))
            if len(scheduler.encodings) >= CHUNKS_AHEAD:
                return
            if scheduler.runs_suspect:  # a crash must be its own
                able.remove(scheduler)
                continue
            scheduler.encode(self._next())

    def _next(self) -> Chunk:
        """Take the next chunk, of the API key that waited longest."""
        key = next(iter(self._waiting))
        chunks = self._waiting.pop(key)
        chunk = chunks.popleft()
        chunk.encoding.has_begun = True
        if chunks:
            self._waiting[key] = chunks  # at the end
        return chunk

    def encoded(self, part: EncodedPart) -> None:
        """Apply what a worker reports of a chunk that is at it."""
        chunk, message, vectors = part
        encoding = chunk.encoding
        if encoding not in self._open:
            return
        if message.error:
            self.end(encoding, RequestFailed(message.error))
            return
        if message.returned:
            self.requeue(chunk, was_lost=False)
            return
        now, num_ids = self._clock(), 0
        for number, values in zip(message.numbers, vectors, strict=True):
            place = chunk.numbers[number]
            if encoding.values[place] is None:
                encoding.values[place] = values
                encoding.num_missing -= 1
                num_ids += len(encoding.texts[place].ids)
        self._num_ids -= num_ids
        if self._last is not None and num_ids:
            self._num_measured += 1
            self._seconds_per_id += 0.1 * ((now - self._last) / num_ids - self._seconds_per_id)
        self._last = now if self._num_ids else None
        if not encoding.num_missing:
            if not encoding.done.done():
                encoding.done.set_result(None)
            self._forget(encoding)

    def requeue(self, chunk: Chunk, *, was_lost: bool = True, has_crashed: bool = False) -> None:
        """Queue what is missing of a chunk again, before others of its key. An encoding with which workers are lost
        again and again fails. `was_lost`: its worker, which else handed it back; `has_crashed`: by itself."""
        encoding = chunk.encoding
        if encoding not in self._open:
            return
        missing = [number for number in chunk.numbers if encoding.values[number] is None]
        num_losses, num_crashes = chunk.num_losses + was_lost, chunk.num_crashes + has_crashed
        if num_crashes >= MAX_CRASHES or num_losses >= MAX_LOSSES:
            self.end(encoding, WorkerFailed(f"{num_losses} workers were lost while they encoded these texts."))
        elif missing:
            again = Chunk(encoding, missing, num_losses, num_crashes)
            self._waiting.setdefault(encoding.key, deque()).appendleft(again)

    def end(self, encoding: Encoding, error: EngineError) -> None:
        """End an encoding with an error; what is at workers is to be stopped by the caller."""
        if encoding in self._open:
            self._num_ids -= sum(
                len(text.ids) for text, values in zip(encoding.texts, encoding.values, strict=True) if values is None
            )
            self._forget(encoding)
        encoding.fail(error)

    def end_late(self, encoding: Encoding) -> None:
        """End an encoding that has waited for `max_seconds`, with QueueTimeout, unless a part of it has begun."""
        if not encoding.has_begun:
            self.end(encoding, QueueTimeout(self._max_seconds, retry_after=self.retry_after))

    def end_all(self, error: EngineError, *, not_begun: EngineError | None = None) -> None:
        """End every encoding with an error; `not_begun`: of those that no worker has a part of, None: the same."""
        for encoding in list(self._open):
            self.end(encoding, error if not_begun is None or encoding.has_begun else not_begun)

    def _forget(self, encoding: Encoding) -> None:
        self._open.discard(encoding)
        left = {
            key: deque(chunk for chunk in chunks if chunk.encoding is not encoding)
            for key, chunks in self._waiting.items()
        }
        self._waiting = {key: chunks for key, chunks in left.items() if chunks}
        if not self._open:
            self._last = None
            self.idle.set()

    def check(self) -> None:
        """Raise ValueError if the counts are wrong. For tests."""
        missing = sum(
            len(text.ids)
            for encoding in self._open
            for text, values in zip(encoding.texts, encoding.values, strict=True)
            if values is None
        )
        if missing != self._num_ids or any(not chunks for chunks in self._waiting.values()):
            raise ValueError(f"{missing} ids are to be encoded; {self._num_ids} are counted")
