"""Every load on every arm, round by round, the arms in rotating order, so that what slows the machine slows all."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from space_eval.bench_limits import Limits
from space_eval.bench_rehearsal import Rehearsal
from space_eval.bench_report import Row, rows
from space_eval.bench_round import Round, run_round
from space_eval.bench_swing import Moments, halves, moments, width
from space_eval.bench_watch import idle
from space_eval.load_arm import Arm
from space_eval.load_dialect import Ask
from space_eval.load_shape import Closed, Open, Shape, Swing
from space_eval.load_work import Work

OPEN_SECONDS = 10.0
"""Of arrivals in a round of open loop, where nothing is said: enough for a few hundred requests at common rates."""

SWING_PERIODS = 6


@dataclass(frozen=True)
class Plan:
    """What is measured on each arm."""

    shapes: Sequence[Shape]
    num_rounds: int  # on each start of the servers
    num_requests: int | None  # per round; None: as the shape has it
    seconds: float | None  # of a round, instead of a number
    num_warm_up: int | None  # requests before the first round; None: one for each stream
    limits: Limits | None
    baselines: int  # of the first arms, those that all others are compared with
    carbon_intensity: float | None = None  # grams of CO2e for a kWh
    num_starts: int = 1

    def requests(self, shape: Shape) -> int | None:
        """Of a round; None where time ends it."""
        if self.seconds is not None or isinstance(shape, Swing):
            return None
        if self.num_requests is not None or not isinstance(shape, Closed):
            return self.num_requests
        return 2 * shape.num_streams

    def duration(self, shape: Shape) -> float | None:
        """Of a round; None where the number of requests ends it."""
        if isinstance(shape, Swing):
            return SWING_PERIODS * shape.period if self.seconds is None else self.seconds
        if isinstance(shape, Open) and self.seconds is None and self.num_requests is None:
            return OPEN_SECONDS
        return self.seconds

    def warm_up(self, shape: Shape) -> int:
        """Requests of each arm before the first round."""
        if self.num_warm_up is not None:
            return self.num_warm_up
        return shape.num_streams if isinstance(shape, Closed) else shape.high if isinstance(shape, Swing) else 4


@dataclass(frozen=True)
class Measured:
    """All figures."""

    rows: Sequence[Row]
    moments: Mapping[str, Sequence[Moments]]  # of swings, by load


@dataclass(frozen=True)
class Marking:
    """What keeps one round's prompts from being known from another."""

    salted: bool  # by a field of the request: no prompt needs a mark
    same_work: bool  # all arms get the same prompts

    @classmethod
    def of(cls, arms: Sequence[Arm]) -> Marking:
        salted = all(arm.is_ours and arm.dialect.name != "tgi" for arm in arms)
        shared = len({arm.endpoint for arm in arms}) < len(arms)  # a server with two arms would know the other's
        return cls(salted, salted or not shared)


