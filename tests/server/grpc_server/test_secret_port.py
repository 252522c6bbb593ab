"""A worker's port with a secret: a peer that does not prove it gets a refusal, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from doubles.worker import Peer, ScriptedModel
from space_common.worker.secret import RouterProof, SecretFile
from space_proto import worker_pb2 as pb
from space_proto import worker_pb2_grpc
from space_server.__main__ import main
from space_server.config import parse
from space_server.grpc_server import WorkerService, start_server
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

SECRET, OTHER = b"of-the-worker-" * 3, b"of-a-stranger-" * 3
START = pb.Command(start=pb.Start(protocol_major=1, max_prefill_rows=64, max_draft_length=3))


class Port:
    """A worker behind a secret, and calls to it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]

    def call(self, metadata: tuple[tuple[str, str], ...] = ()) -> Peer:
        return Peer(self._stub.Serve(metadata=metadata))

    async def refusal(self, metadata: tuple[tuple[str, str], ...] = ()) -> pb.Refusal:
        last = await self.call(metadata).last_word()
        assert last is not None
        assert last.HasField("refusal")
        return last.refusal

    async def proof(self, secret: bytes = SECRET) -> RouterProof:
        return RouterProof.of([secret], (await self.refusal()).challenge)


@asynccontextmanager
async def port_with_secret(folder: Path) -> AsyncIterator[Port]:
    (folder / "secret").write_bytes(SECRET)
    worker = Worker(ScriptedModel(), num_blocks=64, block_size=4, controller=FixedLayout.full(3))
    service = WorkerService(worker, secret=SecretFile(folder / "secret"))
    server, address = await start_server(service, "127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield Port(channel)
    await server.stop(grace=0)


async def test_a_router_that_proves_the_secret_gets_a_hello_with_the_workers_own_proof(tmp_path: Path) -> None:
    async with port_with_secret(tmp_path) as port:
        proof = await port.proof()
        peer = port.call(proof.metadata)
        message = await peer.hear()
        assert message is not None
        assert message.hello.num_blocks == 64
        assert proof.is_answered_by(message.hello.proof)
        assert message.hello.proof.hex() not in proof.metadata[0][1]
        peer.call.cancel()


async def test_peers_without_the_secret_are_refused_with_the_cure_and_leave_the_router_its_worker(
    tmp_path: Path,
) -> None:
    async with port_with_secret(tmp_path) as port:
        good = await port.proof()
        router = port.call(good.metadata)
        assert (await router.hear()) is not None
        await router.say(START)
        assert "--worker-secret-file" in (await port.refusal()).reason, "an older router can read the reason"
        for metadata in ((await port.proof(OTHER)).metadata, good.metadata, (("spaceserve-proof", "junk"),)):
            assert "has not proven" in (await port.refusal(metadata)).reason
        unproven = port.call()
        await unproven.say(START, pb.Command(drain=pb.Drain()))
        last = await unproven.last_word()
        assert last is not None
        assert last.HasField("refusal"), "what it says is not read, so the worker does not drain"
        await router.say(pb.Command(admit=pb.Admit(seq_id=1, ids=[5, 6], num_prompt=2, pages=range(4),
                                                   limits=pb.Limits(max_tokens=3))))  # fmt: skip
        reports = await router.hear_until(lambda report: any(s.finish for s in report.sequences))
        assert sum(len(s.tokens) for report in reports for s in report.sequences) == 3
        router.call.cancel()


async def test_a_flood_of_unproven_calls_does_not_keep_the_router_out(tmp_path: Path) -> None:
    async with port_with_secret(tmp_path) as port:
        flood = [asyncio.create_task(port.refusal()) for _ in range(200)]
        peer = port.call((await port.proof()).metadata)
        message = await peer.hear()
        assert message is not None
        assert message.HasField("hello")
        peer.call.cancel()
        assert len({refusal.challenge for refusal in await asyncio.gather(*flood)}) == 200, "each is fresh"


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "no-such-host.invalid:1"])
def test_a_worker_that_others_reach_does_not_start_without_secret_or_certificates(
    listen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--listen", listen, "--model", str(tmp_path / "none")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--worker-secret-file" in said
    assert "--tls-client-ca" in said
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    assert main([*words, "--worker-secret-file", str(secret)]) == 3, "it goes on to the model, which is missing"


def test_a_secret_file_that_does_nothing_or_cannot_be_used_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    for listen, message in (("unix:/w", "does nothing on a Unix socket"), ("0.0.0.0:0", "at least 32 characters")):
        with pytest.raises(SystemExit):
            parse(["--listen", listen, "--worker-secret-file", str(secret)])
        assert message in capsys.readouterr().err
