"""How many nodes, workers and routers carry how much: cells of one router and its workers, side by side.

A worker serves one router at a time, and a router is one process on one core. So a fleet is many cells that know
nothing of each other, with a balancer before them that spreads requests evenly at random. One cell is simulated; the
fleet is so many of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from space_eval.simulate_figures import Figures
from space_eval.simulate_plan import at_rate, highest_rate
from space_eval.simulate_router import NOTHING
from space_eval.simulate_run import Scenario

MARGIN = 0.95
"""Of the rate that one worker holds, what each worker of a fleet is given: arrivals are not even."""

MOST_BUSY = 0.85
"""Of a router's core: beyond, a burst becomes a queue that does not go away."""

MOST_WORKERS = 64
"""Of one router, that are looked at."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One router and its workers, at a rate that they hold."""

    num_workers: int
    rate: float  # requests a second
    figures: Figures


@dataclass(frozen=True)
class Fleet:
    """So many nodes."""

    num_nodes: int
    num_workers: int
    num_routers: int
    cell: Cell  # the largest of them

    @property
    def rate(self) -> float:
        """Requests a second of all cells."""
        return self.num_workers * self.cell.rate / self.cell.num_workers

    @property
    def scale(self) -> float:
        """Of a cell's figures."""
        return self.num_workers / self.cell.num_workers


class Cells:
    """Cells of one kind, tried as they are asked for."""

    def __init__(self, scenario: Scenario, share: float, say: Say) -> None:
        """`scenario`: of one worker; `share`: of requests that must keep its limits."""
        self._scenario, self._share, self._say = scenario, share, say
        self._tried: dict[int, Cell | None] = {}
        free = replace(scenario, router=NOTHING)
        self.rate_of_one, _ = highest_rate(free, share, say)  # behind a router that costs nothing; 0: it holds none

    def of(self, num_workers: int) -> Cell | None:
        """With so many workers at `MARGIN` of their rate each; None: of none, or of more than their router carries."""
        if num_workers and num_workers not in self._tried:
            rate = MARGIN * num_workers * self.rate_of_one
            figures = at_rate(replace(self._scenario, num_workers=num_workers), rate, self._share)
            kept = figures.kept_late >= self._share and figures.router_busy <= MOST_BUSY
            self._say(
                f"{num_workers} workers behind one router, {rate:.4g}/s: {figures.kept_late:.1%} within the limits, "
                f"router {figures.router_busy:.0%} busy"
            )
            self._tried[num_workers] = Cell(num_workers, rate, figures) if kept else None
        return self._tried.get(num_workers)

    def largest(self, most: int) -> Cell:
        """The most workers that one router carries, up to `most`; where it carries none, one, as far as it can."""
        good, tried = 0, 1
        while tried <= most and self.of(tried):
            good, tried = tried, 2 * tried
        bad = min(tried, most + 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.of(middle) else (good, middle)
        return self.of(good) or self._slowed()

    def _slowed(self) -> Cell:
        """One worker, as far as its router carries it. Raises ValueError where that is nowhere."""
        rate, _ = highest_rate(self._scenario, self._share, self._say)
        if not rate:
            raise ValueError("No rate keeps the limits behind a router that takes so long; see --router-cost.")
        figures = at_rate(self._scenario, MARGIN * rate, self._share)
        if figures.router_busy > MOST_BUSY:
            rate *= MOST_BUSY / figures.router_busy
            figures = at_rate(self._scenario, MARGIN * rate, self._share)
        cell = self._tried[1] = Cell(1, MARGIN * rate, figures)
        return cell


def fleets(scenario: Scenario, share: float, workers_per_node: int, nodes: Sequence[int], say: Say) -> list[Fleet]:
    """One for each number of nodes, in cells as even as can be. Raises ValueError where nothing keeps the limits."""
    cells = Cells(scenario, share, say)
    if not cells.rate_of_one:
        raise ValueError("No rate keeps the limits; give others by --slo.")
    found = []
    for num_nodes in nodes:
        num_workers = num_nodes * workers_per_node
        most = cells.largest(min(MOST_WORKERS, num_workers)).num_workers
        num_routers = math.ceil(num_workers / most)
        cell = None
        while cell is None:  # an evener cell is a smaller one: it is carried, but for the luck of its arrivals
            cell = cells.of(math.ceil(num_workers / num_routers))
            num_routers += cell is None
        found.append(Fleet(num_nodes, num_workers, num_routers, cell))
    return found