async def take(
    arms: Sequence[Arm],
    work: Work,
    plan: Plan,
    cpu_seconds: Callable[[Arm], Callable[[], Mapping[str, float]]],
    start: int = 0,
) -> list[list[list[Round]]]:
    """By shape and round, every arm's, of servers that were started for the `start`-th time. Raises LoadError."""
    marking, rehearsal = Marking.of(arms), Rehearsal()
    taken: list[list[list[Round]]] = []
    total = sum(
        len(arms) * (plan.warm_up(shape) + plan.num_rounds * (plan.requests(shape) or 0)) for shape in plan.shapes
    )
    run = os.getpid()
    with tqdm(total=total or None, unit="request", file=sys.stderr, disable=None) as progress:

        async def one(arm: Arm, shape: Shape, number: int, requests: int | None, seconds: float | None) -> Round:
            name = f"round {number - start * plan.num_rounds}/{plan.num_rounds}" if number else "warm-up"
            mark = f"# {run}.{shape.name}.{number}" + ("" if marking.same_work else f".{arm.name}")
            rate = shape.rate if isinstance(shape, Open) else None

            def asks(count: int | None) -> Iterator[Ask]:
                return itertools.islice(work.asks(number, rate, mark="" if marking.salted else mark), count)

            plain, unknown = rehearsal.of(arm, asks(requests or len(work.recorded)))
            if unknown:
                progress.set_description(f"{shape.name}, {arm.name}, {name}: {len(unknown)} answers without drafts")
                await run_round(plain, Closed(_streams(shape)), iter(unknown), salt=None)
            progress.set_description(f"{shape.name}, {arm.name}, {name}")
            round_ = await run_round(
                arm,
                shape,
                asks(requests),
                salt=f"bench {run} {shape.name} {arm.name} {number}" if marking.salted else None,
                seconds=seconds,
                watch_every=width(shape) if isinstance(shape, Swing) and arm.is_ours and number else None,
                cpu_seconds=cpu_seconds(arm),
                done=progress.update,
            )
            if seconds is not None and not isinstance(shape, Open):  # what was cut off must not slow the next arm
                await idle(arm.endpoint, is_ours=arm.is_ours)
            return dataclasses.replace(round_, start=start)

        for shape in plan.shapes:
            num_warm_up = plan.warm_up(shape)
            for arm in arms if num_warm_up else ():
                warm = Closed(shape.high if isinstance(shape, Swing) else min(num_warm_up, _streams(shape)))
                await one(arm, warm, 0, num_warm_up, None)
            rounds: list[list[Round]] = []
            for number in range(start * plan.num_rounds, (start + 1) * plan.num_rounds):
                turn = number % len(arms)
                made: dict[str, Round] = {}
                for arm in [*arms[turn:], *arms[:turn]]:
                    made[arm.name] = await one(arm, shape, number + 1, plan.requests(shape), plan.duration(shape))
                rounds.append([made[arm.name] for arm in arms])
            taken.append(rounds)
    return taken


def figures(arms: Sequence[Arm], plan: Plan, taken: Sequence[Sequence[Sequence[Round]]]) -> Measured:
    """What the rounds come to. `taken`: by shape and round, every arm's."""
    found: list[Row] = []
    timelines: dict[str, Sequence[Moments]] = {}
    for shape, rounds in zip(plan.shapes, taken, strict=True):
        here = rows(
            shape,
            rounds,
            [arm.speculation for arm in arms],
            baselines=plan.baselines,
            same_work=Marking.of(arms).same_work,
            limits=plan.limits,
            carbon_intensity=plan.carbon_intensity,
        )
        if isinstance(shape, Swing):
            timelines[shape.name] = moments(shape, rounds)
            here = [_with_phases(shape, row, place, rounds) for place, row in enumerate(here)]
        found += here
    return Measured(found, timelines)


def _with_phases(swing: Swing, row: Row, place: int, rounds: Sequence[Sequence[Round]]) -> Row:
    mine = [arms[place] for arms in rounds]
    bases = {arms.arm: base for base, arms in enumerate(rounds[0]) if arms.arm in row.ratios}
    return dataclasses.replace(
        row, phases={name: halves(swing, mine, [arms[base] for arms in rounds]) for name, base in bases.items()}
    )


def _streams(shape: Shape) -> int:
    return shape.num_streams if isinstance(shape, Closed) else 4


def shown(plan: Plan, work: Work) -> dict[str, Any]:
    """The load, for the record."""
    return {
        "shapes": [shape.name for shape in plan.shapes],
        "num_starts": plan.num_starts,
        "num_rounds": plan.num_rounds,
        "num_requests": plan.num_requests,
        "seconds": plan.seconds,
        "num_warm_up": plan.num_warm_up,
        "num_prompts": len(work.recorded),
        "prompt_tokens": None if work.prompt_tokens is None else work.prompt_tokens.form,
        "output_tokens": work.output_tokens.form,
        "prompts_are": "token ids" if work.ids else "text",
        "seed": work.seed,
        "carbon_intensity": plan.carbon_intensity,
        "limits_seconds": None if plan.limits is None else dict(plan.limits.seconds),
    }
