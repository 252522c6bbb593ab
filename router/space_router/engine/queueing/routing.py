"""Choice of a worker: prefix cache hits against load."""

from __future__ import annotations

from collections.abc import Iterable

from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduling.placement import Placement
from space_router.engine.scheduling.scheduler import Scheduler

IDS_PER_SEQUENCE = 32
"""Prompt ids whose prefill costs about as much as one more concurrent sequence on the worker.

A cached prefix of 512 ids outweighs 16 more sequences. On a GPU, where a step of 64 sequences takes little longer than
one of 8, a sequence costs less; on a CPU, where step time grows with each, more. This value is a compromise: a popular
system prompt does not fill one worker while others idle, and a chat does not leave the worker that has its history for
a slightly less busy one.
"""


def cost(live: RequestState, scheduler: Scheduler, placement: Placement) -> int:
    """Return the cost of running a request there, in prompt ids: its own prefill, the prefill queued before it, and
    the running sequences.
    """
    num_own = len(live.ids) - scheduler.num_ids(placement)
    return num_own + scheduler.num_prefill_ahead + IDS_PER_SEQUENCE * scheduler.num_running


def best_placement(live: RequestState, schedulers: Iterable[Scheduler]) -> tuple[Scheduler, Placement] | None:
    """Return the cheapest worker with room, among equals the one with most free blocks; None if none has room."""
    placed = [(scheduler, placement) for scheduler in schedulers if (placement := scheduler.placement(live))]
    return min(placed, key=lambda p: (cost(live, *p), -p[0].pool.num_available), default=None)
