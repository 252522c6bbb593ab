"""What a simulated run shows: latencies, throughput, and how things stood over time."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from space_proto import worker_pb2

PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "ttft": "to the first token",
    "itl": "per token after it, mean of a request",
    "gap": "from one piece to the next",
    "e2e": "whole request",
    "queue": "in the queue",
}


@dataclass
class Moment:
    """What happened in one stretch of time, and how things stood at its end."""

    end: float  # seconds
    seconds: float
    num_tokens: int = 0  # that readers got
    num_steps: int = 0
    busy: float = 0.0  # seconds of steps, over all workers
    chain_rows: int = 0
    mask_rows: int = 0
    prefill_rows: int = 0
    num_decoded: int = 0  # sequences, once for each step in which they decoded
    num_drafted: int = 0
    queued: int = 0
    running: int = 0
    blocks_free: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def draft_length(self) -> float:
        """Drafts verified per sequence and step."""
        return self.num_drafted / self.num_decoded if self.num_decoded else math.nan

    @property
    def rows_per_step(self) -> float:
        return (self.chain_rows + self.mask_rows + self.prefill_rows) / self.num_steps if self.num_steps else math.nan


@dataclass
class Record:
    """Gathered while a run goes on."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    gap: array[float] = field(default_factory=lambda: array("d"))
    e2e: array[float] = field(default_factory=lambda: array("d"))
    queue: array[float] = field(default_factory=lambda: array("d"))
    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0  # within the time that counts
    num_pieces: int = 0  # they came in
    num_decoded: int = 0
    num_emitted: int = 0  # by decode steps
    num_drafted: int = 0
    num_accepted: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_kept: int = 0  # requests within every limit
    num_late: int = 0  # requests that came in the second half
    num_late_kept: int = 0
    num_steps: int = 0
    rows: Counter[int] = field(default_factory=Counter)  # steps by rows
    moments: list[Moment] = field(default_factory=list)

    def step(self, report: worker_pb2.StepReport, moment: Moment) -> None:
        """One report."""
        stats = report.stats
        if not report.stepped:
            return
        self.num_steps += 1
        self.rows[stats.chain_rows + stats.mask_rows + stats.prefill_rows] += 1
        moment.num_steps += 1
        moment.busy += stats.forward_seconds
        moment.chain_rows += stats.chain_rows
        moment.mask_rows += stats.mask_rows
        moment.prefill_rows += stats.prefill_rows
        for drafts, count in enumerate(stats.draft_length_counts):
            moment.num_decoded += count
            moment.num_drafted += count * drafts


@dataclass(frozen=True)
class Figures:
    """One arm."""

    arm: str
    seconds: float  # that count
    num_workers: int
    num_requests: int
    outcomes: Mapping[str, int]  # finished, left, refused, cut, error
    num_tokens: int
    tokens_per_step: float  # of a sequence
    draft_length: float
    accepted: float  # share of drafts
    rows_per_step: float
    busy: float  # share of the workers' time
    router_busy: float  # share of the router's one core
    num_pieces: int  # that the tokens came in
    link_bytes_per_token: float  # between router and workers, both ways, without the frames around messages
    prompt_cached: float  # share of prompt ids that were not computed
    num_preemptions: int
    changes_per_second: float  # of the controller's rule, per worker; nan where there is none
    turns_per_second: float  # of these, from plain decoding to drafts or back
    num_kept: int  # requests within every limit
    kept_late: float  # share of those that came in the second half: the first one warms up
    latencies: Mapping[str, Mapping[str, float]]  # name -> percentile -> seconds
    wall_seconds: float  # of simulating
    cpu_seconds: float
    moments: Sequence[Moment]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    @property
    def goodput(self) -> float:
        """Requests per second that kept every limit."""
        return self.num_kept / self.seconds

    def as_json(self) -> dict[str, Any]:
        made = {name: value for name, value in vars(self).items() if name != "moments"}
        made["tokens_per_second"] = self.tokens_per_second
        made["goodput"] = self.goodput
        made["moments"] = [asdict(moment) for moment in self.moments]
        return made


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, …, the mean and the largest; nan of none."""
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES), "max"), math.nan)
    found = np.asarray(values)
    ranks = np.percentile(found, PERCENTILES, method="inverted_cdf")
    return {
        "mean": float(found.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, ranks, strict=True)},
        "max": float(found.max()),
    }
