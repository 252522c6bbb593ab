"""The step costs that a worker starts with: from a file of an earlier start, or measured now.

file        written by an earlier start, and a plain step still takes as long
measured    at this start: three passes agreed and the machine was idle; written to the file for the next start
learned     three passes differed, or the machine was busy: a first estimate that serving corrects, not written
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from space_server.machine.machine_load import LoadWatch
from space_server.startup.calibration import Calibration, Timing
from space_server.startup.cost_file import BadCostFile, CostFile, KeptCosts
from space_server.step_costs.step_cost import CostOrigin, Point, StepCost

TRIES = 3
"""Checks of a plain step against the file before it is discarded: one slow moment is not enough."""

LEAST_TOLERANCE = 0.03
"""Relative difference of a plain step between starts on a quiet machine, whatever the passes of one start show: memory
is placed differently each time.
"""

SIGMAS = 3.0
"""Standard errors of the median within which it may be off."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingCosts:
    """Points, and their origin."""

    points: list[Point]
    origin: CostOrigin

    def cost(self) -> StepCost:
        """Build the cost model. It keeps learning, quickly where the points are only a first estimate."""
        cost = StepCost.from_points(self.points, are_sure=self.origin.source != "learned")
        cost.origin = self.origin
        return cost


def tolerance(kept: KeptCosts, timing: Timing) -> float:
    """Return the relative difference allowed for a plain step: the passes' spread plus the noise of this timing."""
    return max(LEAST_TOLERANCE, kept.plain_spread) + SIGMAS * timing.noise


def starting_costs(
    file: CostFile,
    *,
    measure: Callable[[Callable[[], None]], Calibration],
    time_plain_step: Callable[[], Timing | None],
    watch: LoadWatch,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> StartingCosts | None:
    """Return the costs kept in `file` if a plain step confirms them; else measure, and keep them if they are reliable.

    `measure` receives a function to call between steps. None if nothing could be measured.
    """
    points = _kept(file, time_plain_step)
    if points is not None:
        return StartingCosts(points, CostOrigin("file"))
    watch.begin()
    watch.look()
    calibration = measure(watch.look)
    load = watch.load()
    if not calibration.points:
        return None
    why_not = load.why_busy or calibration.why_unsure
    if why_not is not None:
        _log.info("step costs are not kept, but learned while serving: %s", why_not)
        return StartingCosts(calibration.points, CostOrigin("learned", why_not))
    file.write(calibration, load, now())
    return StartingCosts(calibration.points, CostOrigin("measured"))


def _kept(file: CostFile, time_plain_step: Callable[[], Timing | None]) -> list[Point] | None:
    """Return the file's points, scaled to today's speed, if they still hold; None: measure."""
    try:
        kept = file.read()
    except BadCostFile as error:
        _log.info("step costs kept in %s are not used: %s", file.path.name, error)
        return None
    if kept is None:
        return None
    for timing in _timings(time_plain_step):
        ratio, bound = timing.seconds / kept.plain_seconds, tolerance(kept, timing)
        if 1.0 / (1.0 + bound) <= ratio <= 1.0 + bound:
            return [(shape, ratio * seconds) for shape, seconds in kept.points]
        _log.info(
            "step costs kept in %s (%s) do not hold: a plain step takes %.3g ms now and %.3g there, and %.0f %% may be",
            file.path.name,
            kept.written,
            1000 * timing.seconds,
            1000 * kept.plain_seconds,
            100 * bound,
        )
    return None


def _timings(time_plain_step: Callable[[], Timing | None]) -> Iterator[Timing]:
    for _ in range(TRIES):
        timing = time_plain_step()
        if timing is None:
            return
        yield timing
        if len(timing.times) < 2:
            return  # a retry would take as long as measuring
