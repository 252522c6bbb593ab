"""Which prefixes are being computed on one worker, and by whom."""

from __future__ import annotations

from dataclasses import dataclass

from space_router.engine.cache.pages import PagePool
from space_router.engine.request.request_state import RequestState
from space_router.engine.request.sequence import SequenceStep, WorkerSequence


@dataclass(frozen=True)
class PendingPrefix:
    """A running request's prefill is about to compute a prefix that another could share."""

    leader: RequestState
    num_ids: int  # leading ids, in whole blocks, that both have in common


class PendingPrefixes:
    """Whole blocks of prompts, from their admission until they are known to the pool."""

    def __init__(self, pool: PagePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._by_key: dict[bytes, WorkerSequence] = {}  # keys of blocks that a prefill under way is to compute

    def to(self, live: RequestState) -> PendingPrefix | None:
        """Whose prefill will compute blocks that `live` could share, beyond those that are known; None: nobody's."""
        if not self._by_key or not live.request.share_prefix or live.wants_prompt_logprobs:
            return None
        num_whole = (len(live.ids) - 1) // self._block_size
        keys = live.keys(self._block_size, num_whole)
        start = num_promised = len(self._pool.known(keys[:num_whole]))
        leader = self._by_key.get(keys[start]) if start < num_whole else None
        while leader and num_promised < num_whole and self._by_key.get(keys[num_promised]) is leader:
            num_promised += 1
        return PendingPrefix(leader.live, num_promised * self._block_size) if leader else None

    def make(self, sequence: WorkerSequence) -> None:
        """Whole blocks of a prompt that has been admitted will be known."""
        live = sequence.live
        if not live.request.share_prefix or sequence.awaits_grammar:
            return
        sequence.num_promised = sequence.num_admitted // self._block_size
        for key in live.keys(self._block_size, sequence.num_promised)[sequence.num_published : sequence.num_promised]:
            self._by_key.setdefault(key, sequence)

    def end(self, sequence: WorkerSequence, num_blocks: int) -> None:
        """The first blocks are known now, or will not be computed here any more."""
        num_blocks = min(num_blocks, sequence.num_promised)
        if num_blocks <= sequence.num_published:
            return
        keys = sequence.live.keys(self._block_size, num_blocks)
        for key in keys[sequence.num_published : num_blocks]:
            if self._by_key.get(key) is sequence:
                del self._by_key[key]

    def check(self) -> None:
        """Raise ValueError where a sequence promises that does not run any more: for tests."""
        if any(sequence.step is SequenceStep.RELEASED for sequence in self._by_key.values()):
            raise ValueError("a sequence that was released still promises blocks")
