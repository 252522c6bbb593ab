"""Everything at once, for hours: faults of workers, network, disk, clock and memory, hostile and slow clients.

Under a mixed load, whose every answer is known, a schedule drawn by --seed happens to a router and its workers. Nothing
may be lost, different or leaked. The same seed is the same schedule; --begin resumes it at a later moment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from doubles.tcp import tcp_connection
from perf.harness import PerfError, Report, log, table
from processes import ProcessFigures
from space_common.http_client import Endpoint, HttpError, get_json, get_text
from space_common.process import ServerProcess, module_command
from space_eval.report import facts
from space_kernels.build.cache_folder import cache_folder

from chaos.crowd import timed, unread_stream
from chaos.day_load import ALLOWED, MixedLoad, visits
from chaos.footprint import ROUTER, WORKER, Footprint, FootprintWatch, footprint_table
from chaos.harness import PATH, RECOVERY_SECONDS, add_flags, num_leaked_pages
from chaos.hosts import Host
from chaos.machine_faults import FaultyMachine, NetworkLink, built_library, press_memory
from chaos.schedule import Event, EventKind, events

WORKER_TIMEOUT = 3.0  # seconds of silence after which the router considers a worker lost
SETTLE_SECONDS = 60.0  # in which an idle server holds nothing any more
GAUGES = ("spaceserve_requests{", 'spaceserve_kv_blocks{state="held"')  # 0 on an idle server


def hostile_requests() -> list[bytes]:
    """Whole HTTP requests, each of which has to be refused, or its connection closed."""
    deep = b"[" * 100_000
    bad: list[bytes] = [
        b"{", b"\xff\xfe", b"[]", deep, b'{"prompt": ' + deep + b"}", b'{"prompt": 1e999}', b'{"prompt": null}',
        b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "n": 1000000000}', b'{"prompt": [9999999999999]}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "structured_outputs": {"regex": "((a{1,9999}){1,9999}){1,9999}"}}',
        b'{"prompt": "a", "structured_outputs": {"regex": "("}}',
        b'{"prompt": "a", "structured_outputs": {"grammar": "start: start start"}}',
        b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}}',
    ]  # fmt: skip
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n".encode()
    made = [head + f"content-length: {len(body)}\r\n\r\n".encode() + body for body in bad]
    made += [head + b"content-length: -5\r\n\r\n", head + b"transfer-encoding: chunked\r\n\r\nzz\r\n"]
    made += [b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00" * 50, head + b"x: " + b"a" * 200_000 + b"\r\n\r\n"]
    return made


@dataclass
class DayRecord:
    """What happened."""

    happened: Counter[EventKind] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {"flood": Counter(), "hostile": Counter()})
    # ^ of floods and hostile requests; 0: the connection was closed


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError, HttpError, and PerfError for a day without a full cycle of events."""
    if options.hours * 3600 < options.cycle:
        raise PerfError(f"{options.hours:g} hours are less than a cycle of {options.cycle:g} s: make it shorter.")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="spaceserve-day-"))).resolve()
        return asyncio.run(_run(options, folder, stack))


async def _run(options: argparse.Namespace, folder: Path, stack: ExitStack) -> Report:
    files = folder / "files"
    (files / "cache").mkdir(parents=True)
    if cache_folder().is_dir():
        (files / "cache" / "spaceserve").mkdir()
        for entry in cache_folder().iterdir():  # compiled kernels and models are not made again
            if entry.suffix == ".so" or entry.is_dir():
                (files / "cache" / "spaceserve" / entry.name).symlink_to(entry)
    (folder / "secret").write_text(token_hex(32), encoding="ascii")
    secret = ["--worker-secret-file", str(folder / "secret")]
    library = built_library(folder)
    machines = [FaultyMachine(library, folder / f"state{place}", files) for place in range(options.workers + 1)]
    fleet = Fleet(options.model, secret, machines[1:], files)
    hosts = [stack.enter_context(Host(place, command, namespaces=False)) for place, command in fleet.commands()]
    async with AsyncExitStack() as links_stack:
        links = [await links_stack.enter_async_context(NetworkLink(host.address)) for host in hosts]
        flags = ["--model", options.model, "--worker-address", ",".join(link.address for link in links), *secret]
        flags += ["--worker-timeout", str(WORKER_TIMEOUT), "--response-store", str(files / "responses.db")]
        flags += ["--max-queue", "32", "--slow-reader-timeout", "5", "--client-buffer", "4KiB"]
        flags += ["--log-level", "warning", *options.serve_flags]
        server = ServerProcess(flags, environment=machines[0].environment, wait_ready=False)
        await asyncio.to_thread(stack.enter_context, server)
        await asyncio.to_thread(server.wait_ready)
        day = Day(server, hosts, links, machines, fleet, options)
        return await day.run()


