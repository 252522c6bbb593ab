"""Counts of a fault run, as a record and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from space_eval.fault_kinds import LOSSES, Fault
from space_eval.process_figures import ProcessFigures

if TYPE_CHECKING:
    from space_eval.faults import Streams


@dataclass(frozen=True)
class Mended:
    """A fault that is over."""

    fault: Fault
    up_seconds: float  # until another worker was connected in its place; of garbage: until it was sent
    seconds: float  # until some stream got tokens after that

    def __str__(self) -> str:
        return f"{self.fault.value}, tokens again after {self.seconds:.2f} s"


def record(
    *,
    facts: Mapping[str, Any],
    streams: Streams,
    num_streams: int,
    num_workers: int,
    mended: Sequence[Mended],
    leaked: int,
    seconds: float,
    router: tuple[ProcessFigures, ProcessFigures],
) -> dict[str, Any]:
    """All that is known of a run."""
    times = {fault: sorted(one.seconds for one in mended if one.fault is fault) for fault in Fault}
    lost = [one.seconds for one in mended if one.fault in LOSSES]
    before, after = router
    return {
        "passed": not streams.lost and not streams.num_different and not leaked,
        "facts": dict(facts),
        "num_kills_and_hangs": len(lost),
        "num_faults": len(mended),
        "num_streams_at_once": num_streams,
        "num_streams": streams.num_begun,
        "num_streams_whole": streams.num_whole,
        "num_tokens": streams.num_tokens,
        "num_streams_lost": len(streams.lost),
        "num_tokens_different": streams.num_different,
        "num_pages_leaked": leaked,
        "lost": streams.lost[:20],
        "seconds": seconds,
        "num_workers": num_workers,
        "recovery_seconds": {
            "all kills and hangs": _spread(sorted(lost)),
            **{fault.value: _spread(found) for fault, found in times.items() if found},
        },
        "longest_pause_seconds": _spread(sorted(streams.pauses)),
        "router_resident_bytes": [before.resident_bytes, after.resident_bytes],
        "router_files": [before.num_files, after.num_files],
        "each": [[one.fault.value, round(one.up_seconds, 4), round(one.seconds, 4)] for one in mended],
    }


def _spread(times: Sequence[float]) -> dict[str, float]:
    """Of sorted values."""
    if not times:
        return {"number": 0}
    last = len(times) - 1
    return {
        "number": len(times),
        "least": times[0],
        "median": statistics.median(times),
        "p90": times[round(0.9 * last)],
        "p99": times[round(0.99 * last)],
        "most": times[-1],
    }


def markdown(made: Mapping[str, Any]) -> str:
    """One page."""
    known = made["facts"]
    lines = [
        "# Faults under load",
        "",
        f"{known['id']} {known['dtype']} on {known['device_type']}; {known['machine']}; commit {known['commit']}",
        "",
        f"{made['num_kills_and_hangs']} kills and hangs of {made['num_workers']} worker(s), "
        f"{made['num_faults']} faults in all, under {made['num_streams_at_once']} streams at once for "
        f"{made['seconds']:.0f} s: {made['num_streams']} streams, {made['num_tokens']} tokens.",
        "",
        "| streams lost | tokens different | pages leaked |",
        "|---:|---:|---:|",
        f"| {made['num_streams_lost']} | {made['num_tokens_different']} | {made['num_pages_leaked']} |",
        "",
        "Seconds from the fault until the worker is back and a stream has tokens; the longest pause of each stream:",
        "",
        "| fault | number | least | median | p90 | p99 | most |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, spread in made["recovery_seconds"].items():
        figures = [f"{spread[key]:.2f}" for key in ("least", "median", "p90", "p99", "most") if key in spread]
        lines.append(f"| {name} | {' | '.join([str(spread['number']), *figures])} |")
    pauses = made["longest_pause_seconds"]
    figures = [f"{pauses[key]:.2f}" for key in ("least", "median", "p90", "p99", "most") if key in pauses]
    lines.append(f"| longest pause of a stream | {' | '.join([str(pauses['number']), *figures])} |")
    before, after = (size / 2**20 for size in made["router_resident_bytes"])
    files = made["router_files"]
    lines += [
        "",
        f"The router held {before:.0f} MiB and {files[0]} files before, {after:.0f} MiB and {files[1]} after.",
    ]
    lines += [f"- {words}" for words in made["lost"]]
    return "\n".join(lines)
