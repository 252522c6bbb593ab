"""What a simulated run shows: latencies, throughput, and the state over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass
class TimeSlice:
    """What happened in one stretch of time, and the state at its end."""

    end: float  # seconds
    num_tokens: int = 0  # that clients got
    busy: float = 0.0  # seconds of steps, over all workers
    num_decoded: int = 0  # sequences, once for each step in which they decoded
    num_drafted: int = 0
    num_running: int = 0

    @property
    def draft_length(self) -> float:
        """Drafts verified per sequence and step."""
        return share(self.num_drafted, self.num_decoded)


@dataclass(frozen=True)
class Summary:
    """One run."""

    seconds: float  # of arrivals; what comes after them does not count
    outcomes: Mapping[str, int]  # finished, left, refused, cut, error -> requests
    num_tokens: int
    tokens_per_step: float  # of a sequence
    draft_length: float  # drafts per sequence and step
    busy: float  # share of the workers' time
    prompt_cached: float  # share of prompt tokens that were not computed
    num_preemptions: int
    num_switches: int  # of the controllers, from plain decoding to drafts or back
    latencies: Mapping[str, Mapping[str, float]]  # ttft, itl, e2e -> percentile -> seconds
    intervals: Sequence[TimeSlice]

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def share(part: float, whole: float) -> float:
    """`part / whole`; nan of nothing."""
    return part / whole if whole else float("nan")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, …, the mean and the largest; empty without values."""
    if not len(values):
        return {}
    ranks = np.percentile(np.asarray(values), PERCENTILES, method="inverted_cdf")
    return {
        "mean": float(np.mean(values)),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, ranks, strict=True)},
        "max": float(np.max(values)),
    }
