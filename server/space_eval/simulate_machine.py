"""What a step truly takes on the simulated machine, and what a worker there knows of it at its start."""

from __future__ import annotations

import copy
import importlib.resources
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from space_model.draft_layout import DraftLayout
from space_server.cost_file import BadCostFile, kept_points
from space_server.step_cost import Point, StepCost, StepShape, read_points

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences of the steps from which a simulated worker knows its machine."""

LAYOUTS = (DraftLayout.plain(), *(DraftLayout.full(k, k) for k in (1, 2, 3, 5)))
PREFILL = (32, 128, 512, 2048)
CONTEXT, LONG_CONTEXT = 64, 2048


class MachineError(ValueError):
    """A machine that cannot be simulated; the message names the flag's value and the cure."""


class Machine(Protocol):
    """Seconds of a step, by its shape."""

    @property
    def name(self) -> str: ...

    def seconds(self, shape: StepShape) -> float: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Ridge:
    """A fixed part, and so much for every row above the ridge; below it rows are free."""

    base: float  # seconds
    per_row: float  # seconds
    ridge: int = 0  # rows

    @property
    def name(self) -> str:
        return f"{1000 * self.base:g} ms a step + {1000 * self.per_row:g} ms a row above {self.ridge}"

    def seconds(self, shape: StepShape) -> float:
        return self.base + self.per_row * max(0, shape.num_rows - self.ridge)


@dataclass(frozen=True)
class Roofline:
    """SPACE §5: t0 + max(bytes / bandwidth, operations / speed), keys and values read once per sequence."""

    device: str
    model: str
    num_weights: float
    kv_bytes: float  # of one id, all layers
    pair_operations: float  # of a row and an id before it, all layers
    fixed: float  # seconds: host and launches
    bandwidth: float  # bytes per second, in practice
    speed: float  # operations per second, in practice
    weight_bytes: float = 2.0

    @property
    def name(self) -> str:
        weights = f"{self.num_weights * self.weight_bytes / 1e9:.1f} GB of weights"
        return (
            f"{self.device}, {self.model}: {1000 * self.fixed:g} ms + max({weights} "
            f"and {self.kv_bytes / 1e3:.0f} kB a cached id over {self.bandwidth / 1e12:.2f} TB/s, "
            f"2·{self.num_weights / 1e9:.2f}e9 operations a row over {self.speed / 1e12:.0f}e12/s)"
        )

    def seconds(self, shape: StepShape) -> float:
        read = self.num_weights * self.weight_bytes + self.kv_bytes * shape.num_context
        done = 2.0 * self.num_weights * shape.num_rows + self.pair_operations * shape.num_pairs
        return self.fixed + max(read / self.bandwidth, done / self.speed)


@dataclass(frozen=True)
class Measured:
    """The parts that come nearest to what a worker has measured."""

    name: str
    cost: StepCost

    def seconds(self, shape: StepShape) -> float:
        return self.cost.seconds(shape)


_LLAMA_8B = {
    "model": "Llama-3.1-8B in bfloat16",
    "num_weights": 8.03e9,
    "kv_bytes": 2 * 32 * 8 * 128 * 2.0,  # K and V, layers, heads of K, V, their width, bytes
    "pair_operations": 4 * 32 * 4096.0,  # q·k and p·v, layers, hidden
}
_LLAMA_70B = {
    "num_weights": 70.6e9,
    "kv_bytes": 2 * 80 * 8 * 128 * 2.0,
    "pair_operations": 4 * 80 * 8192.0,
}
BANDWIDTH_SHARE, SPEED_SHARE = 0.8, 0.65
"""Of the data sheet's numbers, what practice leaves (SPACE §5 has ×0.6–0.7 for the ridge)."""

PRESETS: Mapping[str, Roofline] = {
    name: Roofline(
        device=device,
        fixed=fixed,
        bandwidth=BANDWIDTH_SHARE * bandwidth,
        speed=SPEED_SHARE * speed,
        **model,  # type: ignore[arg-type]
    )
    for name, device, fixed, bandwidth, speed, model in (
        ("h200-8b", "H200", 0.5e-3, 4.8e12, 989e12, _LLAMA_8B),
        ("h100-8b", "H100", 0.5e-3, 3.35e12, 989e12, _LLAMA_8B),
        ("a100-8b", "A100", 0.5e-3, 2.04e12, 312e12, _LLAMA_8B),
        (
            "h200x4-70b",
            "4 H200 as one",
            2.5e-3,
            4 * 4.8e12,
            4 * 989e12,
            {"model": "Llama-3.1-70B in bfloat16", **_LLAMA_70B},
        ),
    )
}
"""Machines by name, from data sheets and SPACE §5: computed, not measured."""


MEASURED: Mapping[str, tuple[str, str]] = {
    "cpu-embedded": (
        "embedded-2-cores.json",
        "2 cores (x86-64, AVX-512 bf16), the embedded model: 61 steps measured by a worker, commit 649c90e",
    ),
    "cpu-125m": (
        "llama-125m-2-cores.json",
        "2 cores (x86-64, AVX-512 bf16), a Llama of 125 M: the steps behind the table of engines in server/README.md, "
        "commit b0b0f82",
    ),
}
"""Machines by name whose steps were measured: the file of points, and what it is."""


def named(name: str) -> Roofline | Measured:
    """One of PRESETS or MEASURED."""
    if name in PRESETS:
        return PRESETS[name]
    file, what = MEASURED[name]
    text = (importlib.resources.files("space_eval") / "machines" / file).read_text(encoding="utf-8")
    return Measured(what, StepCost.from_points(read_points(json.loads(text))))


def measured(file: Path) -> Measured:
    """The machine whose points a worker has measured and kept. Raises MachineError."""
    try:
        points = kept_points(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise MachineError(
            f"{file} cannot be read: {error.strerror or error}. A server keeps what it has measured as "
            "~/.cache/spaceserve/step-cost-*.json."
        ) from None
    except BadCostFile as error:
        raise MachineError(f"{file}: {error}. A server keeps points as ~/.cache/spaceserve/step-cost-*.json.") from None
    except ValueError as error:
        raise MachineError(f"{file} is no JSON: {error}.") from None
    return Measured(f"{len(points)} steps measured by a worker ({file.name})", StepCost.from_points(points))


class Known(StepCost):
    """Knows the machine exactly, and so has nothing to learn."""

    def __init__(self, machine: Machine) -> None:
        super().__init__([])
        self._machine = machine

    def seconds(self, shape: StepShape) -> float:
        return self._machine.seconds(shape)

    def learn(self, shape: StepShape, seconds: float) -> None:
        pass


def estimate(machine: Machine, error: float, seed: int) -> StepCost:
    """What a worker has measured at its start, each step wrong by up to the share `error`; it learns from there."""
    return copy.deepcopy(_estimate(machine, error, seed))


@lru_cache(maxsize=64)
def _estimate(machine: Machine, error: float, seed: int) -> StepCost:
    source = random.Random(f"{machine.name} {seed}")
    points: list[Point] = []
    for shape in _shapes():
        points.append((shape, machine.seconds(shape) * (1.0 + source.uniform(-error, error))))
    return StepCost.from_points(points)


def _shapes() -> list[StepShape]:
    shapes = [
        StepShape(
            n,
            n * (1 + layout.num_drafts),
            n * layout.num_masks,
            n * (layout.num_masks > 0),
            num_context=n * context,
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
