"""Which worker a request goes to: where its prefix is known, unless too many are there already."""

from __future__ import annotations

from collections.abc import Iterable

from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduling.placement import Placement
from space_router.engine.scheduling.scheduler import Scheduler

IDS_PER_SEQUENCE = 32
"""Prompt ids whose computing costs about what it costs to share a worker with one sequence more.

A known prefix of 512 ids outweighs 16 more neighbours. On a GPU, where a step of 64 sequences takes little longer than
one of 8, neighbours weigh less; on a CPU, where its time grows with each, more. In between, neither a hot system prompt
fills one worker while others idle, nor does a chat leave the worker that has its history for a little less company.
"""


def cost(live: RequestState, scheduler: Scheduler, placement: Placement) -> int:
    """Of running it there, in prompt ids: its own to be computed, those that wait before it, and its neighbours."""
    num_own = len(live.ids) - scheduler.num_ids(placement)
    return num_own + scheduler.num_prefill_ahead + IDS_PER_SEQUENCE * scheduler.num_running


def best_placement(live: RequestState, schedulers: Iterable[Scheduler]) -> tuple[Scheduler, Placement] | None:
    """Where it costs least; of equals, where most room is. None: nowhere is room."""
    placed = [(scheduler, placement) for scheduler in schedulers if (placement := scheduler.placement(live))]
    return min(placed, key=lambda p: (cost(live, *p), -p[0].pool.num_available), default=None)
