"""Progress of a run, and the learning rate as a function of it.

Progress is the share of the budget that is used, in 0..1, so a run on a slow or interrupted machine also ends
with a fully decayed learning rate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Budget:
    """Limits of a run, which ends when the first of them is reached."""

    minutes: float | None = None  # of work: time between a kill and a restart does not count
    tokens: int | None = None  # real tokens read, masks not counted
    steps: int | None = None  # updates
    epochs: float | None = None  # rounds through the data
    flops: float | None = None  # of the model, over all rows

    def __post_init__(self) -> None:
        given = [value for value in asdict(self).values() if value is not None]
        if not given:
            raise ValueError("A run needs a budget: give minutes, tokens, steps, epochs or flops.")
        if not all(0 <= value < math.inf for value in given):
            raise ValueError(f"A budget is 0 or more, and finite; got {', '.join(f'{value:g}' for value in given)}.")

    def progress(
        self, elapsed_seconds: float, num_tokens: int, *, step: int = 0, epoch: float = 0.0, flops: float = 0.0
    ) -> float:
        """Return the share used, at most 1."""
        minutes = elapsed_seconds / 60
        used = ((minutes, self.minutes), (num_tokens, self.tokens), (step, self.steps), (epoch, self.epochs))
        shares = [done / most if most else 1.0 for done, most in (*used, (flops, self.flops)) if most is not None]
        return min(1.0, max(shares))

    def as_json(self) -> dict[str, float]:
        """Return the limits that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class LearningRate:
    """A multiplier of the peak rate: linear warm-up over `warmup`, flat until `decay_from`, then linear to `final`.

    `cosine`: from the end of the warm-up on, half a cosine to `final` instead.
    """

    warmup: float = 0.02
    decay_from: float = 0.3
    final: float = 0.0
    cosine: bool = False

    def at(self, progress: float) -> float:
        if progress < self.warmup:
            # Never zero, so that the first step already learns.
            return max(progress / self.warmup, 0.02)
        if self.cosine:
            through = (progress - self.warmup) / (1.0 - self.warmup)
            return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * through)) / 2
        if progress < self.decay_from:
            return 1.0
        return 1.0 - (1.0 - self.final) * (progress - self.decay_from) / (1.0 - self.decay_from)


def between(start: float, end: float, progress: float) -> float:
    """Interpolate linearly from `start` to `end`."""
    return start + (end - start) * progress
