"""Where a request would stand on a worker, and what it could share there."""

from __future__ import annotations

from dataclasses import dataclass

from space_router.engine.live_request import LiveRequest


@dataclass(frozen=True)
class Placement:
    """How a request would stand on this worker."""

    shared: list[int]  # known blocks of its prefix
    num_fresh: int  # blocks it needs besides


@dataclass(frozen=True)
class Promise:
    """A running request's prefill is about to compute a prefix that another could share."""

    leader: LiveRequest
    num_ids: int  # leading ids, in whole blocks, that both have in common