class Fleet:
    """The commands of the workers: all of this version, or all of the one before."""

    def __init__(self, model: str, secret: Sequence[str], machines: Sequence[FaultyMachine], files: Path) -> None:
        self.is_older = False
        self._flags = ["--model", model, "--num-threads", "1", "--num-blocks", "2048", "--calibration-seconds", "0.1"]
        self._flags += ["--max-sequences", "16", *secret]
        self._machines, self._files = machines, files

    def commands(self) -> list[tuple[int, Callable[[str], Sequence[str]]]]:
        """The place of each worker, and its command by its address, asked for at every start."""
        return [(place, self._command(machine)) for place, machine in enumerate(self._machines)]

    def _command(self, machine: FaultyMachine) -> Callable[[str], Sequence[str]]:
        variables = {**machine.environment, "XDG_CACHE_HOME": str(self._files / "cache")}
        prefix = ["env", *(f"{name}={value}" for name, value in variables.items())]

        def command(address: str) -> Sequence[str]:
            module = "chaos.older_worker" if self.is_older else "space_server"
            return [*prefix, *module_command(module, "--listen", address, *self._flags)]

        return command


class Day:
    """One day: load, events, and what is found at its end."""

    def __init__(
        self,
        server: ServerProcess,
        hosts: Sequence[Host],
        links: Sequence[NetworkLink],
        machines: Sequence[FaultyMachine],
        fleet: Fleet,
        options: argparse.Namespace,
    ) -> None:
        """`machines`: the router's, then one of each worker."""
        self._server, self._hosts, self._links, self._machines = server, hosts, links, machines
        self._fleet, self._options = fleet, options
        self._endpoint = Endpoint.parse(server.url)
        self._load = MixedLoad(self._endpoint, visits(options.requests, options.tokens), options.seed)
        self._record = DayRecord()
        self._footprints = FootprintWatch(min(60.0, options.cycle / 4))
        self._taking = asyncio.Lock()  # one worker is lost at a time: a request that loses two may be refused
        self._disk = asyncio.Lock()
        self._stop = asyncio.Event()  # SIGTERM or Ctrl-C: report what there is so far

    async def run(self) -> Report:
        await self._all_up()
        await self._load.record_expected()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        begun, over = loop.time(), asyncio.Event()
        clients = [asyncio.create_task(self._load.client(over)) for _ in range(self._options.streams)]
        watch = asyncio.create_task(self._watch())
        await self._happen(begun)
        over.set()
        watch.cancel()
        await asyncio.wait(clients)
        for client in clients:
            client.result()
        for machine in self._machines:
            machine.set_clock(0.0)
        await self._all_up()
        await self._settle()
        self._look()
        known = facts(await get_json(self._endpoint, "/info"))
        found = self._footprints.footprints
        return report(known, self._record, self._load, loop.time() - begun, found, self._options.seed)

    async def _happen(self, begun: float) -> None:
        """The events, each at its time, until the day is over."""
        clock = asyncio.get_running_loop().time
        skipped, length = 3600 * self._options.begin, 3600 * self._options.hours
        running: set[asyncio.Task[None]] = set()
        for event in events(self._options.seed, self._options.cycle):
            at = event.at - skipped
            if at < 0:
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), max(0.0, min(at, length) + begun - clock()))
            if at >= length or self._stop.is_set():
                break
            task = asyncio.create_task(self._one(event))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(set(running))

    async def _one(self, event: Event) -> None:
        kinds: Mapping[EventKind, Callable[[Event], Coroutine[Any, Any, None]]] = {
            EventKind.KILL: self._kill, EventKind.STOP: self._suspend, EventKind.DROP: self._cut,
            EventKind.HOLD: self._cut, EventKind.UPGRADE: self._upgrade, EventKind.FULL_DISK: self._bad_disk,
            EventKind.SLOW_DISK: self._bad_disk, EventKind.MEMORY: self._press, EventKind.CLOCK: self._jump,
            EventKind.SLOW_READERS: self._read_slowly, EventKind.FLOOD: self._flood, EventKind.HOSTILE: self._attack,
        }  # fmt: skip
        try:
            if event.kind.takes_worker:
                async with self._taking:
                    if self._stop.is_set():
                        return  # it waited for its turn
                    await kinds[event.kind](event)
                    await self._all_up()
                    await self._others_end()
            else:
                await kinds[event.kind](event)
        except Exception as error:
            self._record.wrong.append(f"{event.kind.value}: {type(error).__name__}: {error}")
            return
        self._record.happened[event.kind] += 1
        counts = self._load.counts
        log(
            f"{event.at:.0f} s, {event.kind.value}: {counts.num_answered.total()} answered, "
            f"{counts.num_refused.total()} refused, {len(counts.wrong) + len(self._record.wrong)} wrong"
        )

    def _place(self, event: Event) -> int:
        return int(event.draw * len(self._hosts))

    async def _kill(self, event: Event) -> None:
        host = self._hosts[self._place(event)]
        starts = host.num_starts
        host.kill()
        while host.num_starts == starts:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await self._wait(lambda state: any(one["state"] != "up" for one in state["workers"]), "a lost worker")

    async def _suspend(self, event: Event) -> None:
        worker = self._hosts[self._place(event)].pid
        os.kill(worker, signal.SIGSTOP)
        try:
            await asyncio.sleep(event.seconds)
        finally:
            os.kill(worker, signal.SIGCONT)

    async def _cut(self, event: Event) -> None:
        link = self._links[self._place(event)]
        if event.kind is EventKind.DROP:
            link.drop()
        else:
            link.hold()
        try:
            await asyncio.sleep(event.seconds)
        finally:
            link.mend()

    async def _upgrade(self, event: Event) -> None:
        """As `spaceserve workers restart` does it; the next process of each worker is of the other version."""
        self._fleet.is_older = not self._fleet.is_older
        before = [host.num_starts for host in self._hosts]
        self._server.signal(signal.SIGUSR1)
        await self._wait(lambda state: state["restart"]["state"] == "running", "a rolling restart")
        state = await self._wait(lambda state: state["restart"]["state"] != "running", "the end of a rolling restart")
        restarted = all(host.num_starts > starts for host, starts in zip(self._hosts, before, strict=True))
        if state["restart"]["state"] != "done" or not restarted:
            raise HttpError(f"not all workers were restarted: {state['restart']['error']}")

    async def _bad_disk(self, event: Event) -> None:
        async with self._disk:
            for machine in self._machines:
                machine.set_disk(write_seconds=event.draw / 4, is_full=event.kind is EventKind.FULL_DISK)
            try:
                await asyncio.sleep(event.seconds)
            finally:
                for machine in self._machines:
                    machine.set_disk()

    async def _press(self, event: Event) -> None:
        await press_memory(self._options.pressure, event.seconds)

    async def _jump(self, event: Event) -> None:
        """Up to a year, forwards or backwards."""
        sizes = (-365 * 86400, -3600, -5, 5, 3600, 86400, 365 * 86400)
        place, size = divmod(int(event.draw * len(sizes) * len(self._machines)), len(sizes))
        self._machines[place].set_clock(sizes[size])

    async def _read_slowly(self, event: Event) -> None:
        with ExitStack() as held:
            for number in range(8):
                held.enter_context(unread_stream(self._endpoint, number))
            await asyncio.sleep(event.seconds)

    async def _flood(self, event: Event) -> None:
        async def one(number: int) -> None:
            body = {"prompt": "x = ", "max_tokens": 8, "seed": number, "temperature": 1}
            answer = await timed(self._endpoint, body)
            self._record.statuses["flood"][answer.status] += 1
            if answer.status not in (200, *ALLOWED):
                self._record.wrong.append(f"flood: a request got {answer.status}")
            if answer.status in ALLOWED and not answer.has_retry_after:
                self._record.wrong.append(f"flood: {answer.status} without Retry-After")

        await asyncio.gather(*(one(number) for number in range(self._options.flood)))

    async def _attack(self, event: Event) -> None:
        for whole in hostile_requests():
            status = await _status(self._endpoint, whole)
            self._record.statuses["hostile"][status] += 1
            if status and not 400 <= status < 500 and status not in ALLOWED:
                self._record.wrong.append(f"hostile bodies: {status} for {whole[:300]!r}")

    async def _others_end(self) -> None:
        """Until the requests of this moment have ended: none of them has lost a worker when the next one goes."""
        now = set(self._load.in_flight)
        async with asyncio.timeout(RECOVERY_SECONDS):
            while now & self._load.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _all_up(self) -> None:
        await self._wait(lambda state: all(one["state"] == "up" for one in state["workers"]), "all workers")

    async def _wait(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while not holds(found := await get_json(self._endpoint, "/workers")):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise HttpError(f"{what}: not within {RECOVERY_SECONDS:g} s.\n{self._server.last_words()}") from None
        return found

    async def _watch(self) -> None:
        """The router answers its own pages all the time, and no process takes more than it may."""
        while True:
            try:
                async with asyncio.timeout(30):
                    await get_text(self._endpoint, "/metrics")
            except (HttpError, TimeoutError) as error:
                self._record.wrong.append(f"/metrics: {type(error).__name__}: {error}")
            for _ in range(5):
                self._look()
                await asyncio.sleep(1.0)

    def _look(self) -> None:
        """At memory and open files of the router and of each worker's newest process."""
        now, look = asyncio.get_running_loop().time(), self._footprints.look
        look("router", self._server.pid, ROUTER, now, ProcessFigures.of(self._server.pid))
        for place, host in enumerate(self._hosts):
            if host.is_ready:
                look(f"worker {place}", host.pid, WORKER, now, ProcessFigures.of(host.pid))

    async def _settle(self) -> None:
        """Wait until the server holds nothing; what it holds longer is recorded."""
        clock = asyncio.get_running_loop().time
        limit = clock() + SETTLE_SECONDS
        while (held := held_gauges(await get_text(self._endpoint, "/metrics"))) and clock() < limit:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        self._record.wrong += [f"still held after {SETTLE_SECONDS:g} s without a request: {line}" for line in held]
        if leaked := await num_leaked_pages(self._endpoint):
            self._record.wrong.append(f"{leaked} pages leaked.")


def held_gauges(metrics: str) -> list[str]:
    """Lines of an idle server's /metrics that should be 0 and are not."""
    lines = [line for line in metrics.splitlines() if line.startswith(GAUGES)]
    return [line for line in lines if float(line.rpartition(" ")[2])]


async def _status(endpoint: Endpoint, whole: bytes) -> int:
    """The last status of the answer to these bytes; 0: the connection was closed without one. Raises HttpError."""
    answer = b""
    async with tcp_connection(f"{endpoint.host}:{endpoint.port}") as (reader, writer):
        try:
            async with asyncio.timeout(60):
                with suppress(OSError):
                    writer.write(whole)
                    await writer.drain()
                    answer = await reader.read(-1)
        except TimeoutError:
            raise HttpError(f"no end of the answer to {whole[:300]!r} within 60 s") from None
    return final_status(answer)


def final_status(answer: bytes) -> int:
    """The status that follows any interim ones (102) in the bytes of an HTTP/1.1 answer; 0: there is none."""
    while (line := answer.partition(b"\r\n")[0].split())[:1] == [b"HTTP/1.1"] and line[1].startswith(b"1"):
        answer = answer.partition(b"\r\n\r\n")[2]
    return int(line[1]) if len(line) > 1 and line[1].isdigit() else 0


def report(
    known: Mapping[str, Any],
    record: DayRecord,
    load: MixedLoad,
    seconds: float,
    footprints: Sequence[Footprint],
    seed: int,
) -> Report:
    """`footprints`: of the router and of all workers that were there for long enough."""
    counts = load.counts
    failures = [*counts.wrong[:20], *record.wrong[:20]]
    failures += [f"{kind.value}: never happened." for kind in EventKind if not record.happened[kind]]
    failures += [failure for one in footprints for failure in one.failures]
    watched = {one.name.partition(" ")[0].rstrip(",") for one in footprints}
    failures += [
        f"No {kind} was there for long enough to be judged." for kind in ("router", "worker") if kind not in watched
    ]
    statuses = {
        name: ", ".join(f"{number} × {status or 'closed'}" for status, number in sorted(found.items()))
        for name, found in record.statuses.items()
    }
    return Report(
        title="A day of chaos",
        facts=known,
        failures=failures,
        notes=f"{seconds / 60:.1f} minutes, seed {seed}: {record.happened.total()} events; "
        f"{counts.num_answered.total()} requests answered as alone, {counts.num_refused.total()} refused (429, 503), "
        f"{len(counts.wrong)} lost or different, {len(record.wrong)} other findings; the longest took "
        f"{counts.longest:.1f} s.",
        tables=[
            table(("event", "times"), [(kind.value, record.happened[kind]) for kind in EventKind]),
            table(("request", "answered"), sorted(counts.num_answered.items())),
            table(("others", "answered with"), list(statuses.items())),
            footprint_table(footprints),
        ],
        record={
            "seed": seed, "seconds": seconds, "events": {kind.value: record.happened[kind] for kind in EventKind},
            "requests": counts.record(), "statuses": {name: dict(found) for name, found in record.statuses.items()},
            "processes": [one.record for one in footprints],
            "findings": [*counts.wrong, *record.wrong],
        },
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser, ("--hours", 1.0, "that it lasts"), ("--begin", 0.0, "hours of the schedule that are over already"),
        ("--cycle", 180.0, "seconds in which each kind of event happens once"), ("--workers", 2, "workers"),
        ("--streams", 8, "clients at any time"), ("--requests", 24, "different requests"),
        ("--tokens", 96, "longest answer"), ("--flood", 200, "requests at once in a flood"),
        ("--pressure", 1024, "MiB that memory pressure takes"),
    )  # fmt: skip
