"""How far a run of training has come, and what it gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from space_train.training.stage import Measures


@dataclass
class Counters:
    """How far a run has come."""

    step: int = 0
    num_tokens: int = 0  # real tokens read
    num_masks: int = 0  # mask rows learnt from
    flops: float = 0.0
    seconds: float = 0.0
    curve: list[Measures] = field(default_factory=list)  # an entry for each look at the held-out rows
    losses: list[float] = field(default_factory=list)  # of each update


@dataclass(frozen=True)
class TrainResult:
    """What a run gave."""

    folder: Path | None  # of the checkpoint; None where the run was stopped before its end
    counters: Counters
    peak_bytes: int  # most memory of the process, or of its GPU
    num_processes: int = 1

    @property
    def final(self) -> Measures:
        """The last held-out figures."""
        return self.counters.curve[-1] if self.counters.curve else {}
