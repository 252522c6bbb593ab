"""Router and worker prove their secret to each other over a real connection, whose bytes are recorded."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import pytest
from doubles.router import Script, ScriptedWorker
from doubles.tcp import tcp_connection, tcp_server
from space_common.worker.secret import SecretFile
from space_proto import worker_pb2, worker_pb2_grpc
from space_router.config import ServeConfig, build
from space_router.engine.engine import Engine
from space_router.engine.workers.worker_connection import Link, LinkLost, LinkRefused, Watchdog
from space_router.errors import ConfigError
from space_router.metrics import Metrics

SECRET, OTHER = "of-the-worker-" * 3, "of-a-stranger-" * 3


def file_of(folder: Path, secret: str) -> SecretFile:
    path = folder / secret[:8]
    path.write_text(secret)
    return SecretFile(path)


class Recorder:
    """Passes connections on to an address, and keeps what either side says."""

    def __init__(self) -> None:
        self.from_router, self.from_worker = bytearray(), bytearray()
        self._address = ""

    @asynccontextmanager
    async def before(self, address: str) -> AsyncIterator[str]:
        self._address = address
        async with tcp_server(self._pass_on) as here:
            yield here

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with tcp_connection(self._address) as (there, back):
            await asyncio.gather(_copy(reader, back, self.from_router), _copy(there, writer, self.from_worker))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            seen += data
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_the_secret_is_never_on_the_wire_and_what_was_recorded_opens_nothing_again(tmp_path: Path) -> None:
    secret = file_of(tmp_path, SECRET)
    recorder = Recorder()
    async with ScriptedWorker(Script(), listen="127.0.0.1:0", secret=secret) as worker:
        async with (
            recorder.before(worker.address) as address,
            Link(address, watchdog=Watchdog(20.0), secret=secret) as link,
        ):
            assert link.hello.model_name == "scripted"
            proof, whole_call = link.hello.proof, bytes(recorder.from_router)
        said = bytes(recorder.from_router + recorder.from_worker)
        raw = SECRET.encode()
        for form in (raw, raw.hex().encode(), b64encode(raw).rstrip(b"=")):
            assert form not in said
        assert b"spaceserve-proof" in recorder.from_router, "the record does hold what was said"
        assert proof in recorder.from_worker
        assert b"scripted" in recorder.from_worker

        answer = b""
        async with tcp_connection(worker.address) as (reader, writer):
            writer.write(whole_call)
            await writer.drain()
            with suppress(TimeoutError):
                while chunk := await asyncio.wait_for(reader.read(65536), 1.0):
                    answer += chunk
        assert b"has not proven" in answer
        assert b"scripted" not in answer, "it got no Hello"


async def test_a_router_with_another_secret_or_none_is_told_what_to_do(tmp_path: Path) -> None:
    async with ScriptedWorker(Script(), listen="127.0.0.1:0", secret=file_of(tmp_path, SECRET)) as worker:
        for secret, message in ((file_of(tmp_path, OTHER), "has not proven"), (None, "asks for the secret")):
            with pytest.raises(LinkRefused, match=rf"{message}.*--worker-secret-file"):
                async with Link(worker.address, watchdog=Watchdog(20.0), secret=secret):
                    pytest.fail("it was heard")


class Impostor(worker_pb2_grpc.WorkerServicer):
    """Listens where a worker was, and takes every answer to its challenge."""

    def __init__(self, proof: bytes, challenge: bytes) -> None:
        self.proof, self.challenge = proof, challenge
        self.num_commands = 0

    async def Serve(
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        if self.challenge and "spaceserve-proof" not in dict(context.invocation_metadata() or ()):
            yield worker_pb2.WorkerMessage(refusal=worker_pb2.Refusal(reason="prove it", challenge=self.challenge))
            return
        yield worker_pb2.WorkerMessage(
            hello=worker_pb2.Hello(
                protocol_major=1, num_blocks=8, block_size=16, window=64, max_sequences=4, proof=self.proof
            )
        )
        async for message in request_iterator:
            self.num_commands += len(message.commands)


@pytest.mark.parametrize(
    ("challenge", "proof", "message"),
    [
        (bytes(32), bytes(32), "has not proven"),
        (bytes(32), b"", "has not proven"),
        (b"", b"", "has not asked for the secret"),  # a worker of an older protocol, too
        (b"short", b"", "has not asked for the secret"),
    ],
)
async def test_a_worker_that_does_not_prove_the_secret_gets_no_command(
    challenge: bytes, proof: bytes, message: str, tmp_path: Path
) -> None:
    impostor = Impostor(proof, challenge)
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(impostor, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with pytest.raises(LinkLost, match=message):
        async with Link(address, watchdog=Watchdog(20.0), secret=file_of(tmp_path, SECRET)):
            pytest.fail("it was taken")
    assert impostor.num_commands == 0
    await server.stop(grace=0)


async def test_a_router_whose_secret_is_corrected_gets_its_worker_without_a_restart(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(OTHER)
    async with ScriptedWorker(Script(), listen="127.0.0.1:0", secret=file_of(tmp_path, SECRET)) as worker:
        config = ServeConfig(worker_address=(worker.address,), worker_secret_file=str(mine))
        async with Engine(config, Metrics()) as engine:
            (connection,) = engine.worker_pool.connections
            async with asyncio.timeout(20):
                while "has not proven" not in connection.trouble:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            mine.write_text(f"{SECRET}\n{OTHER}\n")
            async with asyncio.timeout(20):
                await engine.wait_ready()
        worker.check()


def test_the_flag_is_refused_where_it_would_do_nothing_and_missed_where_workers_are_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    for flags in ({}, {"worker_address": "unix:/w"}):
        with pytest.raises(ConfigError, match="goes with --worker-address HOST:PORT only"):
            build({"worker_secret_file": str(file), **flags}, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        build({"worker_secret_file": str(tmp_path / "none"), "worker_address": "w:1"}, {})
    assert build({"worker_secret_file": str(file), "worker_address": "w:1"}, {}).unproven_workers() == []
    assert build({"worker_address": "w:1,127.0.0.1:2,localhost:3"}, {}).unproven_workers() == ["w:1"]
