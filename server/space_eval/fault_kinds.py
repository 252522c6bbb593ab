"""Faults, done to a server that runs: its worker is killed, stopped, crashed, or molested on its socket."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from enum import Enum

import grpc.aio
from space_proto import worker_pb2

from space_eval.fault_lane import Lane, socket_of

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Fault(Enum):
    """What is done."""

    KILL = "killed"  # SIGKILL while it steps
    HANG = "hung"  # SIGSTOP: it lives and says nothing
    LOADING = "killed while loading"  # SIGKILL, and SIGKILL again for the next before it is ready
    CRASH = "crashed"  # SIGSEGV: nobody can tell that no request did it
    GARBAGE = "garbage on its socket"  # bytes that are no HTTP/2, and HTTP/2 that is no gRPC: it must not notice
    INTRUDER = "another router"  # somebody else takes the worker over and sends nonsense


LOSSES = (Fault.KILL, Fault.HANG, Fault.LOADING, Fault.CRASH)
"""Kills and hangs, which the count of faults is of."""


def planned(number: int, source: random.Random) -> list[Fault]:
    """So many kills and hangs in random order, and an eighth as many others among them."""
    shares = {Fault.HANG: 0.3, Fault.LOADING: 0.1, Fault.CRASH: 0.1}
    plan = [fault for fault, share in shares.items() for _ in range(round(share * number))]
    plan += [Fault.KILL] * (number - len(plan))
    plan += [Fault.GARBAGE] * -(-number // 16) + [Fault.INTRUDER] * -(-number // 16)
    source.shuffle(plan)
    return plan


async def commit(fault: Fault, lane: Lane, worker: int, source: random.Random) -> None:
    """Do it to the worker with this process id; returns once it is done, not once it is mended."""
    match fault:
        case Fault.KILL:
            os.kill(worker, signal.SIGKILL)
        case Fault.HANG:
            os.kill(worker, signal.SIGSTOP)
        case Fault.CRASH:
            os.kill(worker, signal.SIGSEGV)
        case Fault.LOADING:
            os.kill(worker, signal.SIGKILL)
            while (fresh := await lane.worker()) == worker:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(source.uniform(0.0, 1.0))
            with suppress(ProcessLookupError):
                os.kill(fresh, signal.SIGKILL)
        case Fault.GARBAGE:
            for _ in range(3):
                await _shout(socket_of(worker), source)
        case Fault.INTRUDER:
            await _intrude(socket_of(worker), source)


async def _shout(path: str, source: random.Random) -> None:
    """Bytes that mean nothing; how the worker answers is its own affair."""
    with suppress(OSError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(source.choice([b"", _PREFACE]) + source.randbytes(source.randrange(1, 20_000)))
        with suppress(OSError):
            await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _intrude(path: str, source: random.Random) -> None:
    """Talk to the worker as a router would that has lost its mind."""

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
