"""How far a stage has come, and what the learning rate is there.

Everything is a function of progress in 0..1, and progress of the budget (minutes of work, tokens, or both): so a slow
or interrupted machine still ends with a fully decayed model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """A stage ends when its minutes of work or its tokens are used up, whichever comes first."""

    minutes: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            raise ValueError("A stage needs a budget: give minutes, tokens, or both.")

    def progress(self, elapsed_seconds: float, num_tokens: int) -> float:
        """The share used, at most 1."""
        by_time = elapsed_seconds / (60 * self.minutes) if self.minutes else float(self.minutes is not None)
        by_tokens = num_tokens / self.tokens if self.tokens else float(self.tokens is not None)
        return min(1.0, max(by_time, by_tokens))


@dataclass(frozen=True)
class LearningRate:
    """A multiplier of the peak rate: linear warm-up over `warmup`, flat until `decay_from`, then linear to `final`."""

    warmup: float = 0.02
    decay_from: float = 0.3
    final: float = 0.0

    def at(self, progress: float) -> float:
        if progress < self.warmup:
            # Never exactly zero, so that the first step already learns.
            return max(progress / self.warmup, 0.02)
        if progress < self.decay_from:
            return 1.0
        return 1.0 - (1.0 - self.final) * (progress - self.decay_from) / (1.0 - self.decay_from)


def between(start: float, end: float, progress: float) -> float:
    """Linear from `start` to `end`."""
    return start + (end - start) * progress
