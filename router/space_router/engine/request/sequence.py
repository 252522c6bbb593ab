"""The router's view of one admission of one request to one worker."""

from __future__ import annotations

from enum import Enum

from space_router.engine.request.request_state import RequestState

MAX_BLOCKS_AHEAD = 4  # bounds what a worker can produce for a reader that does not read
STEPS_AHEAD = 8  # steps that fit the granted slots, so that a router that is late does not shorten the drafts
SCARCE_SHARE = 4  # of the slots ahead at ease, one in so many where pages are scarce


class SequenceStep(Enum):
    """What a sequence does in the worker, as far as reports tell."""

    PREFILL = "prefill"
    DECODE = "decode"
    RELEASED = "released"  # Release is sent: its pages come back when the worker acknowledges


class WorkerSequence:
    """Ids are the request's; pages and computed length are this admission's.

    [0 ..... computed) [computed ..... num_slots)
     keys and values    free slots: at 0 the worker pauses the sequence
    """

    def __init__(
        self,
        seq_id: int,
        live: RequestState,
        pages: list[int],
        num_cached: int,
        *,
        block_size: int,
        num_drafted: int,
        most_slots: int,
    ) -> None:
        """`num_drafted`: drafts it will probably lay out in a step; `most_slots`: more it can never use."""
        self.seq_id = seq_id
        self.live = live
        self.pages = pages
        self.computed = num_cached
        self.num_published = num_cached // block_size  # leading blocks that are known to the pool
        self.num_promised = self.num_published  # leading blocks that are known or being computed by its prefill
        self.num_admitted = len(live.ids)  # ids at admission: computed once the first token is there
        self.step = SequenceStep.PREFILL
        self.num_prompt_logprobs = 0  # prompt ids whose logprobs this admission has reported
        self.awaits_grammar = False  # the worker may still have to compile it: nothing is computed meanwhile
        self.finished = False  # the worker says it has ended
        self.num_expected = 0  # once released: blocks that will come back with the acknowledgement
        self._block_size = block_size
        self._num_drafted = num_drafted
        self._most_slots = most_slots

    @property
    def num_slots(self) -> int:
        return len(self.pages) * self._block_size

    @property
    def out_of_slots(self) -> bool:
        """No free slot: the worker has paused it, or will before its next step."""
        return self.num_slots <= self.computed

    @property
    def num_prefill_left(self) -> int:
        """Ids the worker must still compute before the first token of this admission."""
        return self.num_admitted - self.computed if self.step is SequenceStep.PREFILL else 0

    def drafted(self, num_drafted: int) -> None:
        """A decode step laid out so many drafts: more are expected at once, fewer one by one."""
        self._num_drafted = max(num_drafted, self._num_drafted - 1)

    @property
    def slots_ahead(self) -> int:
        """Slots to grant beyond the known ids, at ease: some steps as it drafts now. With the slots that plain decoding
        gets for eight steps the worker can lay out seven drafts at any time, and so show that it wants more.
        """
        return min(STEPS_AHEAD * (self._num_drafted + 1), MAX_BLOCKS_AHEAD * self._block_size)

    @property
    def at_ease(self) -> bool:
        """It has the slots that it would be granted if there were plenty."""
        num_slots = len(self.pages) * self._block_size
        return len(self.live.ids) + self.slots_ahead <= num_slots or self._most_slots <= num_slots

    def num_wanted(self, *, scarce: bool) -> int:
        """Blocks to add, so that the worker can go on while a report is being read: fewer where pages are scarce, none
        for a reader that lags.
        """
        ahead = self.slots_ahead // SCARCE_SHARE if scarce else self.slots_ahead
        slots = min(len(self.live.ids) + ahead, self._most_slots)
        if slots <= self.num_slots or self.live.lagging:
            return 0
        return -(-slots // self._block_size) - len(self.pages)
