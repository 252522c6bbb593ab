"""The policy of Ray Serve's autoscaler.

Serve pickles this module alone and runs it in its controller, so it must not import other modules of the project.
"""

from __future__ import annotations

import math
from typing import Any

FIGURE = "requests"
"""Metric that each worker reports: all running and queued requests of the router, as last sent to the worker."""


class Scaling:
    """Wants one worker per `requests_per_worker` requests. Bounds and delays are Serve's own."""

    def __init__(self, requests_per_worker: int) -> None:
        self.requests_per_worker = requests_per_worker

    def __call__(self, seen: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of workers wanted and an empty state. Without reports the target is unchanged.

        `seen`: Serve's AutoscalingContext, whose `aggregated_metrics` has the mean over the window by name and replica.
        """
        figures = (seen.aggregated_metrics or {}).get(FIGURE, {})
        if not figures:
            return seen.target_num_replicas, {}
        return math.ceil(max(figures.values()) / self.requests_per_worker), {}
