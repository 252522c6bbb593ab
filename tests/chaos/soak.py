"""Mixed load for an hour, and whether anything grows: memory, open files, latency, pages.

It passes if every visit ended as it should, no page and no worker was lost, and the probe's text never changed. Slopes
are reported, not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from perf.harness import PerfError, Report, log, table
from processes import ProcessFigures
from space_eval.bench.client import Endpoint, get_json, get_text, idle
from space_eval.bench.server_process import ServerProcess
from space_eval.data import built_in, long_text
from space_eval.report import facts

from chaos.harness import add_flags, num_leaked_pages
from chaos.requests import StreamAnswer, ask
from chaos.visits import Visits

RESTARTS = "spaceserve_worker_restarts_total "
WARM_UP = 0.2  # share of the time at the beginning that slopes leave out: caches fill and code is loaded

SERIES = (
    *(f"{process}, {what}" for what in ("MiB", "files", "threads") for process in ("router", "worker")),
    "probe, ms to the first token",
    "probe, ms to the last token",
    "pages held",
    "requests running",
)
"""What is watched."""

Observation = dict[str, float]
"""At one moment: `seconds` since the begin, and each of SERIES."""


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError, LoadError, and PerfError for a run that is too short."""
    if options.minutes * 60 < 8 * options.every:
        raise PerfError(f"--minutes {options.minutes:g} holds fewer than 8 observations; let it run longer.")
    with ServerProcess(["--model", options.model, *options.serve_flags]) as server:
        return asyncio.run(_soak(server, options))


async def _soak(server: ServerProcess, options: argparse.Namespace) -> Report:
    endpoint = Endpoint.parse(server.url)
    info = await get_json(endpoint, "/info")
    visits = Visits(endpoint, window=info["max_total_tokens"], text=long_text(), seed=options.seed)
    probe = Probe(endpoint)
    await probe.send()
    clock = asyncio.get_running_loop().time
    begun = clock()
    end = begun + 60 * options.minutes

    async def client() -> None:
        while clock() < end:
            await visits.one()

    seen: list[Observation] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(options.streams):
            group.create_task(client())
        while clock() < end:
            await asyncio.sleep(max(0.0, begun + len(seen) * options.every - clock()))
            seen.append({"seconds": clock() - begun, **await _observe(server, endpoint, probe)})
            log("; ".join(f"{name}: {value:.0f}" for name, value in seen[-1].items()))
    await idle(endpoint, is_ours=True)
    failures = {
        "changes of the probe's text": probe.num_changed,
        "pages leaked": await num_leaked_pages(endpoint),
        "workers lost": await _num_restarts(endpoint),
    }
    return report(facts(info), seen, visits, failures)


class Probe:
    """The same request again and again: how long it takes beside the others, and whether its answer changes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_changed = 0
        self._endpoint = endpoint
        self._first: StreamAnswer | None = None

    async def send(self) -> tuple[float, float]:
        """Milliseconds to the first token and to the last."""
        clock = asyncio.get_running_loop().time
        begun, firsts = clock(), list[float]()
        body = {"prompt": built_in()[0], "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "priority": -10}
        answer = await ask(self._endpoint, body, lambda num_tokens: firsts.append(clock()))
        self._first = self._first or answer
        self.num_changed += answer != self._first
        return 1000 * (firsts[0] - begun), 1000 * (clock() - begun)


async def _observe(server: ServerProcess, endpoint: Endpoint, probe: Probe) -> Observation:
    first, last = await probe.send()
    load = await get_json(endpoint, "/load")
    found: Observation = {"probe, ms to the first token": first, "probe, ms to the last token": last}
    for name, pid in (("router", server.pid), ("worker", (server.worker_pids() or [0])[-1])):
        process = ProcessFigures.of(pid)
        found[f"{name}, MiB"] = process.resident_bytes / 2**20
        found[f"{name}, files"], found[f"{name}, threads"] = process.num_files, process.num_threads
    return found | {"pages held": load["blocks_held"], "requests running": load["num_running"]}


async def _num_restarts(endpoint: Endpoint) -> int:
    lines = (await get_text(endpoint, "/metrics")).splitlines()
    return int(sum(float(line.split()[1]) for line in lines if line.startswith(RESTARTS)))


@dataclass(frozen=True)
class Slope:
    """By least squares."""

    begin: float  # median of the first tenth
    end: float  # median of the last tenth
    per_hour: float
    error: float  # standard error of `per_hour`, if the errors are independent


def slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Of (seconds, value). Raises ValueError for fewer than three points."""
    if len(points) < 3:
        raise ValueError(f"A slope takes 3 points; there are {len(points)}. Let the soak run longer.")
    hours, values = [seconds / 3600 for seconds, _ in points], [value for _, value in points]
    per_hour, intercept = statistics.linear_regression(hours, values)
    residual = sum((v - intercept - per_hour * h) ** 2 for h, v in zip(hours, values, strict=True))
    error = math.sqrt(residual / (len(points) - 2) / (len(points) * statistics.pvariance(hours)))
    tenth = max(1, len(points) // 10)
    return Slope(statistics.median(values[:tenth]), statistics.median(values[-tenth:]), per_hour, error)


def slopes(seen: Sequence[Observation]) -> dict[str, Slope]:
    """Of each of SERIES, after the warm-up."""
    steady = [one for one in seen if one["seconds"] >= WARM_UP * seen[-1]["seconds"]]
    return {name: slope([(one["seconds"], float(one[name])) for one in steady]) for name in SERIES}


def report(
    known: Mapping[str, Any], seen: Sequence[Observation], visits: Visits, failures: Mapping[str, int]
) -> Report:
    """`failures`: counts that must be 0."""
    found = slopes(seen)
    done = ", ".join(f"{number} {kind}" for kind, number in sorted(visits.num_done.items()))
    rows = [(name, *(f"{value:.2f}" for value in astuple(one))) for name, one in found.items()]
    return Report(
        title="Soak",
        facts=known,
        failures=[*visits.wrong[:20], *(f"{number} {what}." for what, number in failures.items() if number)],
        notes=f"{seen[-1]['seconds'] / 60:.1f} minutes, {visits.num_done.total()} visits done ({done}), "
        f"{visits.num_refused.total()} refused with 429, {len(visits.wrong)} that went wrong; "
        f"{', '.join(f'{number} {what}' for what, number in failures.items())}. Slopes after the first "
        f"{WARM_UP:.0%} of the time:",
        tables=[table(("", "begin", "end", "per hour", "±"), rows)],
        record={
            "num_done": visits.num_done,
            "num_refused": visits.num_refused,
            "failures": failures,
            "slopes": {name: asdict(one) for name, one in found.items()},
            "observations": seen,
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser,
        ("--minutes", 60.0, "of load"),
        ("--streams", 12, "clients at once"),
        ("--every", 5.0, "seconds between two observations"),
    )
