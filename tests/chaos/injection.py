"""Faults: a worker of a running server is killed, stopped, crashed, or disturbed through its socket."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import grpc.aio
from space_eval.bench.server_process import ServerProcess
from space_proto import worker_pb2

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


LOSSES = (Fault.KILL, Fault.HANG, Fault.LOADING, Fault.CRASH)
"""Kills and hangs, which `--faults` counts."""


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
        """The router is connected to the newest process."""
        pids = self._pids()
        return bool(pids) and socket_of(pids[-1]) in _connected()

    def _pids(self) -> list[int]:
        return [pid for pid in self.server.worker_pids() if Path(socket_of(pid)).parent == self.folder]

    @classmethod
    def of(cls, server: ServerProcess) -> list[WorkerSlot]:
        """One for each worker that runs."""
        return [cls(server, Path(socket_of(pid)).parent) for pid in server.worker_pids()]


def socket_of(worker: int) -> str:
    """The path of the Unix socket that a worker listens on; "" if the process has ended, or is just starting."""
    try:
        words = Path(f"/proc/{worker}/cmdline").read_bytes().decode().split("\0")
        return words[words.index("--listen") + 1].removeprefix("unix:")
    except (OSError, ValueError):
        return ""


def _connected() -> set[str]:
    """Paths of the Unix sockets that have an accepted connection."""
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
