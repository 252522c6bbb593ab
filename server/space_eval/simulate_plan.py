"""Capacity: the highest rate of arrivals within limits, and the workers that a rate needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from space_server.step_cost import StepShape

from space_eval.simulate_figures import Figures
from space_eval.simulate_load import Poisson
from space_eval.simulate_run import Scenario, Simulation
from space_eval.simulate_worker import Speculation

PRECISION = 0.03
"""The rate is found to this share."""

LEAST_RATE, MOST_RATE = 0.05, 100_000.0
MOST_WORKERS = 1024

Say = Callable[[str], None]


@dataclass(frozen=True)
class Capacity:
    """What one arm holds."""

    arm: str
    rate: float  # requests per second that one worker holds; 0: none
    at_rate: Figures | None  # there
    num_workers: int | None = None  # for the rate that was asked for; None: not asked, or not to be had
    with_workers: Figures | None = None


def plan(scenario: Scenario, arm: Speculation, share: float, wanted: float | None, say: Say) -> Capacity:
    """`share`: of requests that must keep the scenario's limits; `wanted`: a rate to find the workers for."""
    scenario = scenario.arm(arm)
    rate, figures = highest_rate(scenario, share, say)
    if wanted is None or not rate:
        return Capacity(str(arm), rate, figures)
    num_workers, with_workers = fewest_workers(scenario, share, wanted, rate, say)
    return Capacity(str(arm), rate, figures, num_workers, with_workers)


def highest_rate(scenario: Scenario, share: float, say: Say) -> tuple[float, Figures | None]:
    """Of one worker, to within `PRECISION`: from a guess doubled until it fails, or halved until it holds; then between
    the two.
    """
    tried: dict[float, Figures] = {}

    def held(rate: float) -> bool:
        tried[rate] = figures = at_rate(replace(scenario, num_workers=1), rate, share)
        say(f"{figures.arm}: {rate:.3g}/s: {figures.kept_late:.1%} of requests within the limits")
        return figures.kept_late >= share

    low, high = 0.0, guess(scenario)
    while high < MOST_RATE and held(high):
        low, high = high, 2 * high
    while not low and high > LEAST_RATE:
        if held(high / 2):
            low = high / 2
        else:
            high /= 2
    while low and high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        if held(middle):
            low = middle
        else:
            high = middle
    return low, tried.get(low)


def guess(scenario: Scenario) -> float:
    """Requests a second that a worker might hold, decoding plainly: where to begin."""
    asks = list(itertools.islice(scenario.work.asks(), 200))
    num_prompt = sum(len(ask.prompt_ids) for ask in asks) / len(asks)
    num_output = sum(ask.num_output * ask.num_choices for ask in asks) / len(asks)
    batch = scenario.worker.max_sequences
    step = scenario.machine.seconds(StepShape.plain(batch, round(batch * (num_prompt + num_output / 2))))
    prefill = scenario.machine.seconds(StepShape(1, 1, num_prefill_rows=round(num_prompt)))
    return min(MOST_RATE / 2, max(LEAST_RATE, 0.5 / (num_output * step / batch + prefill)))


def fewest_workers(
    scenario: Scenario, share: float, wanted: float, rate_of_one: float, say: Say
) -> tuple[int | None, Figures | None]:
    """That hold `wanted` requests a second together, tried and not only divided."""
    number = min(MOST_WORKERS, max(1, math.ceil(wanted / rate_of_one)))
    best: tuple[int | None, Figures | None] = (None, None)
    while 0 < number <= MOST_WORKERS:
        figures = at_rate(replace(scenario, num_workers=number), wanted, share)
        say(f"{figures.arm}: {number} workers: {figures.kept_late:.1%} of requests within the limits")
        if figures.kept_late >= share:
            best = number, figures
            number -= 1
        elif best[0] is not None:
            break
        else:
            number += max(1, number // 16)
    return best


def at_rate(scenario: Scenario, rate: float, share: float) -> Figures:
    """The scenario with so many requests a second, long enough for at least 100 of them; broken off where so many have
    failed that `share` cannot be kept.
    """
    seconds = max(scenario.seconds, 100 / rate)
    work = replace(scenario.work, arrivals=Poisson(rate))
    # A queue without bound: who waits too long breaks a limit by himself.
    made = replace(scenario, work=work, seconds=seconds, max_queue=1 << 30)
    num_expected = rate * seconds / 2
    return Simulation(made, most_failed=2 * (1 - share) * num_expected + 10).run()
