"""Kill, stop, crash and disturb the workers under load: every stream must end with the tokens that it has alone."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import grpc.aio
from perf.harness import Report, log, table
from processes import ProcessFigures
from space_common.http_client import get_json
from space_common.process import ServerProcess
from space_eval.report import facts
from space_proto import worker_pb2

from chaos.harness import RECOVERY_SECONDS, StreamCounts, StreamLoad, add_flags, bodies, num_leaked_pages, stream_table

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CONNECTED = "03"  # state of a socket in /proc/net/unix


class Fault(Enum):
    """What is injected."""

    KILL = "killed"  # SIGKILL while it steps
    HANG = "hung"  # SIGSTOP: it lives and says nothing
    LOADING = "killed while loading"  # SIGKILL, and SIGKILL again for the next before it is ready
    CRASH = "crashed"  # SIGSEGV: the router cannot tell that no request caused it
    GARBAGE = "garbage on its socket"  # bytes that are no HTTP/2, and HTTP/2 that is no gRPC: without effect
    INTRUDER = "another router"  # another client takes the worker over and sends nonsense


LOSSES = (Fault.KILL, Fault.HANG, Fault.LOADING, Fault.CRASH)  # kills and hangs, which `--faults` counts


def planned(number: int, source: random.Random) -> list[Fault]:
    """`number` kills and hangs in random order, and an eighth as many others among them."""
    shares = {Fault.HANG: 0.3, Fault.LOADING: 0.1, Fault.CRASH: 0.1}
    plan = [fault for fault, share in shares.items() for _ in range(round(share * number))]
    plan += [Fault.KILL] * (number - len(plan))
    plan += [Fault.GARBAGE] * -(-number // 16) + [Fault.INTRUDER] * -(-number // 16)
    source.shuffle(plan)
    return plan


@dataclass(frozen=True)
class WorkerSlot:
    """One of a server's workers, process after process: each listens on the next socket of the same folder."""

    server: ServerProcess
    folder: Path

    async def worker(self) -> int:
        """The newest process; waits for one if there is none."""
        async with asyncio.timeout(60):
            while not (pids := self._pids()):  # noqa: ASYNC110  a process is no event
                await asyncio.sleep(0.01)
        return pids[-1]

    def is_connected(self) -> bool:
        pids = self._pids()
        return bool(pids) and socket_of(pids[-1]) in _connected()

    def _pids(self) -> list[int]:
        return [pid for pid in self.server.worker_pids() if Path(socket_of(pid)).parent == self.folder]

    @classmethod
    def of(cls, server: ServerProcess) -> list[WorkerSlot]:
        return [cls(server, Path(socket_of(pid)).parent) for pid in server.worker_pids()]


def socket_of(worker: int) -> str:
    """The path of the Unix socket that a worker listens on; "" if the process has ended, or is just starting."""
    try:
        words = Path(f"/proc/{worker}/cmdline").read_bytes().decode().split("\0")
        return words[words.index("--listen") + 1].removeprefix("unix:")
    except (OSError, ValueError):
        return ""


def _connected() -> set[str]:
    lines = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    return {words[7] for words in lines if len(words) > 7 and words[5] == _CONNECTED}


async def inject(fault: Fault, slot: WorkerSlot, worker: int, source: random.Random) -> None:
    """Inject it into the worker with this process id; returns once it is done, before the server has recovered."""
    match fault:
        case Fault.KILL:
            os.kill(worker, signal.SIGKILL)
        case Fault.HANG:
            os.kill(worker, signal.SIGSTOP)
        case Fault.CRASH:
            os.kill(worker, signal.SIGSEGV)
        case Fault.LOADING:
            os.kill(worker, signal.SIGKILL)
            while (fresh := await slot.worker()) == worker:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(source.uniform(0.0, 1.0))
            with suppress(ProcessLookupError):
                os.kill(fresh, signal.SIGKILL)
        case Fault.GARBAGE:
            for _ in range(3):
                await _send_garbage(socket_of(worker), source)
        case Fault.INTRUDER:
            await _intrude(socket_of(worker), source)


