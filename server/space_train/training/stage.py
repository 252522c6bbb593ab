"""One stage of training: a step repeated until its budget is used, with progress lines and checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from space_train.train_plan import Budget

Measures = dict[str, float]


class Stateful(Protocol):
    """A part that a checkpoint can save: a module, an optimiser."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass
class StageCounters:
    """Progress of a stage."""

    step: int = 0
    num_tokens: int = 0
    elapsed_seconds: float = 0.0
    drawn: dict[str, int] = field(default_factory=dict)  # ids drawn from each stream
    history: list[Measures] = field(default_factory=list)  # one entry per evaluation


@dataclass(frozen=True)
class StagePace:
    """Intervals, in seconds, of a stage's logging, evaluation and checkpoints."""

    checkpoint: float = 90.0
    line: float = 20.0
    evaluation: float = 300.0


DEFAULT_PACE = StagePace()


def save_atomically(state: Mapping[str, Any], path: Path) -> None:
    """Write, fsync, then rename: readers see the old file or the new one, never a partial one. Raises OSError."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        partial.unlink(missing_ok=True)  # a partial file would keep a full disk full
        if isinstance(error, RuntimeError):  # torch raises it for a failed write
            raise OSError(f"{path} cannot be written: {error.__context__ or error}") from error
        raise
    partial.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load the tensors and plain values of a checkpoint (no code is run)."""
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return state


def run_stage(
    name: str,
    budget: Budget,
    parts: Mapping[str, Stateful],
    step: Callable[[StageCounters, float], Measures],
    evaluate: Callable[[], Measures],
    checkpoint: Path,
    *,
    pace: StagePace,
    stop_after_steps: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> StageCounters:
    """Repeat `step(counters, progress)` until `budget` is used. Return the final counters.

    An existing checkpoint is resumed, with its parts, counters and data position. `step` adds to
    `counters.num_tokens` and `counters.drawn`. `stop_after_steps` stops early without finishing, like a kill.
    """
    counters = StageCounters()
    if checkpoint.exists():
        state = load_checkpoint(checkpoint)
        for key, part in parts.items():
            part.load_state_dict(state["parts"][key])
        counters = StageCounters(**state["counters"])
        print(f"{name}: resumed at step {counters.step}, {counters.num_tokens / 1e6:.2f} M tokens", flush=True)

    def save() -> None:
        state = {key: part.state_dict() for key, part in parts.items()}
        save_atomically({"parts": state, "counters": asdict(counters)}, checkpoint)

    def assess(progress: float) -> None:
        measures = {"progress": progress, "tokens": float(counters.num_tokens), **evaluate()}
        counters.history.append(measures)
        print(f"{name}: held out: {describe(measures)}", flush=True)

    last = last_line = last_save = clock()
    last_evaluation, line_tokens, steps_here = last, counters.num_tokens, 0
    while (progress := budget.progress(counters.elapsed_seconds, counters.num_tokens)) < 1.0:
        if stop_after_steps is not None and steps_here >= stop_after_steps:
            return counters
        measures = step(counters, progress)
        counters.step, steps_here = counters.step + 1, steps_here + 1
        now = clock()
        counters.elapsed_seconds, last = counters.elapsed_seconds + now - last, now
        if now - last_line >= pace.line:
            rate = (counters.num_tokens - line_tokens) / (now - last_line)
            done = budget.progress(counters.elapsed_seconds, counters.num_tokens)
            left = counters.elapsed_seconds * (1 - done) / max(done, 1e-9) / 60
            print(
                f"{name}: {100 * done:5.1f} %  step {counters.step}  {counters.num_tokens / 1e6:.2f} M tokens  "
                f"{rate:,.0f} tokens/s  {describe(measures)}  ETA {left:.0f} min",
                flush=True,
            )
            last_line, line_tokens = now, counters.num_tokens
        if now - last_evaluation >= pace.evaluation:
            assess(progress)
            last_evaluation = clock()
        if now - last_save >= pace.checkpoint:
            save()
            last_save = clock()
    if not counters.history or counters.history[-1]["progress"] < 1.0:
        assess(1.0)
        save()
    return counters


def describe(measures: Measures) -> str:
    """Format measures as `loss 2.310  bits_per_byte 0.981`, without the keys that only locate an entry."""
    return "  ".join(f"{key} {value:.3f}" for key, value in measures.items() if key not in ("progress", "tokens"))
