"""`spaceserve eval faults`: kill, stop, crash and molest the worker under load, and count what its streams have lost.

Every stream must come to its end with exactly the tokens that it has alone, and every page must come back. Exit status
0 if nothing was lost, 1 if something was.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from space_eval.bench_facts import facts
from space_eval.bench_server import ServerError, ServerProcess
from space_eval.bench_watch import idle
from space_eval.fault_kinds import Fault, commit, planned
from space_eval.fault_lane import Lane, lanes_of
from space_eval.fault_report import Mended, markdown, record
from space_eval.fault_requests import Answer, ask, bodies
from space_eval.load_client import Endpoint, LoadError, get_json
from space_eval.process_figures import ProcessFigures
from space_eval.written import write

MENDING_SECONDS = 120.0
"""Longest wait for tokens after a fault: the machine may be busy with much else."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="what is served: demo, a folder, a hub id [demo]")
    parser.add_argument(
        "--faults",
        type=int,
        default=200,
        metavar="N",
        help="kills and hangs; an eighth as many others come with them [200]",
    )
    parser.add_argument("--streams", type=int, default=32, metavar="N", help="streams at any time [32]")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers, each with faults of its own [1]")
    parser.add_argument("--tokens", type=int, default=384, metavar="N", help="longest answer [384]")
    parser.add_argument(
        "--pause", type=float, default=1.0, metavar="SECONDS", help="longest undisturbed time between two faults [1]"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the order and times of the faults [1]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write faults.json and faults.md there")
    parser.add_argument("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")


def run(options: argparse.Namespace) -> int:
    """Exit status 0: nothing was lost."""
    flags = ["--model", options.model, "--worker-timeout", "3", "--workers", str(options.workers), *options.serve_flags]
    try:
        with ServerProcess(flags) as server:
            made = asyncio.run(Run(server, options).whole())
    except (ServerError, LoadError) as error:
        print(f"spaceserve eval faults: {error}", file=sys.stderr)
        return 1
    made["serve_flags"] = flags
    text = markdown(made)
    print(text)
    if options.out is not None:
        write(options.out, "faults", made, text)
    return 0 if made["passed"] else 1


@dataclass
class Streams:
    """What the clients have seen so far."""

    num_begun: int = 0
    num_whole: int = 0  # that came to their own end
    num_tokens: int = 0
    num_different: int = 0  # tokens that are not those of the solo run
    lost: list[str] = field(default_factory=list)  # streams that ended otherwise, in the server's words
    pauses: list[float] = field(default_factory=list)  # the longest of each stream, in seconds
    silent: set[int] = field(default_factory=set)  # places whose stream has had no tokens since they were put here
    news: asyncio.Event = field(default_factory=asyncio.Event)  # some stream has got tokens

    def heard(self, place: int, num_tokens: int) -> None:
        if num_tokens:
            self.num_tokens += num_tokens
            self.silent.discard(place)
            self.news.set()


class Run:
    """One server, its streams, and the faults one after the other."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._endpoint = Endpoint.parse(server.url)
        self._source = random.Random(options.seed)
        self._bodies = bodies(options.streams, options.tokens)
        self._alone: list[Answer] = []
        self._streams = Streams()
        self._over = False
        self._stop = asyncio.Event()  # told to end: what there is so far is reported
        self._crashing = asyncio.Lock()

    async def whole(self) -> dict[str, Any]:
        """The record."""
        info = await get_json(self._endpoint, "/info")
        for place, body in enumerate(self._bodies, start=1):
            _say(f"alone: {place} of {len(self._bodies)}")
            self._alone.append(await ask(self._endpoint, body))
        await idle(self._endpoint, is_ours=True)
        before = ProcessFigures.of(self._server.pid)
        clock = asyncio.get_running_loop().time
        begun = clock()
        mended: list[Mended] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        async with asyncio.TaskGroup() as group:
            for place in range(self._options.streams):
                group.create_task(self._stream(place))
            plan = planned(self._options.faults, self._source)
            try:
                await asyncio.gather(*(self._lane(lane, plan, mended) for lane in lanes_of(self._server)))
            finally:
                self._over = True
        seconds = clock() - begun
        await self._whole_again()
        load = await get_json(self._endpoint, "/load")
        leaked = load["num_workers_up"] * info["num_blocks"] - load["blocks_free"] - load["blocks_cached"]
        return record(
            facts=facts(info),
            streams=self._streams,
            num_streams=self._options.streams,
            num_workers=self._options.workers,
            mended=mended,
            leaked=leaked,
            seconds=seconds,
            router=(before, ProcessFigures.of(self._server.pid)),
        )

    async def _whole_again(self) -> None:
        """Until every worker is up, and nothing runs or holds a block."""
        async with asyncio.timeout(MENDING_SECONDS):
            while (await get_json(self._endpoint, "/load"))["num_workers_up"] < self._options.workers:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await idle(self._endpoint, is_ours=True)

    async def _stream(self, place: int) -> None:
        """One answer after the other, from this place of the list on."""
        number = place
        while not self._over:
            number, streams = number % len(self._bodies), self._streams
            streams.num_begun += 1
            try:
                answer = await ask(self._endpoint, self._bodies[number], [functools.partial(streams.heard, place)])
            except LoadError as error:
                streams.lost.append(str(error))
            else:
                streams.num_whole += 1
                streams.pauses.append(answer.longest_pause)
                streams.num_different += answer.num_different(self._alone[number])
            number += 1

    async def _lane(self, lane: Lane, plan: list[Fault], mended: list[Mended]) -> None:
        """Faults of one worker, as long as any are left of the plan that all lanes share."""
        while plan and not self._stop.is_set():
            fault = plan.pop()
            # Of a crash any request may be the cause: each is tried alone. Whose worker crashed by our hand meanwhile
            # would have seen two, the last one alone, and would be refused, rightly.
            async with self._crashing if fault is Fault.CRASH else nullcontext():
                mended.append(await self._fault(lane, fault))
                if fault is Fault.CRASH:
                    self._streams.silent = set(range(self._options.streams))
                    while self._streams.silent:
                        await self._tokens()
            lost, different = len(self._streams.lost), self._streams.num_different
            _say(f"{len(mended)}: {mended[-1]}; {lost} streams lost, {different} tokens different")

    async def _fault(self, lane: Lane, fault: Fault) -> Mended:
        """Commit it under load, and wait until the worker, or the next in its place, is back and streams go on."""
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._source.uniform(0.05, self._options.pause))
        await self._tokens()
        worker = await lane.worker()
        begun = clock()
        await commit(fault, lane, worker, self._source)
        if fault is not Fault.GARBAGE:
            async with asyncio.timeout(MENDING_SECONDS):
                while await lane.worker() == worker or not lane.is_connected():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        up = clock()
        await self._tokens()
        return Mended(fault, up - begun, clock() - begun)

    async def _tokens(self) -> None:
        """Until some stream gets tokens. Raises LoadError if none does."""
        self._streams.news.clear()
        try:
            async with asyncio.timeout(MENDING_SECONDS):
                await self._streams.news.wait()
        except TimeoutError:
            raise LoadError(
                f"No stream got a token within {MENDING_SECONDS:g} s.\n{self._server.last_words()}"
            ) from None


def _say(line: str) -> None:
    print(f"faults: {line}", file=sys.stderr, flush=True)
