"""The progress of a run: the share that is done, the time left, and the line that shows both."""

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

END_SECONDS, END_SHARE = 4.0, 0.02
"""Seconds of a budget in minutes, and at most this share of it, for checkpoint and report behind the last save."""

EVALUATION_SHARE = 0.2
"""Share of a budget in minutes that evaluations before the last one take; those that would take more are left out."""


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
    evaluation_seconds: float = 0.0  # of the last evaluation
    ended: dict[str, float] | None = None  # the budget, as JSON, with which the run ended; None: it has not ended

    @property
    def seconds_per_update(self) -> float:
        """Mean over all updates; 0 before the first."""
        return self.update_seconds / self.step if self.step else 0.0


class RunClock:
    """Measures how much of a run's budget is used, and estimates what is left.

    `spent`: `flops` and `seconds` of the budget that own texts used before the first update. `epoch_updates`: updates
    of one epoch.
    """

    def __init__(self, budget: Budget, counters: Counters, epoch_updates: float, spent: Mapping[str, float]) -> None:
        self.budget, self.counters, self.epoch_updates = budget, counters, epoch_updates
        self._flops_before = spent.get("flops", 0.0)
        self._here: list[float] = []  # seconds of the updates of this process
        self._save_seconds = 0.0
        self._end_seconds = 0.0 if budget.minutes is None else min(END_SECONDS, END_SHARE * 60 * budget.minutes)

    def count_update(self, seconds: float) -> None:
        """Add the time of an update. The caller has counted the step."""
        self._here.append(seconds)
        self.counters.seconds += seconds
        self.counters.update_seconds += seconds

    def count_evaluation(self, seconds: float) -> None:
        """Add the time of an evaluation."""
        self.counters.seconds += seconds
        self.counters.evaluation_seconds = seconds

    def may_evaluate(self) -> bool:
        """Return whether an evaluation before the last one leaves a budget in minutes enough for updates."""
        counters, minutes = self.counters, self.budget.minutes
        if minutes is None or not counters.curve:
            return True
        num_seconds = counters.evaluation_seconds
        is_short = (len(counters.curve) + 1) * num_seconds <= EVALUATION_SHARE * 60 * minutes
        return (
            is_short and counters.seconds + num_seconds + self._closing_seconds() + self._next_seconds <= 60 * minutes
        )

    def count_save(self, seconds: float) -> None:
        """Add the time of a save."""
        self.counters.seconds += seconds
        self._save_seconds = seconds

    def progress(self, *, is_evaluated: bool) -> float:
        """Return the share of the budget that is used, 1 when the run ends. A budget in minutes ends with the last
        update behind which there is time for the last evaluation, the last save and the checkpoint. `is_evaluated`: the
        current weights need no evaluation."""
        counters, minutes = self.counters, self.budget.minutes
        if counters.ended == self.budget.as_json():  # by what was then foreseen: less time may have been needed
            return 1.0
        seconds = counters.seconds + self._closing_seconds(is_evaluated=is_evaluated)
        if minutes is not None and counters.step and seconds + self._next_seconds > 60 * minutes:
            return 1.0
        return self.budget.progress(
            seconds,
            counters.num_tokens,
            step=counters.step,
            epoch=counters.step / self.epoch_updates,
            flops=counters.flops,
        )

    def _closing_seconds(self, *, is_evaluated: bool = False) -> float:
        """Return the estimated seconds from the last update to the end of the run."""
        last_evaluation = 0.0 if is_evaluated else self.counters.evaluation_seconds
        return last_evaluation + self._save_seconds + self._end_seconds

    @property
    def _next_seconds(self) -> float:
        """Seconds of the next update, with which the run may end. A first update is slower than the rest, as little as
        on a CPU, or many times: half of it is expected of the second."""
        return self.seconds_per_update / 2 if len(self._here) == 1 else self.seconds_per_update

    @property
    def seconds_per_update(self) -> float:
        """Mean of this process, without its slower first update as soon as there are others."""
        if not self._here:
            return self.counters.seconds_per_update
        steady = self._here[1:] or self._here
        return sum(steady) / len(steady)

    def _updates_in_time(self, minutes: float, num_evaluations: int) -> tuple[int, float]:
        """Return how many updates still fit in the minutes, with at most that many evaluations, and the seconds to the
        end of the run with them."""
        counters, update, evaluation = self.counters, self.seconds_per_update, self.counters.evaluation_seconds
        closing = self._closing_seconds()
        available = 60 * minutes - counters.seconds - closing
        between = max(0, num_evaluations - 1)
        if evaluation:
            between = min(between, max(0, int(EVALUATION_SHARE * 60 * minutes / evaluation) - len(counters.curve)))
        fitting = max(available / (update + evaluation), (available - between * evaluation) / update)
        num_updates = max(0, math.floor(fitting))
        return num_updates, num_updates * update + min(between, num_updates) * evaluation + closing

    def updates_left(self, num_evaluations: int = 1) -> float | None:
        """Return the estimated number of updates to come, or None while the budget gives no estimate.
        `num_evaluations`: evaluations to come, the last one included."""
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
                left.append(self._updates_in_time(budget.minutes, num_evaluations)[0])
        return max(0.0, min(left)) if left else None

    def total_updates(self, num_evaluations: int = 1) -> int | None:
        """Return the estimated number of updates of the whole run."""
        left = self.updates_left(num_evaluations)
        if left is None:
            return None
        return self.counters.step + math.ceil(left)

    def of_total(self, num_evaluations: int = 1) -> str:
        """Return ` of 20`, ` of about 20` where the budget is minutes, or nothing while the total is unknown."""
        total = self.total_updates(num_evaluations)
        return "" if total is None else f" of {'about ' if self.budget.minutes else ''}{total}"

    def seconds_left(self, num_evaluations: int, num_saves: int) -> float | None:
        """Return the estimated seconds to the end, with that many evaluations and saves to come."""
        updates, minutes, found = self.updates_left(num_evaluations), self.budget.minutes, list[float]()
        if updates is not None and self.seconds_per_update:
            if minutes is None or updates < self._updates_in_time(minutes, num_evaluations)[0]:
                others = num_evaluations * self.counters.evaluation_seconds + num_saves * self._save_seconds
                found.append(math.ceil(updates) * self.seconds_per_update + others)
            else:
                found.append(self._updates_in_time(minutes, num_evaluations)[1])
        if minutes is not None:
            found.append(max(0.0, 60 * minutes - self.counters.seconds))
        return min(found) if found else None


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


