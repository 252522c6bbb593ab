"""What a step takes on the simulated machine, and what a worker there knows of it at its start."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from space_model.geometry.draft_layout import DraftLayout
from space_server.step_cost import Point, StepCost, StepShape

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences of the steps from which a simulated worker knows its machine."""

LAYOUTS = (DraftLayout.plain(), *(DraftLayout.full(k, k) for k in (1, 2, 3, 5)))
PREFILL = (32, 128, 512, 2048)
CONTEXT, LONG_CONTEXT = 64, 2048


class SimulatedMachine(Protocol):
    """Seconds of a step, by its shape."""

    def seconds(self, shape: StepShape) -> float: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class RidgeMachine:
    """A fixed time per step, and more for every row above the ridge; rows below it are free."""

    base: float  # seconds
    per_row: float  # seconds
    ridge: int = 0  # rows

    def seconds(self, shape: StepShape) -> float:
        return self.base + self.per_row * max(0, shape.num_rows - self.ridge)


@dataclass(frozen=True)
class RooflineMachine:
    """SPACE §5: t0 + max(bytes / bandwidth, operations / speed); keys and values are read once per sequence."""

    num_weights: float
    kv_bytes: float  # of one token, all layers
    pair_operations: float  # of a row and a token before it, all layers
    fixed: float  # seconds: host and launches
    bandwidth: float  # bytes per second, in practice
    speed: float  # operations per second, in practice
    weight_bytes: float = 2.0

    def seconds(self, shape: StepShape) -> float:
        read = self.num_weights * self.weight_bytes + self.kv_bytes * shape.num_context
        done = 2.0 * self.num_weights * shape.num_rows + self.pair_operations * shape.num_pairs
        return self.fixed + max(read / self.bandwidth, done / self.speed)


H200_8B = RooflineMachine(
    num_weights=8.03e9,
    kv_bytes=2 * 32 * 8 * 128 * 2.0,  # K and V, layers, heads of K and V, their width, bytes
    pair_operations=4 * 32 * 4096.0,  # q·k and p·v, layers, hidden
    fixed=0.5e-3,
    bandwidth=0.8 * 4.8e12,  # share of the data sheet's number that practice leaves
    speed=0.65 * 989e12,  # SPACE §5 has ×0.6–0.7 for the ridge
)
"""Llama-3.1-8B in bfloat16 on an H200: computed from the data sheet, not measured."""


class KnownCost(StepCost):
    """The cost model of a worker that knows the machine exactly, and so has nothing to learn."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__([])
        self._machine = machine

    def seconds(self, shape: StepShape) -> float:
        return self._machine.seconds(shape)

    def learn(self, shape: StepShape, seconds: float) -> None:
        pass


def estimate(machine: SimulatedMachine, error: float, seed: int) -> StepCost:
    """What a worker has measured at its start, each step wrong by up to the share `error`; it learns from there."""
    return copy.deepcopy(_estimate(machine, error, seed))


@lru_cache(maxsize=64)
def _estimate(machine: SimulatedMachine, error: float, seed: int) -> StepCost:
    source = random.Random(f"{machine} {seed}")
    points: list[Point] = []
    for shape in _shapes():
        points.append((shape, machine.seconds(shape) * (1.0 + source.uniform(-error, error))))
    return StepCost.from_points(points)


def _shapes() -> list[StepShape]:
    shapes = [
        StepShape(
            n, n * (1 + layout.num_drafts), n * layout.num_masks, n * (layout.num_masks > 0), num_context=n * context
        )
        for n in SIZES
        for layout in LAYOUTS
        for context in (CONTEXT, LONG_CONTEXT)
    ]
    shapes += [
        StepShape(n, n, num_prefill_rows=rows, num_prefill_pairs=rows * context, num_context=n * CONTEXT)
        for n in (1, 32)
        for rows in PREFILL
        for context in (0, LONG_CONTEXT)
    ]
    return shapes
