"""Checks of a request before it is queued, and the engine's load figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from space_router.engine.cache.pages import PagePool
from space_router.engine.errors import CacheTooSmall, PromptTooLong
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.request.request import ValidRequest
from space_router.engine.request.request_state import RequestState


@dataclass(frozen=True)
class LoadFigures:
    """How busy the engine is now."""

    num_queued: int
    num_running: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    num_workers_up: int
    draining: bool

    @classmethod
    def of(cls, pools: Sequence[PagePool], *, num_queued: int, num_open: int, draining: bool) -> LoadFigures:
        """`pools`: of the workers that are up; `num_open`: requests that have not ended, including waiting ones."""
        return cls(
            num_queued=num_queued,
            num_running=num_open - num_queued,
            blocks_free=sum(pool.num_free for pool in pools),
            blocks_held=sum(pool.num_held for pool in pools),
            blocks_cached=sum(pool.num_cached for pool in pools),
            num_workers_up=len(pools),
            draining=draining,
        )


def resolve_max_tokens(request: ValidRequest, facts: WorkerModelFacts) -> int:
    """Return `max_tokens`, or if none was given, as many as fit. Raises PromptTooLong or CacheTooSmall."""
    num_prompt, max_tokens = len(request.prompt_ids), request.max_tokens
    least = 1 if max_tokens is None else max_tokens
    if num_prompt + least > facts.window:
        raise PromptTooLong(num_prompt=num_prompt, max_tokens=max_tokens, window=facts.window)
    if num_prompt + least + 1 > facts.num_slots:
        raise CacheTooSmall(num_prompt=num_prompt, max_tokens=max_tokens, num_slots=facts.num_slots)
    if max_tokens is not None:
        return max_tokens
    return min(facts.window - num_prompt, facts.num_slots - num_prompt - 1)


def should_follow(leader: RequestState, follower: RequestState, block_size: int) -> bool:
    """Whether the leader's prompt has full blocks to share that are not computed yet."""
    shares = leader.request.share_prefix and follower.request.share_prefix
    return shares and not leader.num_generated and leader.num_prompt > block_size
