"""Rounds of one point: every arm of every engine in turn, each other round from the last to the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from space_eval.engines_point import Answer, Point
from space_eval.engines_process import EngineFailed, EngineSpec, check


class Asked(Protocol):
    """An engine that answers: `EngineProcess`."""

    @property
    def spec(self) -> EngineSpec:
        """Who it is."""

    @property
    def arms(self) -> Sequence[str]:
        """Its ways to decode."""

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> None:
        """Warm up."""

    def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
        """One turn."""


@dataclass
class Cell:
    """One arm at one point."""

    engine: str
    arm: str
    rates: list[float] = field(default_factory=list)  # tokens per second, by round
    same_ids: float | None = None  # share of its ids until they differ from the first arm's
    bound: Mapping[str, float] | None = None  # the most that its drafts can bring
    failure: str | None = None

    @property
    def name(self) -> str:
        """`openvino: continuous batching`."""
        return f"{self.engine}: {self.arm}"


def measure(
    engines: Sequence[Asked],
    point: Point,
    prompts: Sequence[Sequence[int]],
    *,
    num_rounds: int,
    seconds: float,
    turned: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Cell]:
    """A cell for each arm. No round begins once `seconds` are over, but there is at least one.

    Who fails once is left out of what follows; the others go on.
    """
    lanes = [(engine, Cell(engine.spec.name, arm)) for engine in engines for arm in engine.arms]
    begun = clock()
    for engine, cell in lanes:
        try:
            engine.prepare(cell.arm, prompts, point)
        except EngineFailed as error:
            cell.failure = str(error)
    first: Answer | None = None
    for number in range(num_rounds):
        if number and clock() - begun > seconds:
            break
        answers: dict[str, Answer] = {}
        for engine, cell in lanes if number % 2 == 0 else reversed(lanes):
            if cell.failure is not None:
                continue
            try:
                answers[cell.name] = engine.run(cell.arm, prompts, point)
                cell.rates.append(check(answers[cell.name], point, cell.engine))
            except EngineFailed as error:
                cell.failure, cell.rates = str(error), []
                answers.pop(cell.name, None)
            turned()
        first = first or next(iter(answers.values()), None)
        for _, cell in lanes:
            if cell.same_ids is None and first is not None and cell.name in answers:
                cell.same_ids = answers[cell.name].same_ids(first)
    return [cell for _, cell in lanes]
