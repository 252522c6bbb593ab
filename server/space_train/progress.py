"""How far a run is, how long it still takes, and how that is shown: a bar on a terminal, plain lines in a file."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

from tqdm import tqdm

from space_train.run_folder import Measures
from space_train.train_plan import Budget


@dataclass
class Counters:
    """Progress of a run."""

    step: int = 0
    num_tokens: int = 0  # real tokens read
    num_masks: int = 0  # mask rows with a target
    flops: float = 0.0
    seconds: float = 0.0  # of the budget: start-up, own texts, updates, evaluations and saves
    curve: list[Measures] = field(default_factory=list)  # an entry per evaluation on the held-out rows
    losses: list[float] = field(default_factory=list)  # of each update
    update_seconds: float = 0.0  # of all updates alone
    look_seconds: float = 0.0  # of the last evaluation

    @property
    def seconds_per_update(self) -> float:
        """Mean over all updates; 0 before the first."""
        return self.update_seconds / self.step if self.step else 0.0


class RunClock:
    """The time of a run: the share of its budget that is used, and what is left.

    `spent`: `flops` and `seconds` of the budget that were spent before the first update. `epoch_updates`: updates of
    one epoch.
    """

    def __init__(self, budget: Budget, counters: Counters, epoch_updates: float, spent: Mapping[str, float]) -> None:
        self.budget, self.counters, self.epoch_updates = budget, counters, epoch_updates
        self._flops_before = spent.get("flops", 0.0)
        self._here: list[float] = []  # seconds of the updates of this process
        self._save_seconds = 0.0

    def update_took(self, seconds: float) -> None:
        """Count an update, whose step is counted already."""
        self._here.append(seconds)
        self.counters.seconds += seconds
        self.counters.update_seconds += seconds

    def look_took(self, seconds: float) -> None:
        """Count an evaluation."""
        self.counters.seconds += seconds
        self.counters.look_seconds = seconds

    def save_took(self, seconds: float) -> None:
        """Count a save."""
        self.counters.seconds += seconds
        self._save_seconds = seconds

    def progress(self, *, is_looked_at: bool) -> float:
        """Return the share of the budget that is used, 1 when the run ends. Minutes end with the update that comes
        nearest to them, the last evaluation included. `is_looked_at`: the current weights were evaluated."""
        counters = self.counters
        last_look = 0.0 if is_looked_at else counters.look_seconds
        return self.budget.progress(
            counters.seconds + last_look + self._steady_seconds / 2,
            counters.num_tokens,
            step=counters.step,
            epoch=counters.step / self.epoch_updates,
            flops=counters.flops,
        )

    @property
    def _steady_seconds(self) -> float:
        """Seconds of an update; 0 before two of them, because a first one is slower than what comes."""
        if len(self._here) > 1:
            return self.seconds_per_update
        return 0.0 if self._here or self.counters.step < 2 else self.counters.seconds_per_update

    @property
    def seconds_per_update(self) -> float:
        """Mean of this process, without its first update where there are more: the first is slower."""
        if not self._here:
            return self.counters.seconds_per_update
        steady = self._here[1:] or self._here
        return sum(steady) / len(steady)

    def updates_left(self) -> float | None:
        """Return the estimated number of updates to come, or None before anything is known of them."""
        budget, counters, left = self.budget, self.counters, list[float]()
        if budget.steps is not None:
            left.append(budget.steps - counters.step)
        if budget.epochs is not None:
            left.append(math.ceil(budget.epochs * self.epoch_updates - 1e-9) - counters.step)
        if counters.step:
            if budget.tokens is not None:
                left.append((budget.tokens - counters.num_tokens) * counters.step / max(1, counters.num_tokens))
            if budget.flops is not None:
                here = max(1.0, counters.flops - self._flops_before)
                left.append((budget.flops - counters.flops) * counters.step / here)
            if budget.minutes is not None and self.seconds_per_update:
                left.append((60 * budget.minutes - counters.seconds) / self.seconds_per_update)
        return max(0.0, min(left)) if left else None

    def total_updates(self) -> int | None:
        """Return the estimated number of updates of the whole run."""
        left = self.updates_left()
        return None if left is None else self.counters.step + math.ceil(left - 0.5 if self._is_by_time else left)

    def seconds_left(self, num_looks: int, num_saves: int) -> float | None:
        """Return the estimated seconds to the end, with that many evaluations and saves to come."""
        updates, minutes, found = self.updates_left(), self.budget.minutes, list[float]()
        if updates is not None and self.seconds_per_update:
            others = num_looks * self.counters.look_seconds + num_saves * self._save_seconds
            found.append(math.ceil(updates) * self.seconds_per_update + others)
        if minutes is not None:
            found.append(max(0.0, 60 * minutes - self.counters.seconds))
        return min(found) if found else None

    @property
    def _is_by_time(self) -> bool:
        return self.budget.minutes is not None


def duration(seconds: float) -> str:
    """40.2 -> 40 s; 200 -> 3 min 20 s; 4000 -> 1 h 7 min"""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 10:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


LINES_EVERY = 15.0
"""Seconds between the progress lines of a run whose output is not a terminal."""


class ProgressLines:
    """Shows one line of progress: in place on a terminal, else as a line of its own, now and then."""

    def __init__(
        self,
        *,
        is_off: bool = False,
        stream: TextIO | None = None,
        every: float = LINES_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self._every, self._clock, self._is_off = every, clock, is_off
        self._last: float | None = None
        self._bar: tqdm[None] | None = None
        if not is_off and self.stream.isatty():
            self._bar = tqdm(total=100.0, bar_format="{percentage:3.0f} % |{bar:20}| {desc}", file=self.stream)

    def show(self, text: str, share: float, *, is_due: bool = False) -> None:
        """Show `text`, and `share` of 1 as done. `is_due`: print the line also if the last one is recent."""
        if self._bar is not None:
            self._bar.n = 100 * share
            self._bar.set_description_str(text)
        elif not self._is_off:
            now = self._clock()
            if is_due or self._last is None or now - self._last >= self._every:
                self._last = now
                print(f"{text} ({100 * share:.0f} %)", file=self.stream, flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self._is_off:
            tqdm.write(text, file=self.stream)

    def close(self) -> None:
        """End the line on a terminal."""
        if self._bar is not None:
            self._bar.close()
