"""Writes the report of a run: `run.json`, `run.md` and, if matplotlib is installed, `run.png`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from space_train.train_plan import TrainPlan
from space_train.training.trainer import Counters, TrainResult

GIGABYTE = 1e9


def write_report(out: Path, plan: TrainPlan, result: TrainResult) -> None:
    """Write the report of a finished run to its folder."""
    counters = result.counters
    machine = {"num_processes": result.num_processes, "peak_bytes": result.peak_bytes}
    record = {"plan": plan.as_json(), **machine, **asdict(counters)}
    (out / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "run.md").write_text(as_markdown(plan, result), encoding="utf-8")
    plot(out / "run.png", plan, counters)


def as_markdown(plan: TrainPlan, result: TrainResult) -> str:
    """Return the compute and the held-out figures before and after, as Markdown."""
    counters = result.counters
    lines = [
        f"# {plan.method.value}, {counters.step} updates",
        "",
        f"{counters.num_tokens:,} tokens, {counters.num_masks:,} masks, {counters.flops:.3g} operations, "
        f"{counters.seconds / 60:.1f} minutes, at most {result.peak_bytes / GIGABYTE:.2f} GB.",
        "",
    ]
    if counters.curve:
        first, last = counters.curve[0], counters.curve[-1]
        places = {"progress", "step", "tokens", "flops", "seconds"}
        lines += ["| held out | before | after |", "|---|---|---|"]
        lines += [f"| {name} | {first[name]:.3f} | {last[name]:.3f} |" for name in last if name not in places]
    return "\n".join(lines) + "\n"


def plot(file: Path, plan: TrainPlan, counters: Counters) -> bool:
    """Plot training loss and held-out acceptance over the run. Return False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(range(1, len(counters.losses) + 1), counters.losses, linewidth=0.8, color="tab:gray", label="updates")
    left.plot(
        [entry["step"] for entry in counters.curve],
        [entry["loss"] for entry in counters.curve],
        color="tab:blue",
        label="held out, next token",
    )
    left.set(xlabel="update", ylabel="loss (nats)", title=plan.method.value)
    left.legend()
    for name in _drafts(counters.curve):
        steps = [entry["step"] for entry in counters.curve]
        right.plot(steps, [entry[name] for entry in counters.curve], label=name.replace("_", " "))
    right.set(xlabel="update", ylabel="agreement with the model's own token", ylim=(0, 1), title="held out, by draft")
    if right.lines:
        right.legend(ncols=2, fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True


def _drafts(curve: list[dict[str, Any]]) -> list[str]:
    return [name for name in (curve[-1] if curve else {}) if name.startswith(("mask_", "head_"))]
