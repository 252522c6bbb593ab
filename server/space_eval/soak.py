"""`spaceserve bench soak`: mixed load for an hour, and whether anything grows: memory, open files, latency, pages.

Exit status 0 if nothing went wrong: every visit ended as it should, no page and no worker was lost, and the probe's
text never changed. Slopes are reported, not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from space_eval.bench_facts import facts
from space_eval.bench_prompts import built_in, long_text
from space_eval.bench_server import ServerError, ServerProcess
from space_eval.bench_watch import idle
from space_eval.fault_requests import Answer, ask
from space_eval.load_client import Endpoint, LoadError, get_json, get_text
from space_eval.plots import PlotError
from space_eval.process_figures import ProcessFigures
from space_eval.soak_report import Look, draw, markdown, record
from space_eval.soak_visits import Visits

MIB = 2**20
RESTARTS = "spaceserve_worker_restarts_total"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spaceserve bench soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="what is served: demo, a folder, a hub id [demo]")
    parser.add_argument("--minutes", type=float, default=60.0, help="of load [60]")
    parser.add_argument("--streams", type=int, default=12, metavar="N", help="clients at once [12]")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks [5]")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of who comes [1]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write soak.json, soak.md and figures there")
    parser.add_argument("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Exit status 0: nothing went wrong; 1: something did; 2: flags that make no sense."""
    options = parse(argv)
    if options.minutes * 60 < 8 * options.every:
        print(f"soak: --minutes {options.minutes:g} holds fewer than 8 looks; let it run longer.", file=sys.stderr)
        return 2
    flags = ["--model", options.model, *options.serve_flags]
    try:
        with ServerProcess(flags) as server:
            made, looks = asyncio.run(_soak(server, options))
    except (ServerError, LoadError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    made["serve_flags"] = flags
    known, pictures = made["facts"], list[str]()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        try:
            pictures = draw(options.out, looks, f"{known['id']}, {known['machine']}, commit {known['commit']}")
        except PlotError as error:
            print(f"soak: no plots: {error}", file=sys.stderr)
        (options.out / "soak.md").write_text(markdown(made, pictures) + "\n", encoding="utf-8")
    print(markdown(made))
    return 0 if made["passed"] else 1


async def _soak(server: ServerProcess, options: argparse.Namespace) -> tuple[dict[str, Any], list[Look]]:
    """The record, and the looks it is made of."""
    endpoint = Endpoint.parse(server.url)
    info = await get_json(endpoint, "/info")
    visits = Visits(endpoint, window=info["max_total_tokens"], text=long_text(), seed=options.seed)
    probe = Probe(endpoint)
    await probe.look()
    clock = asyncio.get_running_loop().time
    begun = clock()
    end = begun + 60 * options.minutes

    async def client() -> None:
        while clock() < end:
            await visits.one()

    looks: list[Look] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(options.streams):
            group.create_task(client())
        while clock() < end:
            await asyncio.sleep(max(0.0, begun + len(looks) * options.every - clock()))
            looks.append(await _look(server, endpoint, probe, clock() - begun))
            _say(looks[-1])
    await idle(endpoint, is_ours=True)
    load = await get_json(endpoint, "/load")
    leaked = load["num_workers_up"] * info["num_blocks"] - load["blocks_free"] - load["blocks_cached"]
    guests = visits.guests
    num_restarts = await _restarts(endpoint)
    outcome = {
        "passed": not (guests.wrong or leaked or probe.num_changed or num_restarts),
        "minutes": (clock() - begun) / 60,
        "streams": options.streams,
        "num_done": guests.num_done,
        "num_refused": guests.num_refused,
        "wrong": guests.wrong,
        "num_changed": probe.num_changed,
        "num_pages_leaked": leaked,
        "num_restarts": num_restarts,
    }
    return record(facts(info), looks, outcome), looks


class Probe:
    """A request that is always the same: how long it takes among the others, and whether its answer is."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_changed = 0
        self._endpoint = endpoint
        self._first: Answer | None = None

    async def look(self) -> tuple[float, float]:
        """Milliseconds to the first token and to the last."""
        clock = asyncio.get_running_loop().time
        begun, firsts = clock(), list[float]()
        body = {"prompt": built_in()[0].text, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "priority": -10}
        answer = await ask(self._endpoint, body, [lambda num_tokens: firsts.append(clock())])
        self._first = self._first or answer
        self.num_changed += answer != self._first
        return 1000 * (firsts[0] - begun), 1000 * (clock() - begun)


async def _look(server: ServerProcess, endpoint: Endpoint, probe: Probe, seconds: float) -> Look:
    first, whole = await probe.look()
    load = await get_json(endpoint, "/load")
    router = ProcessFigures.of(server.pid)
    worker = ProcessFigures.of((server.worker_pids() or [0])[-1])
    return Look(
        seconds=seconds,
        router_mib=router.resident_bytes / MIB,
        worker_mib=worker.resident_bytes / MIB,
        router_files=router.num_files,
        worker_files=worker.num_files,
        router_threads=router.num_threads,
        worker_threads=worker.num_threads,
        first_token_ms=first,
        probe_ms=whole,
        **{name: load[name] for name in ("blocks_free", "blocks_held", "blocks_cached", "num_queued", "num_running")},
    )


async def _restarts(endpoint: Endpoint) -> int:
    for line in (await get_text(endpoint, "/metrics")).splitlines():
        if line.startswith(RESTARTS + " "):
            return int(float(line.split()[1]))
    return 0


def _say(look: Look) -> None:
    print(
        f"soak: {look.seconds:.0f} s, router {look.router_mib:.0f} MiB {look.router_files} files, worker "
        f"{look.worker_mib:.0f} MiB {look.worker_files} files, probe {look.probe_ms:.0f} ms",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
