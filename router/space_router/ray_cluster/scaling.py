"""How many workers a load wants: a policy for Ray Serve's autoscaler.

Serve pickles this file by itself and runs it in its controller: it imports nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

FIGURE = "requests"
"""What each worker reports: the requests that the router told it of, running and queued, of all workers together."""


class Seen(Protocol):
    """What the policy needs of Serve's AutoscalingContext."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """A figure's name -> replica -> its mean over the window."""

    @property
    def target_num_replicas(self) -> int:
        """That were wanted last."""


class Scaling:
    """One worker for every so many requests. Bounds and delays are Serve's own."""

    def __init__(self, requests_per_worker: int) -> None:
        self.requests_per_worker = requests_per_worker

    def __call__(self, seen: Seen) -> tuple[int, dict[str, Any]]:
        """The number wanted, and no state. Without any figure: as many as there are."""
        figures = (seen.aggregated_metrics or {}).get(FIGURE, {})
        if not figures:
            return seen.target_num_replicas, {}
        return math.ceil(max(figures.values()) / self.requests_per_worker), {}
