"""One router and workers on hosts of their own, which are killed, cut off and restarted under load.

Every stream must end with exactly the tokens that it has alone. The hosts are network namespaces of this machine (as
root; else loopback addresses, which cannot be cut off).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from perf.harness import Report, log
from space_eval.bench.client import LoadError, get_json
from space_eval.bench.server_process import ServerProcess
from space_eval.report import facts

from chaos.harness import StreamCounts, StreamLoad, add_flags, stream_table
from chaos.machines import Host, can_have_namespaces, scripted, served
from chaos.requests import bodies

WORKER_TIMEOUT = 3.0  # seconds of silence after which the router considers a host lost

Phases = dict[str, StreamCounts]


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError, LoadError and HostError."""
    namespaces = not options.loopback and can_have_namespaces()
    model = "demo" if options.scripted else options.model
    wanted = bodies(options.streams, options.tokens)
    with ExitStack() as stack:
        tokenizer = importlib.resources.as_file(importlib.resources.files("space_demo") / "tokenizer.json")
        command = scripted(stack.enter_context(tokenizer)) if options.scripted else served(model)
        hosts = [stack.enter_context(Host(number, command, namespaces=namespaces)) for number in range(options.hosts)]
        with _router(model, hosts[:1], options.serve_flags) as server:
            one = StreamLoad(server, wanted)
            phases = asyncio.run(_one_worker(one))
        with _router(model, hosts, options.serve_flags) as server:
            load = StreamLoad(server, wanted, one.expected)
            known = facts(asyncio.run(get_json(load.endpoint, "/info")))
            phases |= asyncio.run(Disturbances(load, hosts, options, namespaces).run())
    workers = "scripted workers, 20 ms a step of at most 8 sequences" if options.scripted else "real workers"
    return report(known, phases, [host.num_starts for host in hosts], namespaces, workers)


def _router(model: str, hosts: Sequence[Host], more_flags: Sequence[str]) -> ServerProcess:
    addresses = ",".join(host.address for host in hosts)
    flags = ["--model", model, "--worker-address", addresses, "--worker-timeout", str(WORKER_TIMEOUT)]
    return ServerProcess([*flags, "--log-level", "warning", *more_flags])


async def _one_worker(load: StreamLoad) -> Phases:
    """Each request alone on one host, for its tokens; then all at once there."""
    await load.record_expected()
    return {"one worker": await load.once()}


class Disturbances:
    """One router and all hosts: throughput, kills, cuts, rolling restarts."""

    def __init__(self, load: StreamLoad, hosts: Sequence[Host], options: argparse.Namespace, namespaces: bool) -> None:
        self._load, self._hosts, self._options, self._namespaces = load, hosts, options, namespaces
        self._source = random.Random(options.seed)

    async def run(self) -> Phases:
        await self._all_up()
        phases = {f"{len(self._hosts)} workers": await self._load.once()}
        disturbances = {"workers killed": self._kill, "machines cut off": self._cut, "rolling restarts": self._restart}
        if not self._namespaces:
            del disturbances["machines cut off"]
        for name, disturb in disturbances.items():
            async with self._load.running() as counts:
                await disturb()
            await self._all_up()
            await self._load.wait_idle()
            phases[name] = counts
            log(f"{name}: {len(counts.lost)} of {counts.num_streams} streams lost, {counts.num_different} other tokens")
        return phases

    async def _kill(self) -> None:
        for _ in range(self._options.faults):
            await self._tokens()
            self._source.choice(self._hosts).kill()
            await self._tokens()
            await self._all_up()

    async def _cut(self) -> None:
        """For longer than the router waits, so that streams go on elsewhere; the host comes back as it was."""
        for _ in range(self._options.faults):
            await self._tokens()
            host = self._source.choice(self._hosts)
            host.cut()
            try:
                await self._workers(
                    lambda state: any(one["state"] == "away" for one in state["workers"]), "a lost worker"
                )
                await self._tokens()
            finally:
                host.mend()
            await self._all_up()

    async def _restart(self) -> None:
        for number in range(1, self._options.restarts + 1):
            await self._tokens()
            before = [host.num_starts for host in self._hosts]
            self._load.server.signal(signal.SIGUSR1)
            await self._workers(lambda state: state["restart"]["state"] == "running", "a rolling restart")
            state = await self._workers(
                lambda state: state["restart"]["state"] != "running", "the end of a rolling restart"
            )
            restarted = all(host.num_starts > starts for host, starts in zip(self._hosts, before, strict=True))
            if state["restart"]["state"] != "done" or not restarted:
                raise LoadError(f"Rolling restart {number} of every worker has failed: {state['restart']['error']}")

    async def _all_up(self) -> None:
        await self._workers(lambda state: all(one["state"] == "up" for one in state["workers"]), "all workers")

    async def _workers(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        return await self._load.wait_until("/workers", holds, what)

    async def _tokens(self) -> None:
        """Until every stream has got tokens, and a moment longer.

        The router tries a request alone whose worker is gone. One that we took a second worker from meanwhile would
        rightly be refused.
        """
        await self._load.wait_for_tokens(len(self._load.bodies))
        await asyncio.sleep(self._source.uniform(0.05, 1.0))


def report(known: dict[str, Any], phases: Phases, num_starts: Sequence[int], namespaces: bool, workers: str) -> Report:
    where = "network namespaces" if namespaces else "loopback addresses"
    return Report(
        title="Workers on hosts of their own",
        facts=known,
        failures=[f"{name}: {words}" for name, counts in phases.items() for words in counts.failures],
        notes=f"{len(num_starts)} hosts simulated by {where}; {workers}, started "
        f"{' + '.join(map(str, num_starts))} times.",
        tables=[stream_table(phases)],
        record={
            "namespaces": namespaces,
            "num_starts": num_starts,
            "phases": [{"name": name, **asdict(counts)} for name, counts in phases.items()],
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser,
        ("--scripted", False, "workers without a model, 20 ms a step, 8 sequences"),
        ("--hosts", 3, "hosts, a worker on each"),
        ("--streams", 24, "streams at any time"),
        ("--tokens", 192, "longest answer"),
        ("--faults", 6, "kills, and as many cuts of the network"),
        ("--restarts", 2, "rolling restarts under load"),
        ("--loopback", False, "no namespaces: other addresses of this machine"),
    )
