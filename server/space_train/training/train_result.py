"""Progress and result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from space_train.training.stage import Measures


@dataclass
class Counters:
    """Progress of a run."""

    step: int = 0
    num_tokens: int = 0  # real tokens read
    num_masks: int = 0  # mask rows with a target
    flops: float = 0.0
    seconds: float = 0.0
    curve: list[Measures] = field(default_factory=list)  # an entry per evaluation on the held-out rows
    losses: list[float] = field(default_factory=list)  # of each update


@dataclass(frozen=True)
class TrainResult:
    """Result of a run."""

    folder: Path | None  # of the checkpoint; None if the run was stopped early
    counters: Counters
    peak_bytes: int  # peak memory of the process, or of its GPU
    num_processes: int = 1

    @property
    def final(self) -> Measures:
        """The last held-out figures."""
        return self.counters.curve[-1] if self.counters.curve else {}
