"""A request on its way: everything the router must remember to run it again from the start on any worker."""

from __future__ import annotations

import math
from enum import Enum

from space_router.engine.cache.block_key import BlockKeys
from space_router.engine.request.request import Statistics, ValidRequest
from space_router.engine.request.stream import Stream
from space_router.engine.timer import Timer


class Phase(Enum):
    """Where a request is."""

    PARKED = "parked"  # waits for a prefix that another computes, or for its reader, outside the queue's order
    QUEUED = "queued"
    RUNNING = "running"  # admitted to a worker
    LEAVING = "leaving"  # preempted: admitted again once the worker has acknowledged the release
    ENDED = "ended"  # nothing more will be said to its reader


class RequestState:
    """One request from the door to its last token, over all its admissions."""

    def __init__(self, request: ValidRequest, max_tokens: int, age: int, submitted: float) -> None:
        self.request = request
        self.num_prompt = len(request.prompt_ids)
        self.max_tokens = max_tokens  # cut to what fits
        self.age = age  # order of arrival: the lowest is the oldest
        self.submitted = submitted  # seconds on the engine's clock
        self.ids = list(request.prompt_ids)  # prompt, then what was emitted
        self.phase = Phase.QUEUED
        self.followers: list[RequestState] = []  # parked until this one has computed what they wait for
        self.awaited_ids = 0  # how many ids the one it follows is to compute first
        self.num_waits = 0  # times it has waited for a prefix that another was computing
        self.near_at = math.inf  # seconds on the engine's clock: its deadline counts from then on
        self.num_charged: float | None = None  # tokens that its key was charged for; None before its first admission
        self.num_suspicions = 0  # workers that ended by themselves while they ran it
        self.cleared_at: int | None = None  # ids to be generated before it is no suspect any more; None: it is none
        self.num_prompt_logprobs = 0  # prompt ids whose logprobs the reader has
        self.last_token: float | None = None  # seconds on the engine's clock
        self.deadline: Timer | None = None
        self.statistics = Statistics(num_prompt=self.num_prompt)
        self.stream: Stream | None = None  # the reader's end; None only in tests of the schedule
        self._keys: dict[int, BlockKeys] = {}

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def deadline_at(self) -> float:
        """Seconds on the engine's clock."""
        return math.inf if self.request.deadline is None else self.submitted + self.request.deadline

    @property
    def is_suspect(self) -> bool:
        """It may be what a worker died of: it runs alone."""
        return self.cleared_at is not None

    @property
    def num_left(self) -> int:
        """Most ids that may still be generated."""
        return self.max_tokens - self.num_generated

    @property
    def least_left(self) -> int:
        """Fewest ids that must still be generated before it is done."""
        if not self.request.can_end_early:
            return self.num_left
        return max(1, self.request.sampling.min_tokens - self.num_generated)

    @property
    def final_slots(self) -> int:
        """Most slots this request can ever use: prompt, answer, and one more."""
        return self.num_prompt + self.max_tokens + 1

    @property
    def lagging(self) -> bool:
        """Its reader is too far behind for more to be produced."""
        return self.stream is not None and self.stream.lagging

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt ids still lack the logprobs that were asked for; the first prompt id has none."""
        return self.request.num_prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt - 1

    def keys(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Keys of at least the first `num_blocks` whole blocks of `ids`."""
        if block_size not in self._keys:
            self._keys[block_size] = BlockKeys(self.request.cache_salt, block_size)
        return self._keys[block_size].upto(self.ids, num_blocks)
