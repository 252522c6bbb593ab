"""Prefixes that running requests are computing on one worker."""

from __future__ import annotations

from dataclasses import dataclass

from space_router.engine.cache.pages import PagePool
from space_router.engine.request.request_state import RequestState
from space_router.engine.request.sequence import SequenceStep, WorkerSequence


@dataclass(frozen=True)
class PendingPrefix:
    """A prefix that a running request is computing and another request could share."""

    leader: RequestState
    num_ids: int  # common leading ids, in full blocks


class PendingPrefixes:
    """The full blocks of admitted prompts until they are in the prefix cache."""

    def __init__(self, pool: PagePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._by_key: dict[bytes, WorkerSequence] = {}  # key of a block -> sequence whose prefill computes it

    def find(self, live: RequestState) -> PendingPrefix | None:
        """Return the pending prefix that `live` could share beyond the cached one, or None."""
        if not self._by_key or not live.request.share_prefix or live.wants_prompt_logprobs:
            return None
        num_whole = (len(live.ids) - 1) // self._block_size
        keys = live.keys(self._block_size, num_whole)
        start = num_pending = len(self._pool.lookup_prefix(keys[:num_whole]))
        leader = self._by_key.get(keys[start]) if start < num_whole else None
        while leader and num_pending < num_whole and self._by_key.get(keys[num_pending]) is leader:
            num_pending += 1
        return PendingPrefix(leader.live, num_pending * self._block_size) if leader else None

    def add(self, sequence: WorkerSequence) -> None:
        """Add the full blocks of an admitted prompt."""
        live = sequence.live
        if not live.request.share_prefix or sequence.awaits_grammar:
            return
        sequence.num_pending = sequence.num_admitted // self._block_size
        for key in live.keys(self._block_size, sequence.num_pending)[sequence.num_published : sequence.num_pending]:
            self._by_key.setdefault(key, sequence)

    def discard(self, sequence: WorkerSequence, num_blocks: int) -> None:
        """Remove a sequence's first `num_blocks` blocks: they are cached now, or will not be computed."""
        num_blocks = min(num_blocks, sequence.num_pending)
        if num_blocks <= sequence.num_published:
            return
        keys = sequence.live.keys(self._block_size, num_blocks)
        for key in keys[sequence.num_published : num_blocks]:
            if self._by_key.get(key) is sequence:
                del self._by_key[key]

    def check(self) -> None:
        """Raise ValueError if a released sequence has pending blocks. For tests."""
        if any(sequence.step is SequenceStep.RELEASED for sequence in self._by_key.values()):
            raise ValueError("a released sequence still has pending blocks")
