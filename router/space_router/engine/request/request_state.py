"""A request in the engine, to be run again on any worker, and the router's view of each of its admissions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from space_proto import worker_pb2

from space_router.engine.pages import BlockKeys
from space_router.engine.request.encoding import EncodedPart
from space_router.engine.request.request import Delta, Statistics, Stream, ValidRequest
from space_router.engine.state_cache import HeldState


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Takes a delay in seconds and the function to call then."""


def call_later_on_loop(seconds: float, action: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, action)


class Phase(Enum):
    """A request's place in its life cycle."""

    PARKED = "parked"  # waits outside the queue's order, for a shared prefix or for its reader
    QUEUED = "queued"
    RUNNING = "running"  # admitted to a worker
    LEAVING = "leaving"  # preempted: queued again once the worker has acknowledged the release
    ENDED = "ended"


class RequestState:
    """One request from submission to its last token, over all its admissions."""

    def __init__(self, request: ValidRequest, max_tokens: int, age: int, submitted: float) -> None:
        self.request = request
        self.num_prompt = len(request.prompt_ids)
        self.max_tokens = max_tokens  # resolved: never None, and it fits
        self.age = age  # order of arrival: the lowest is the oldest
        self.submitted = submitted  # seconds on the engine's clock
        self.ids = list(request.prompt_ids)  # prompt, then emitted ids
        self.phase = Phase.QUEUED
        self.followers: list[RequestState] = []  # parked until this one has computed the prefix they share
        self.awaited_ids = 0  # as a follower: ids that its leader must have computed
        self.num_waits = 0  # times it has waited for a shared prefix
        self.near_at = math.inf  # seconds on the engine's clock from which its deadline is near
        self.num_charged: float | None = None  # tokens charged to its key; None before its first admission
        self.instruction_set = ""  # of the worker that computed its first token; "": not known
        self.num_suspicions = 0  # workers that ended, not known to be killed from outside, while running it
        self.probation_until: int | None = None  # suspect until it has generated so many ids; None: not a suspect
        self.num_prompt_logprobs = 0  # prompt ids whose logprobs were delivered
        self.last_token: float | None = None  # seconds on the engine's clock
        self.deadline: Timer | None = None
        self.statistics = Statistics(num_prompt=self.num_prompt)
        self.stream: Stream | None = None  # None only in tests of the scheduler
        self.is_long = False  # its keys and values have the rotary angles of a long sequence (LongRoPE)
        self._keys: dict[tuple[int, bool], BlockKeys] = {}

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def deadline_at(self) -> float:
        return math.inf if self.request.deadline is None else self.submitted + self.request.deadline

    @property
    def is_suspect(self) -> bool:
        """Whether it may have crashed a worker and must run alone."""
        return self.probation_until is not None

    @property
    def least_left(self) -> int:
        """Minimum ids that must still be generated before it can end."""
        if not self.request.can_end_early:
            return self.max_tokens - self.num_generated
        return max(1, self.request.sampling.min_tokens - self.num_generated)

    @property
    def final_slots(self) -> int:
        """Maximum cache slots of this request: prompt, output and one more."""
        return self.num_prompt + self.max_tokens + 1

    @property
    def lagging(self) -> bool:
        """Whether its reader is so far behind that it gets no more pages."""
        return self.stream is not None and self.stream.lagging

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether requested prompt logprobs are still missing; the first prompt id has none."""
        return self.request.num_prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt - 1

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether all ids of its prompt must be computed, even where keys and values are cached."""
        return self.wants_prompt_logprobs or self.request.pooling == "mean"

    def keys(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Return the prefix cache keys of at least the first `num_blocks` full blocks of `ids`."""
        kind = block_size, self.is_long
        if kind not in self._keys:
            self._keys[kind] = BlockKeys(self.request.prefix_salt(is_long=self.is_long), block_size)
        return self._keys[kind].first_keys(self.ids, num_blocks)

    def choose_angles(self, rope_switch: int) -> None:
        """Choose the rotary angles of its next admission. `rope_switch`: ids beyond which they are those of a long
        sequence; 0: all sequences have the same."""
        self.is_long = 0 < rope_switch < len(self.ids)


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
    encoded: list[EncodedPart] = field(default_factory=list)
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
        self.held_states: list[HeldState] = []  # recurrent states that it is to keep, by position
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
        so the worker can begin to draft more. A request that commands its drafts gets all slots that may be granted
        ahead: a step without slots for them would have fewer.
        """
        if self.live.request.num_forced_drafts:
            return MAX_BLOCKS_AHEAD * self._block_size
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
