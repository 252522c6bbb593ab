"""What a worker believes of the costs of steps when it starts: what an earlier start has kept, or what it measures.

file        an earlier start has written it, and a plain step takes as long as it says
measured    at this start: three passes agreed, and nothing else computed; written to the file for the next start
learned     three passes differed, or something else computed: a beginning to learn from while serving, not written
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
"""Times that a plain step is held against the file before it is given up: one hiccup of the machine is no reason."""

LEAST_TOLERANCE = 0.03
"""Share by which a plain step differs from start to start on a quiet machine, whatever the passes of one start say:
memory lies elsewhere each time."""

SIGMAS = 3.0
"""Standard errors of the middle time that it may be off by."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingCosts:
    """Points, and how far they can be relied on."""

    points: list[Point]
    origin: CostOrigin

    def cost(self) -> StepCost:
        """What steps are expected to take; it goes on learning, at once where the points are a beginning only."""
        cost = StepCost.from_points(self.points, are_sure=self.origin.source != "learned")
        cost.origin = self.origin
        return cost


def tolerance(kept: KeptCosts, timing: Timing) -> float:
    """Share by which a plain step may be off: by what passes of one start differed, and by the noise of this timing."""
    return max(LEAST_TOLERANCE, kept.plain_spread) + SIGMAS * timing.noise


def starting_costs(
    file: CostFile,
    *,
    measure: Callable[[Callable[[], None]], Calibration],
    time_plain_step: Callable[[], Timing | None],
    watch: LoadWatch,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> StartingCosts | None:
    """Those kept in `file` if a plain step bears them out, else measured, and kept if they can be relied on.

    `measure` is given what to call between steps. None where nothing could be measured.
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
    """The points of the file if they hold now, with the level of today; None: to be measured."""
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
            return  # so slow that to try again takes as long as to measure
