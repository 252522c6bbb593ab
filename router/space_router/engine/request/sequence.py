"""The router's view of one admission of one request to one worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from space_proto import worker_pb2

from space_router.engine.request.request import Delta
from space_router.engine.request.request_state import RequestState


class SequenceUpdate(NamedTuple):
    """One report's news of one request."""

    live: RequestState
    delta: Delta  # without prompt logprobs that were delivered in an earlier admission
    part: worker_pb2.SequenceReport  # the message, for rarely used fields


@dataclass
class ReportResult:
    """The effects of one report."""

    updates: list[SequenceUpdate] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)  # number of tokens of each update that is a decode step
    readmit: list[RequestState] = field(default_factory=list)  # preempted and released: to be queued again


MAX_BLOCKS_AHEAD = 4  # blocks granted beyond the known ids; bounds the output for a reader that does not read
STEPS_AHEAD = 8  # steps that fit into the granted slots, so that a late router does not shorten the drafts
SCARCE_SHARE = 4  # divides the slots granted ahead when pages are scarce


class SequenceStep(Enum):
    """State of a sequence in the worker, according to its reports."""

    PREFILL = "prefill"
    DECODE = "decode"
    RELEASED = "released"  # Release is sent: its pages come back when the worker acknowledges


class WorkerSequence:
    """The pages and computed length of one admission; the ids belong to the request.

    [0 ..... computed) [computed ..... num_slots)
     keys and values    free slots; without any the worker pauses the sequence
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
        """`num_drafted`: expected drafts per step; `most_slots`: maximum slots that it can use."""
        self.seq_id = seq_id
        self.live = live
        self.pages = pages
        self.computed = num_cached
        self.num_published = num_cached // block_size  # leading blocks that are in the prefix cache
        self.num_pending = self.num_published  # leading blocks that are in the prefix cache or being prefilled
        self.num_admitted = len(live.ids)  # ids at admission; all computed when the first token arrives
        self.step = SequenceStep.PREFILL
        self.num_prompt_logprobs = 0  # prompt ids whose logprobs this admission has reported
        self.awaits_grammar = False  # the worker may be compiling its grammar, and computes nothing meanwhile
        self.finished = False  # the worker has reported its end
        self.num_expected = 0  # once released: blocks that the acknowledgement will free
        self._block_size = block_size
        self._num_drafted = num_drafted
        self._most_slots = most_slots

    @property
    def num_slots(self) -> int:
        return len(self.pages) * self._block_size

    @property
    def out_of_slots(self) -> bool:
        """Whether it has no free slot, so that the worker has paused it or will before its next step."""
        return self.num_slots <= self.computed

    @property
    def num_prefill_left(self) -> int:
        """Ids to prefill before the first token of this admission."""
        return self.num_admitted - self.computed if self.step is SequenceStep.PREFILL else 0

    def drafted(self, num_drafted: int) -> None:
        """Update the expected drafts per step: up to `num_drafted` at once, down by one per step."""
        self._num_drafted = max(num_drafted, self._num_drafted - 1)

    @property
    def slots_ahead(self) -> int:
        """Slots to grant beyond the known ids while pages are plentiful.

        Enough for `STEPS_AHEAD` steps with the expected drafts. Even with none expected there is room for seven drafts,
        so the worker can begin to draft more.
        """
        return min(STEPS_AHEAD * (self._num_drafted + 1), MAX_BLOCKS_AHEAD * self._block_size)

    @property
    def has_enough_slots(self) -> bool:
        """Whether it has all slots that it would get with plentiful pages."""
        num_slots = len(self.pages) * self._block_size
        return len(self.live.ids) + self.slots_ahead <= num_slots or self._most_slots <= num_slots

    def num_wanted(self, *, scarce: bool) -> int:
        """Return the blocks to add, so that the worker can continue while its report is processed.

        Fewer if pages are `scarce`; none if the reader lags.
        """
        ahead = self.slots_ahead // SCARCE_SHARE if scarce else self.slots_ahead
        slots = min(len(self.live.ids) + ahead, self._most_slots)
        if slots <= self.num_slots or self.live.lagging:
            return 0
        return -(-slots // self._block_size) - len(self.pages)