async def _send_garbage(path: str, source: random.Random) -> None:
    """Bytes that mean nothing; any answer of the worker is right."""
    with suppress(OSError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(source.choice([b"", _PREFACE]) + source.randbytes(source.randrange(1, 20_000)))
        with suppress(OSError):
            await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _intrude(path: str, source: random.Random) -> None:
    """Open a session with the worker as a router does, and send nonsense."""

    async def nonsense() -> AsyncIterator[bytes]:
        yield source.randbytes(50)
        await asyncio.sleep(0.05)

    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.stream_stream(
            "/spaceserve.v1.Worker/Serve",
            request_serializer=lambda raw: raw,
            response_deserializer=worker_pb2.WorkerMessage.FromString,
        )(nonsense())
        with suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(5):
                async for _ in call:
                    pass


RANKS = ("least", "median", "p90", "p99", "most")


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError and HttpError."""
    flags = ["--model", options.model, "--worker-timeout", "3", "--workers", str(options.workers), *options.serve_flags]
    with ServerProcess(flags) as server:
        return asyncio.run(_run(server, options))


async def _run(server: ServerProcess, options: argparse.Namespace) -> Report:
    load = StreamLoad(server, bodies(options.streams, options.tokens))
    await load.record_expected()
    before = ProcessFigures.of(server.pid)
    injector = FaultInjector(load, options)
    async with load.running() as counts:
        await injector.run(counts)
    await load.wait_until("/load", lambda found: found["num_workers_up"] >= options.workers, "all workers")
    await load.wait_idle()
    known, num_leaked = facts(await get_json(load.endpoint, "/info")), await num_leaked_pages(load.endpoint)
    return report(known, counts, injector.recovered, num_leaked, (before, ProcessFigures.of(server.pid)))


@dataclass(frozen=True)
class Recovered:
    """A fault that is over."""

    fault: Fault
    seconds: float  # until another worker was connected in its place and some stream got tokens after that


class FaultInjector:
    """Injects the planned faults one after the other, at the same time into each worker."""

    def __init__(self, load: StreamLoad, options: argparse.Namespace) -> None:
        self.recovered: list[Recovered] = []
        self._load = load
        self._pause = options.pause
        self._source = random.Random(options.seed)
        self._plan = planned(options.faults, self._source)
        self._stop = asyncio.Event()  # SIGTERM or Ctrl-C: report what there is so far
        self._crashing = asyncio.Lock()

    async def run(self, counts: StreamCounts) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        await asyncio.gather(*(self._disturb(slot, counts) for slot in WorkerSlot.of(self._load.server)))

    async def _disturb(self, slot: WorkerSlot, counts: StreamCounts) -> None:
        """Faults of one worker, as long as any are left of the plan that all workers share."""
        while self._plan and not self._stop.is_set():
            fault = self._plan.pop()
            # Any request may have caused a crash, so the router tries each alone. A request whose worker we crashed
            # again meanwhile would have ended two workers, the second one alone, and would rightly be refused.
            async with self._crashing if fault is Fault.CRASH else nullcontext():
                self.recovered.append(await self._inject(slot, fault))
                if fault is Fault.CRASH:
                    await self._load.wait_for_tokens(len(self._load.bodies))
            last, lost, different = self.recovered[-1], len(counts.lost), counts.num_different
            log(
                f"{len(self.recovered)}: {last.fault.value}, tokens again after {last.seconds:.2f} s; "
                f"{lost} streams lost, {different} tokens different"
            )

    async def _inject(self, slot: WorkerSlot, fault: Fault) -> Recovered:
        """Under load; waits until the worker, or the next in its place, is back and streams go on."""
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._source.uniform(0.05, self._pause))
        await self._load.wait_for_tokens()
        worker = await slot.worker()
        begun = clock()
        await inject(fault, slot, worker, self._source)
        if fault is not Fault.GARBAGE:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while await slot.worker() == worker or not slot.is_connected():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        await self._load.wait_for_tokens()
        return Recovered(fault, clock() - begun)


def report(
    known: Mapping[str, Any],
    counts: StreamCounts,
    recovered: Sequence[Recovered],
    num_leaked: int,
    router: tuple[ProcessFigures, ProcessFigures],
) -> Report:
    """`router`: before the faults and after them."""
    losses = [one.seconds for one in recovered if one.fault in LOSSES]
    times = {fault.value: [one.seconds for one in recovered if one.fault is fault] for fault in Fault}
    spreads = {
        "all kills and hangs": spread(losses),
        **{name: spread(found) for name, found in times.items() if found},
        "longest pause of a stream": spread(counts.pauses),
    }
    memory = [f"{one.resident_bytes / 2**20:.0f} MiB and {one.num_files} files" for one in router]
    recovery = [
        (name, found["number"], *(f"{found[rank]:.2f}" for rank in RANKS if rank in found))
        for name, found in spreads.items()
    ]
    return Report(
        title="Faults under load",
        facts=known,
        failures=[*counts.failures, *([f"{num_leaked} pages leaked."] if num_leaked else [])],
        notes=f"{len(losses)} kills and hangs, {len(recovered)} faults in all, in {counts.seconds:.0f} s; "
        f"{num_leaked} pages leaked; the router held {memory[0]} before, {memory[1]} after. "
        "Seconds from the fault until the worker is back and a stream has tokens:",
        tables=[stream_table({"faults": counts}), table(("fault", "number", *RANKS), recovery)],
        record={
            "num_kills_and_hangs": len(losses), "num_faults": len(recovered), "num_streams": counts.num_streams,
            "num_streams_lost": len(counts.lost), "num_tokens": counts.num_tokens,
            "num_tokens_different": counts.num_different, "num_pages_leaked": num_leaked, "recovery_seconds": spreads,
            "each": [(one.fault.value, round(one.seconds, 4)) for one in recovered],
        },
    )  # fmt: skip


def spread(times: Sequence[float]) -> dict[str, float]:
    """The number of values and their `RANKS`, if there are any."""
    if not times:
        return {"number": 0}
    ordered, last = sorted(times), len(times) - 1
    p90, p99 = (ordered[round(share * last)] for share in (0.9, 0.99))
    ranks = (ordered[0], statistics.median(ordered), p90, p99, ordered[last])
    return {"number": len(times), **dict(zip(RANKS, ranks, strict=True))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser,
        ("--faults", 200, "kills and hangs; an eighth as many others come with them"),
        ("--streams", 32, "streams at any time"),
        ("--workers", 1, "workers, each with faults of its own"),
        ("--tokens", 384, "longest answer"),
        ("--pause", 1.0, "longest undisturbed time between two faults, in seconds"),
    )
