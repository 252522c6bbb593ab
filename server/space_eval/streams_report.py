"""Figures of the router under many streams, as a record and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from space_eval.bench.estimates import percentile
from space_eval.process_figures import ProcessFigures

if TYPE_CHECKING:
    from space_eval.streams import Mark
    from space_eval.streams_reader import StreamReader


@dataclass(frozen=True)
class Point:
    """So many streams at once at one pace. Rates and processor time are of the time in which all of them ran."""

    num_streams: int
    num_workers: int
    pace: float  # tokens per second and stream that the workers offer; 0: as many as are taken
    num_lost: int  # that did not come to their end with every token
    num_tokens: int  # read in all
    num_events: int  # they came in
    bytes_per_event: float  # of HTTP, heads included
    seconds: float  # that all ran
    tokens_per_second: float
    added_ms: Mapping[str, float]  # from the worker's report to the reader: median, p99, most
    busy: float  # share of one core that the router took
    cpu_us_per_token: float
    cpu_ms_per_request: float  # from the first connection until all have begun
    resident_kib_per_stream: float  # of the router while all ran, above before
    router_mib: tuple[float, float, float]  # before, while all ran, after

    @property
    def tokens_per_core_second(self) -> float:
        """What one core of router would carry."""
        return 1e6 / self.cpu_us_per_token if self.cpu_us_per_token > 0 else math.nan


def figures(
    *,
    num_streams: int,
    num_workers: int,
    pace: float,
    num_tokens: int,
    said: Mapping[int, Sequence[float]],
    readers: Mapping[int, StreamReader],
    marks: Mapping[str, Mark],
    after: ProcessFigures,
) -> Point:
    """`said`: when each token of each stream was said; `num_tokens`: that each stream should have."""
    before, begun, ending = marks["before"], marks["begun"], marks["ending"]
    added: list[float] = []
    within = lost = read = 0
    seconds = max(0.0, ending.seconds - begun.seconds)
    for seed, reader in readers.items():
        told = said.get(seed, ())
        lost += not (reader.is_whole and len(reader.seconds) == num_tokens == len(told))
        read += len(reader.seconds)
        for came, sent in zip(reader.seconds, told, strict=False):
            if begun.seconds <= came <= ending.seconds:
                within += 1
                added.append(1e3 * (came - sent))
    cpu = ending.cpu_seconds - begun.cpu_seconds
    num_events = sum(reader.num_events for reader in readers.values())
    mib = [process.resident_bytes / 2**20 for process in (before.process, ending.process, after)]
    return Point(
        num_streams=num_streams,
        num_workers=num_workers,
        pace=pace,
        num_lost=lost,
        num_tokens=read,
        num_events=num_events,
        bytes_per_event=sum(r.num_bytes for r in readers.values()) / num_events if num_events else math.nan,
        seconds=seconds,
        tokens_per_second=within / seconds if within else math.nan,
        added_ms={"median": percentile(added, 0.5), "p99": percentile(added, 0.99), "most": percentile(added, 1.0)},
        busy=cpu / seconds if within else math.nan,
        cpu_us_per_token=1e6 * cpu / within if within else math.nan,
        cpu_ms_per_request=1e3 * (begun.cpu_seconds - before.cpu_seconds) / num_streams,
        resident_kib_per_stream=1024 * (mib[1] - mib[0]) / num_streams,
        router_mib=(mib[0], mib[1], mib[2]),
    )


def record(points: Sequence[Point], facts: Mapping[str, Any]) -> dict[str, Any]:
    """All that is known of a run."""
    rows = [{**asdict(point), "tokens_per_core_second": point.tokens_per_core_second} for point in points]
    return {"facts": dict(facts), "points": rows}


def markdown(made: Mapping[str, Any]) -> str:
    """One page."""
    facts, rows = made["facts"], made["points"]
    lines = [
        "# One router under many streams",
        "",
        f"{facts['machine']}; commit {facts['commit']}. {rows[0]['num_workers']} worker processes that compute nothing,"
        " and the readers in one process, on the same machine.",
        "",
        "| streams | tokens/s each | tokens/s | lost | added ms: median | p99 | most | µs CPU per token "
        "| tokens/s per core | ms CPU per request | bytes per event | KiB per stream "
        "| router MiB before, while, after |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        pace = f"{row['pace']:g}" if row["pace"] else "flood"
        added = " | ".join(_shown(row["added_ms"][name], ".1f") for name in ("median", "p99", "most"))
        memory = ", ".join(f"{mib:.0f}" for mib in row["router_mib"])
        costs = f"{_shown(row['cpu_us_per_token'], '.1f')} | {_shown(row['tokens_per_core_second'], ',.0f')}"
        rate = _shown(row["tokens_per_second"], ",.0f")
        lines.append(
            f"| {row['num_streams']} | {pace} | {rate} | {row['num_lost']} | {added} "
            f"| {costs} | {row['cpu_ms_per_request']:.2f} | {_shown(row['bytes_per_event'], '.0f')} "
            f"| {row['resident_kib_per_stream']:.0f} | {memory} |"
        )
    if any(math.isnan(row["cpu_us_per_token"]) for row in rows):
        lines += ["", "- : the first streams had ended before the last began. Give them more --tokens."]
    return "\n".join(lines)


def _shown(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
