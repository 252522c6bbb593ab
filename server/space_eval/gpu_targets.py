"""What the GPU path promises, figure by figure: the bounds that a report sets beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from space_eval.gpu_record import Figure, Record, written

CONTEXTS, BATCHES, ROWS = (1024, 8192, 32768), (1, 16, 64), (1, 36)
"""Of attention: positions before the step, sequences, rows of each (plain decoding, and full k = 5)."""

SHAPES = ("1b", "8b")
CROWDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

NOISE = 0.01
"""Share by which two equal arms may seem to differ."""


@dataclass(frozen=True)
class Target:
    """A figure and its bound."""

    name: str  # the figure's
    bound: float
    at_least: bool
    unit: str = ""
    only: str = ""  # the bound holds on GPUs with this in their name

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {written(self.bound, self.unit)}{f' on {self.only}' * bool(self.only)}"

    def verdict(self, figure: Figure | None, record: Record | None, device: str) -> str:
        """met, missed, or why there is no telling."""
        if record is not None and record.dry and record.outcome == "passed":
            return "dry run: means nothing"
        if record is None or figure is None or figure.value != figure.value:
            known = {} if record is None else record.missing
            why = known.get(self.name) or (record.why if record is not None else "") or "the stage did not get so far"
            return f"not run: {why}"
        if self.only and self.only not in device:
            return f"no bound for {device}"
        return "met" if (figure.value >= self.bound) == self.at_least or figure.value == self.bound else "missed"


def attention_name(context: int, batch: int, rows: int) -> str:
    """The figure of one case, by the backend that is best in it."""
    return f"attention {context // 1024}k × {batch}, {rows} row{'s' * (rows > 1)}: share of copy bandwidth"


def _attention() -> tuple[Target, ...]:
    cases = [(context, batch, rows) for rows in ROWS for context in CONTEXTS for batch in BATCHES]
    return tuple(Target(attention_name(*case), 0.70, at_least=True, unit="%") for case in cases)


def _llama(shape: str) -> tuple[Target, ...]:
    plain_rate = (Target("8b plain decoding at batch 1", 200, True, "tokens/s", only="H200"),) if shape == "8b" else ()
    return (
        Target(f"{shape} plain decoding at batch 1: share of weight bandwidth", 0.70, True, "%"),
        *plain_rate,
        Target(f"{shape} step(36 rows)/step(1 row) at batch 1", 1.15, False),
        Target(f"{shape} speed-up at k=5, acceptance .78", 3.0, True),
        Target(f"{shape} speed-up with the best layout, acceptance .78", 3.2, True),
        Target(f"{shape} device idle between steps, plain", 0.02, False, "%"),
        Target(f"{shape} device idle between steps, k=5", 0.02, False, "%"),
        *((Target("1b texts with exact products that drafts changed", 0, False),) if shape == "1b" else ()),
        *(Target(f"{shape} auto/plain at batch {batch}", 1 - NOISE, True) for batch in CROWDS),
    )


def _start(shape: str) -> tuple[Target, ...]:
    return (Target(f"{shape} first answer after the weights are read", 10.0, False, "s"),)


TARGETS: Mapping[str, tuple[Target, ...]] = {
    "compile": (Target("kernels that do not compile or do not fit", 0, False),),
    "kernels": (Target("kernel tests that failed", 0, False),),
    "gpu-tests": (Target("GPU tests that failed", 0, False),),
    "exact-float32": (
        Target("float32 differences that are no tie", 0, False),
        Target("float32 ties per 100,000 tokens", 1, False),
    ),
    "exact-bfloat16": (Target("bfloat16 differences that are no tie", 0, False),),
    "exact-products": (Target("exact: cells that are not bitwise equal", 0, False),),
    "eight-bits": (Target("eight bits: cells that are not bitwise equal", 0, False),),
    "attention": _attention(),
    **{f"llama-{shape}": _llama(shape) for shape in SHAPES},
    **{f"start-{shape}": _start(shape) for shape in SHAPES},
    "worker": (Target("texts over gRPC that drafts changed", 0, False),),
    "device-steps": (
        Target("texts that device-resident steps changed", 0, False),
        Target("exact: texts that device-resident steps changed", 0, False),
    ),
}
"""By stage."""
