"""Slopes of what a soak has watched, as a record, as Markdown and as figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_eval.plots import line_plot

WARM_UP = 0.2
"""Share of the time at the beginning that no slope is taken of: caches fill and code is loaded."""

UNITS = {
    "router_mib": ("router, memory", "MiB"),
    "worker_mib": ("worker, memory", "MiB"),
    "router_files": ("router, open files", "files"),
    "worker_files": ("worker, open files", "files"),
    "router_threads": ("router, threads", "threads"),
    "worker_threads": ("worker, threads", "threads"),
    "first_token_ms": ("probe, first token", "ms"),
    "probe_ms": ("probe, whole", "ms"),
    "blocks_held": ("pages held", "pages"),
    "num_running": ("requests running", "requests"),
}
"""Fields of a look: what they are called, and in what they are counted."""


@dataclass(frozen=True)
class Look:
    """At one moment."""

    seconds: float  # since the begin
    router_mib: float
    worker_mib: float
    router_files: int
    worker_files: int
    router_threads: int
    worker_threads: int
    first_token_ms: float  # of a request that is always the same
    probe_ms: float
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    num_queued: int
    num_running: int


@dataclass(frozen=True)
class Slope:
    """By least squares."""

    begin: float  # median of the first tenth behind the warm-up
    end: float  # median of the last tenth
    per_hour: float
    error: float  # standard error of `per_hour`; that of a slope whose errors are independent


def slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Of (seconds, value). Raises ValueError for fewer than three."""
    if len(points) < 3:
        raise ValueError(f"A slope takes 3 points; there are {len(points)}. Let the soak run longer.")
    times, values = [time / 3600 for time, _ in points], [value for _, value in points]
    mean_time, mean_value = statistics.fmean(times), statistics.fmean(values)
    spread = sum((time - mean_time) ** 2 for time in times)
    per_hour = sum((t - mean_time) * (v - mean_value) for t, v in zip(times, values, strict=True)) / spread
    left = sum((v - mean_value - per_hour * (t - mean_time)) ** 2 for t, v in zip(times, values, strict=True))
    tenth = max(1, len(points) // 10)
    error = math.sqrt(left / (len(points) - 2) / spread)
    return Slope(statistics.median(values[:tenth]), statistics.median(values[-tenth:]), per_hour, error)


def slopes(looks: Sequence[Look]) -> dict[str, Slope]:
    """Of every field that has one, behind the warm-up."""
    steady = [look for look in looks if look.seconds >= WARM_UP * looks[-1].seconds]
    return {name: slope([(look.seconds, float(getattr(look, name))) for look in steady]) for name in UNITS}


def record(facts: Mapping[str, Any], looks: Sequence[Look], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """All that is known."""
    found = {name: asdict(one) for name, one in slopes(looks).items()}
    return {"facts": dict(facts), **outcome, "slopes": found, "looks": [asdict(look) for look in looks]}


def markdown(made: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """One page."""
    known = made["facts"]
    done, refused = made["num_done"], made["num_refused"]
    lines = [
        "# Soak",
        "",
        f"{known['id']} {known['dtype']} on {known['device_type']}; {known['machine']}; commit {known['commit']}",
        "",
        f"{made['minutes']:.1f} minutes, {made['streams']} clients at once, {sum(done.values())} visits done "
        f"({', '.join(f'{number} {kind}' for kind, number in sorted(done.items()))}), {sum(refused.values())} refused "
        f"with 429, {len(made['wrong'])} that went wrong; the probe's text changed {made['num_changed']} times; "
        f"{made['num_pages_leaked']} pages leaked; {made['num_restarts']} workers lost.",
        "",
        f"Slopes behind the first {WARM_UP:.0%} of the time:",
        "",
        "| | begin | end | per hour | ± |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, found in made["slopes"].items():
        called, unit = UNITS[name]
        figures = " | ".join(f"{found[key]:.2f}" for key in ("begin", "end", "per_hour", "error"))
        lines.append(f"| {called} ({unit}) | {figures} |")
    lines += ["", *(f"- {words}" for words in made["wrong"][:20]), *(f"![{name}]({name})" for name in pictures)]
    return "\n".join(lines)


def draw(folder: Path, looks: Sequence[Look], note: str) -> list[str]:
    """The names of the files. Raises PlotError."""
    made = []
    for name, title, unit, fields in (
        ("memory.png", "Resident memory", "MiB", ("router_mib", "worker_mib")),
        ("latency.png", "A request that is always the same", "ms", ("first_token_ms", "probe_ms")),
        (
            "files.png",
            "Open files and threads",
            "number",
            ("router_files", "worker_files", "router_threads", "worker_threads"),
        ),
        ("pages.png", "Pages held", "pages", ("blocks_held",)),
    ):
        series = {UNITS[key][0]: [(look.seconds / 60, float(getattr(look, key))) for look in looks] for key in fields}
        line_plot(folder / name, series, title=title, x="minutes", y=unit, note=note)
        made.append(name)
    return made
