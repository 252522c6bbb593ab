"""A request on its way: everything the router must remember to run it again from the start on any worker."""

from __future__ import annotations

import asyncio
from enum import Enum

from space_router.engine.block_key import BlockKeys
from space_router.engine.request import Statistics, ValidRequest
from space_router.engine.stream import Stream


class Phase(Enum):
    """Where a request is."""

    PARKED = "parked"  # waits for its leader's prompt, or for its reader, outside the queue's order
    QUEUED = "queued"
    RUNNING = "running"  # admitted to a worker
    LEAVING = "leaving"  # preempted: admitted again once the worker has acknowledged the release
    ENDED = "ended"  # nothing more will be said to its reader


class LiveRequest:
    """One request from the door to its last token, over all its admissions."""

    def __init__(self, request: ValidRequest, max_tokens: int, age: int, submitted: float) -> None:
        self.request = request
        self.max_tokens = max_tokens  # cut to what fits
        self.age = age  # order of arrival: the lowest is the oldest
        self.submitted = submitted  # seconds on the engine's clock
        self.ids = list(request.prompt_ids)  # prompt, then what was emitted
        self.phase = Phase.QUEUED
        self.followers: list[LiveRequest] = []  # parked until this one's prompt is computed
        self.num_prompt_logprobs = 0  # prompt ids whose logprobs the reader has
        self.last_token: float | None = None  # seconds on the engine's clock
        self.deadline: asyncio.TimerHandle | None = None
        self.statistics = Statistics(num_prompt=len(request.prompt_ids))
        self.stream: Stream | None = None  # the reader's end; None only in tests of the schedule
        self._keys: dict[int, BlockKeys] = {}

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.num_prompt

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
        keys = self._keys.setdefault(block_size, BlockKeys(self.request.cache_salt, block_size))
        return keys.upto(self.ids, num_blocks)
