"""The engine's state of one request: everything needed to run it again on any worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import Enum
from typing import Protocol, TypeAlias

from space_router.engine.pages import BlockKeys
from space_router.engine.request.request import Statistics, ValidRequest
from space_router.engine.request.stream import Stream


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Takes a delay in seconds and the function to call then."""


def call_later_on_loop(seconds: float, action: Callable[[], None]) -> Timer:
    """Call `action` in `seconds` on the running event loop."""
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
        self.num_suspicions = 0  # workers that crashed while running it
        self.probation_until: int | None = None  # suspect until it has generated so many ids; None: not a suspect
        self.num_prompt_logprobs = 0  # prompt ids whose logprobs were delivered
        self.last_token: float | None = None  # seconds on the engine's clock
        self.deadline: Timer | None = None
        self.statistics = Statistics(num_prompt=self.num_prompt)
        self.stream: Stream | None = None  # None only in tests of the scheduler
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
        """Whether it may have crashed a worker and must run alone."""
        return self.probation_until is not None

    @property
    def num_left(self) -> int:
        """Maximum ids that may still be generated."""
        return self.max_tokens - self.num_generated

    @property
    def least_left(self) -> int:
        """Minimum ids that must still be generated before it can end."""
        if not self.request.can_end_early:
            return self.num_left
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

    def keys(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Return the prefix cache keys of at least the first `num_blocks` full blocks of `ids`."""
        if block_size not in self._keys:
            self._keys[block_size] = BlockKeys(self.request.cache_salt, block_size)
        return self._keys[block_size].first_keys(self.ids, num_blocks)