LINE_SECONDS = 15.0
"""Least time between two progress lines in a file or a pipe."""


class ProgressLines:
    """Shows the progress in one line, which is updated in place on a terminal. To a file or a pipe, a new line is
    printed every LINE_SECONDS."""

    def __init__(
        self,
        *,
        is_off: bool = False,
        stream: TextIO | None = None,
        every: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self._every, self._clock, self._is_off = every, clock, is_off
        self._last: float | None = None
        self._bar: tqdm[None] | None = None
        if not is_off and self.stream.isatty():
            self._bar = tqdm(total=100.0, bar_format="{percentage:3.0f} % |{bar:20}| {desc}", file=self.stream)

    def show(self, text: str, share: float, *, is_due: bool = False) -> None:
        """Show `text` and the `share` that is done, 0 to 1. `is_due`: print the line even if the last one is recent."""
        if self._bar is not None:
            self._bar.n = 100 * share
            self._bar.set_description_str(text)
        elif not self._is_off:
            now = self._clock()
            if is_due or self._last is None or now - self._last >= self._every:
                self._last = now
                print(f"{text} ({100 * share:.0f} %)", file=self.stream, flush=True)

    def write(self, text: str) -> None:
        """Print a line above the progress."""
        if not self._is_off:
            tqdm.write(text, file=self.stream)

    def close(self) -> None:
        """Leave the last line on the terminal."""
        if self._bar is not None:
            self._bar.close()
