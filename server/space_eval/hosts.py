"""`spaceserve eval hosts`: one router and workers on machines of their own, which are killed, cut off and restarted.

Every stream must come to its end with exactly the tokens that it has alone. The machines are network namespaces of this
one (as root; else loopback addresses, which cannot be cut off). Exit status 0 if nothing was lost, 1 if something was.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from space_eval.bench_facts import commit, machine
from space_eval.bench_server import ServerError, ServerProcess
from space_eval.bench_watch import idle
from space_eval.fault_requests import Answer, ask, bodies
from space_eval.host_machines import Host, HostError, can_have_namespaces, hosts, scripted, served
from space_eval.load_client import Endpoint, LoadError, get_json
from space_eval.written import write

WORKER_TIMEOUT = 3.0  # seconds of silence after which the router gives a machine up
MENDING_SECONDS = 300.0
DESCRIPTION = __doc__


@dataclass
class Phase:
    """What the streams of one part of the run saw."""

    name: str
    num_streams: int = 0
    num_lost: int = 0
    num_different: int = 0  # tokens
    num_tokens: int = 0
    seconds: float = 0.0
    longest_pause: float = 0.0
    words: list[str] = field(default_factory=list)  # of streams that were lost

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="what workers serve: demo, a folder, a hub id [demo]")
    parser.add_argument("--scripted", action="store_true", help="workers without a model, 20 ms a step, 8 sequences")
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="machines, a worker on each [3]")
    parser.add_argument("--streams", type=int, default=24, metavar="N", help="streams at any time [24]")
    parser.add_argument("--tokens", type=int, default=192, metavar="N", help="longest answer [192]")
    parser.add_argument("--faults", type=int, default=6, metavar="N", help="kills, and as many cuts of the network [6]")
    parser.add_argument("--restarts", type=int, default=2, metavar="N", help="rolling restarts under load [2]")
    parser.add_argument("--loopback", action="store_true", help="no namespaces: other addresses of this machine")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the times and places of the faults [1]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write hosts.json and hosts.md there")


def run(options: argparse.Namespace) -> int:
    """Exit status 0: nothing was lost."""
    namespaces = not options.loopback and can_have_namespaces()
    try:
        if options.scripted:
            with importlib.resources.as_file(importlib.resources.files("space_demo") / "tokenizer.json") as tokenizer:
                made = _run(options, scripted(tokenizer, step_seconds=0.02, max_sequences=8), namespaces)
        else:
            made = _run(options, served(options.model), namespaces)
    except (HostError, ServerError, LoadError) as error:
        print(f"spaceserve eval hosts: {error}", file=sys.stderr)
        return 1
    text = markdown(made)
    print(text)
    if options.out is not None:
        write(options.out, "hosts", made, text)
    return 0 if made["passed"] else 1


def _run(options: argparse.Namespace, command: Callable[[str], Sequence[str]], namespaces: bool) -> dict[str, Any]:
    wanted = bodies(options.streams, options.tokens)
    phases: list[Phase] = []
    with ExitStack() as stack:
        machines = stack.enter_context(hosts(options.hosts, command, namespaces=namespaces))
        model = "demo" if options.scripted else options.model
        with _router(model, machines[:1]) as server:
            alone, one = asyncio.run(_one(server, wanted))
        phases.append(one)
        with _router(model, machines) as server:
            phases += asyncio.run(Run(server, machines, wanted, alone, options, namespaces).whole())
    return {
        "passed": not any(phase.num_lost or phase.num_different for phase in phases),
        "machine": machine(),
        "commit": commit(),
        "namespaces": namespaces,
        "workers": "scripted, 20 ms a step of at most 8 sequences" if options.scripted else options.model,
        "num_hosts": options.hosts,
        "num_streams_at_once": options.streams,
        "num_starts": [host.num_starts for host in machines],
        "phases": [{**asdict(phase), "tokens_per_second": phase.tokens_per_second} for phase in phases],
    }


def _router(model: str, machines: Sequence[Host]) -> ServerProcess:
    addresses = ",".join(host.address for host in machines)
    flags = ["--model", model, "--worker-address", addresses, "--worker-timeout", str(WORKER_TIMEOUT)]
    return ServerProcess([*flags, "--log-level", "warning"])


async def _one(server: ServerProcess, wanted: Sequence[dict[str, Any]]) -> tuple[list[Answer], Phase]:
    """Each alone on one machine, for its tokens; then all at once there."""
    endpoint = Endpoint.parse(server.url)
    alone = []
    for place, body in enumerate(wanted, start=1):
        _say(f"alone: {place} of {len(wanted)}")
        alone.append(await ask(endpoint, body))
    phase = Phase("one worker")
    await _together(endpoint, wanted, alone, phase)
    return alone, phase


async def _together(
    endpoint: Endpoint, wanted: Sequence[dict[str, Any]], alone: Sequence[Answer], phase: Phase
) -> None:
    """Every request at once, to its end."""
    clock = asyncio.get_running_loop().time
    await idle(endpoint, is_ours=True)
    begun = clock()
    await asyncio.gather(*(_stream(endpoint, body, answer, phase) for body, answer in zip(wanted, alone, strict=True)))
    phase.seconds += clock() - begun


async def _stream(
    endpoint: Endpoint,
    body: dict[str, Any],
    alone: Answer,
    phase: Phase,
    heard: Sequence[Callable[[int], None]] = (),
) -> None:
    phase.num_streams += 1
    try:
        answer = await ask(endpoint, body, heard)
    except LoadError as error:
        phase.num_lost += 1
        phase.words = [*phase.words[:19], str(error)]
        return
    phase.num_tokens += len(answer.token_ids)
    phase.num_different += answer.num_different(alone)
    phase.longest_pause = max(phase.longest_pause, answer.longest_pause)


class Run:
    """One router and all machines: throughput, faults, rolling restarts."""

    def __init__(
        self,
        server: ServerProcess,
        machines: Sequence[Host],
        wanted: Sequence[dict[str, Any]],
        alone: Sequence[Answer],
        options: argparse.Namespace,
        namespaces: bool,
    ) -> None:
        self._server, self._machines, self._wanted, self._alone = server, machines, wanted, alone
        self._options, self._namespaces = options, namespaces
        self._endpoint = Endpoint.parse(server.url)
        self._source = random.Random(options.seed)
        self._silent: set[int] = set()  # places whose stream has had no tokens since they were put here

    async def whole(self) -> list[Phase]:
        await self._all_up()
        phase = Phase(f"{len(self._machines)} workers")
        await _together(self._endpoint, self._wanted, self._alone, phase)
        _say(f"{phase.name}: {phase.tokens_per_second:.0f} tokens/s")
        phases = [phase, await self._under_load("workers killed", self._kills)]
        if self._namespaces:
            phases.append(await self._under_load("machines cut off", self._cuts))
        phases.append(await self._under_load("rolling restarts", self._restarts))
        return phases

    async def _under_load(self, name: str, disturb: Callable[[], Awaitable[None]]) -> Phase:
        """Streams all the time, until the disturbance is over and they have ended."""
        phase, over = Phase(name), asyncio.Event()
        clock = asyncio.get_running_loop().time
        begun = clock()

        async def lane(place: int) -> None:
            number = place

            def heard(num_tokens: int) -> None:
                if num_tokens:
                    self._silent.discard(place)

            while not over.is_set():
                number %= len(self._wanted)
                await _stream(self._endpoint, self._wanted[number], self._alone[number], phase, [heard])
                number += 1

        async with asyncio.TaskGroup() as group:
            for place in range(len(self._wanted)):
                group.create_task(lane(place))
            try:
                await disturb()
            finally:
                over.set()
        phase.seconds = clock() - begun
        await self._all_up()
        await idle(self._endpoint, is_ours=True)
        _say(f"{name}: {phase.num_streams} streams, {phase.num_lost} lost, {phase.num_different} tokens different")
        return phase

    async def _kills(self) -> None:
        for _ in range(self._options.faults):
            await self._tokens()
            self._source.choice(self._machines).kill()
            await self._tokens()
            await self._all_up()

    async def _cuts(self) -> None:
        """For longer than the router waits, so that streams go on elsewhere; the machine comes back as it was."""
        for _ in range(self._options.faults):
            await self._tokens()
            host = self._source.choice(self._machines)
            host.cut()
            try:
                await self._until(lambda told: any(one["state"] == "away" for one in told["workers"]), "a worker away")
                await self._tokens()
            finally:
                host.mend()
            await self._all_up()

    async def _restarts(self) -> None:
        for number in range(self._options.restarts):
            await self._tokens()
            before = [host.num_starts for host in self._machines]
            self._server.signal(signal.SIGUSR1)
            await self._until(lambda told: told["restart"]["state"] == "running", "a rolling restart")
            told = await self._until(lambda told: told["restart"]["state"] != "running", "the end of a rolling restart")
            if told["restart"]["state"] != "done" or any(
                host.num_starts <= starts for host, starts in zip(self._machines, before, strict=True)
            ):
                raise LoadError(f"Rolling restart {number + 1} of every worker has failed: {told['restart']['error']}")

    async def _all_up(self) -> None:
        await self._until(lambda told: all(one["state"] == "up" for one in told["workers"]), "all workers")

    async def _until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Ask /workers until something holds. Raises LoadError where it does not in time."""
        try:
            async with asyncio.timeout(MENDING_SECONDS):
                while not holds(told := await get_json(self._endpoint, "/workers")):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise LoadError(f"{what}: not within {MENDING_SECONDS:g} s.\n{self._server.last_words()}") from None
        return told

    async def _tokens(self) -> None:
        """Until every stream has got tokens, and a moment longer.

        Whose worker is gone is tried alone: whoever lost a second one meanwhile, by our hand, would be refused rightly.
        """
        self._silent = set(range(len(self._wanted)))
        try:
            async with asyncio.timeout(MENDING_SECONDS):
                while self._silent:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise LoadError(f"{len(self._silent)} streams got no token within {MENDING_SECONDS:g} s.") from None
        await asyncio.sleep(self._source.uniform(0.05, 1.0))


def markdown(made: dict[str, Any]) -> str:
    """One page."""
    where = "network namespaces" if made["namespaces"] else "loopback addresses"
    lines = [
        "# Workers on machines of their own",
        "",
        f"{made['machine']}; commit {made['commit']}. {made['num_hosts']} machines played by {where}; workers: "
        f"{made['workers']}; {made['num_streams_at_once']} streams at once. Workers were started "
        f"{' + '.join(map(str, made['num_starts']))} times.",
        "",
        "| part | streams | lost | tokens different | tokens | tokens/s | longest pause of a stream |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in made["phases"]:
        counts = " | ".join(str(one[name]) for name in ("num_streams", "num_lost", "num_different", "num_tokens"))
        lines.append(f"| {one['name']} | {counts} | {one['tokens_per_second']:.0f} | {one['longest_pause']:.1f} s |")
    lines += [f"- {words}" for one in made["phases"] for words in one["words"]]
    return "\n".join(lines)


def _say(line: str) -> None:
    print(f"hosts: {line}", file=sys.stderr, flush=True)
