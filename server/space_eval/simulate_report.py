"""Tables, a record and figures of simulated runs, each with its title: SIMULATED."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from space_common.version import version

from space_eval.bench_facts import commit
from space_eval.plots import line_plot
from space_eval.simulate_figures import LATENCIES, Figures, Moment
from space_eval.simulate_plan import Capacity
from space_eval.simulate_run import Scenario

TITLE = "SIMULATED: real scheduling and control, made-up time"

_HEAD = (
    "arm",
    "tokens/s",
    "ratio",
    "tokens/step",
    "drafts",
    "accepted",
    "rows/step",
    "TTFT p50 / p95",
    "ITL p50 / p95",
    "gap p99 / max",
    "E2E p50 / p95",
    "queue p95",
    "preempted",
    "within limits",
    "changes / turns a s",
)


def facts(scenario: Scenario) -> dict[str, Any]:
    """What the figures follow from."""
    worker = scenario.worker
    error = scenario.cost_error
    known = "exactly" if error is None else f"measured to ±{error:.0%}, then learnt"
    return {
        "what": TITLE,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version(),
        "commit": commit(),
        "machine": scenario.machine.name,
        "machine_known": known,
        "jitter": scenario.jitter,
        "acceptance": scenario.acceptance.name,
        "load": scenario.work.name,
        "seconds": scenario.seconds,
        "workers": f"{scenario.num_workers}, each {worker.num_blocks} pages of {worker.block_size}, "
        f"{worker.max_sequences} sequences, {worker.num_masks} masks",
        "prefill": f"{scenario.max_prefill_rows} rows, "
        + ("no budget" if worker.prefill_budget is None else f"{_ms(worker.prefill_budget)} budget"),
        "limits": dict(scenario.limits.seconds) if scenario.limits else None,
        "link": scenario.link,
        "router": f"{scenario.router.name} of its own",
        "seed": scenario.seed,
    }


def table(runs: Sequence[Figures], *, has_limits: bool = True) -> str:
    """One line per arm, as Markdown; the ratio is of tokens per second, to the first."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for run in runs:
        times = run.latencies
        cells = (
            run.arm,
            f"{run.tokens_per_second:.0f}",
            f"{run.tokens_per_second / runs[0].tokens_per_second:.3f}" if runs[0].num_tokens else "–",
            _shown(run.tokens_per_step),
            _shown(run.draft_length),
            _shown(run.accepted),
            _shown(run.rows_per_step, 0),
            _pair(times["ttft"], "p50", "p95"),
            _pair(times["itl"], "p50", "p95"),
            _pair(times["gap"], "p99", "max"),
            _pair(times["e2e"], "p50", "p95"),
            _ms(times["queue"]["p95"]),
            str(run.num_preemptions),
            f"{run.num_kept / max(1, run.num_requests):.1%}" if has_limits else "–",
            f"{_shown(run.changes_per_second, 1)} / {_shown(run.turns_per_second, 1)}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def capacity_table(found: Sequence[Capacity], share: float, wanted: float | None) -> str:
    """The rates, as Markdown."""
    head = ["arm", "requests/s of one worker", "ratio", "tokens/s", "TTFT p95", "ITL p95", "gap p99", "E2E p95"]
    if wanted is not None:
        head += [f"workers for {wanted:g}/s", "their TTFT p95", "their ITL p95"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in found:
        run = one.at_rate
        cells = [one.arm, f"{one.rate:.3g}" if one.rate else f"none keeps the limits for {share:.0%}"]
        cells.append(f"{one.rate / found[0].rate:.2f}" if found[0].rate else "–")
        cells += _latencies(run, ("ttft", "p95"), ("itl", "p95"), ("gap", "p99"), ("e2e", "p95"))
        if wanted is not None:
            cells.append("–" if one.num_workers is None else str(one.num_workers))
            cells += _latencies(one.with_workers, ("ttft", "p95"), ("itl", "p95"))[1:]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _latencies(run: Figures | None, *wanted: tuple[str, str]) -> list[str]:
    if run is None:
        return ["–"] * (1 + len(wanted))
    return [f"{run.tokens_per_second:.0f}", *(_ms(run.latencies[name][rank]) for name, rank in wanted)]


def cost_of_simulating(runs: Sequence[Figures]) -> str:
    """One line."""
    parts = [
        f"{run.arm} {run.wall_seconds:.1f} s ({run.cpu_seconds:.1f} s of processor, "
        f"{run.cpu_seconds / run.seconds:.2f} a simulated second)"
        for run in runs
    ]
    return "simulated in " + ", ".join(parts)


def markdown(known: Mapping[str, Any], tables: Sequence[str], pictures: Sequence[str]) -> str:
    """The whole report."""
    lines = [f"# {TITLE}", ""]
    lines += [f"{name}: {value}  " for name, value in known.items() if name != "what"]
    lines += ["", *tables, ""]
    lines += [f"{name}: {what}  " for name, what in LATENCIES.items()]
    lines.append(
        "changes, turns: how often the controller takes another rule, or goes from plain decoding to drafts or back  "
    )
    lines += ["", *(f"![{picture.partition('.')[0]}]({picture})" for picture in pictures)]
    return "\n".join(lines) + "\n"


def write(
    out: Path,
    known: Mapping[str, Any],
    tables: Sequence[str],
    runs: Sequence[Figures],
    found: Sequence[Capacity] = (),
    pictures: Sequence[str] = (),
) -> list[Path]:
    """simulate.json and simulate.md in a folder. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"facts": known, "runs": [run.as_json() for run in runs]}
    if found:
        record["capacity"] = [
            {
                "arm": one.arm,
                "rate": one.rate,
                "num_workers": one.num_workers,
                "at_rate": one.at_rate and one.at_rate.as_json(),
                "with_workers": one.with_workers and one.with_workers.as_json(),
            }
            for one in found
        ]
    (out / "simulate.json").write_text(json.dumps(_numbers(record), indent=1) + "\n", encoding="utf-8")
    (out / "simulate.md").write_text(markdown(known, tables, pictures), encoding="utf-8")
    return [out / "simulate.json", out / "simulate.md"]


_PICTURES: Mapping[str, tuple[str, Callable[[Moment], float]]] = {
    "tokens": ("tokens per second", lambda moment: moment.tokens_per_second),
    "drafts": ("drafts per sequence and step", lambda moment: moment.draft_length),
    "rows": ("rows per step", lambda moment: moment.rows_per_step),
    "running": ("requests running", lambda moment: moment.running),
    "queue": ("requests waiting", lambda moment: moment.queued),
    "pages": ("pages held", lambda moment: moment.blocks_held),
}


def draw(out: Path, runs: Sequence[Figures], note: str) -> list[str]:
    """A figure for each of the lines above, over time. Raises PlotError."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (label, of) in _PICTURES.items():
        series = {run.arm: [(moment.end, of(moment)) for moment in run.moments] for run in runs}
        line_plot(out / f"{name}.png", series, title=f"SIMULATED: {label}", x="virtual seconds", y=label, note=note)
    return [f"{name}.png" for name in _PICTURES]


def _pair(times: Mapping[str, float], first: str, second: str) -> str:
    return f"{_ms(times[first])} / {_ms(times[second])}"


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _shown(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _numbers(value: Any) -> Any:
    """nan is null in JSON."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return value
