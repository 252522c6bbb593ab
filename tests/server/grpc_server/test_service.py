"""The conversation over a real socket: hello, tokens, releases, heartbeats, refusals, and who comes next."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router.whole_router import authority, signed
from doubles.worker import Peer, ScriptedModel
from space_common.certificate import CertificateFiles
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.network import PagedKV
from space_proto import worker_pb2 as pb
from space_proto import worker_pb2_grpc
from space_server import grpc_server
from space_server.config import parse
from space_server.grpc_server import MAX_UNSENT, RouterSession, WorkerService, start_server
from space_server.machine.sensors import Meter
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_server.worker_messages import PROTOCOL_MINOR
from torch import Tensor


def start(major: int = 1) -> pb.Command:
    return pb.Command(start=pb.Start(protocol_major=major, max_prefill_rows=64, max_draft_length=3))


def admit(seq_id: int, *, max_tokens: int = 8) -> pb.Command:
    return pb.Command(
        admit=pb.Admit(
            seq_id=seq_id, ids=[5, 6, 7], num_prompt=3, pages=range(8 * seq_id, 8 * seq_id + 8),
            limits=pb.Limits(max_tokens=max_tokens), max_draft_length=3,
        )
    )  # fmt: skip


def release(seq_id: int) -> pb.Command:
    return pb.Command(release=pb.Release(seq_id=seq_id))


class SlowModel(ScriptedModel):
    """Its forward pass takes as long as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        self.begun.set()
        self.go_on.wait(10)
        return super().forward(batch, kv)


@asynccontextmanager
async def serving(
    folder: Path, *, model: ScriptedModel | None = None, heartbeat_seconds: float = 1.0, meter: Meter | None = None
) -> AsyncIterator[tuple[WorkerService, Callable[[], Peer]]]:
    worker = Worker(model or ScriptedModel(), num_blocks=256, block_size=4, controller=FixedLayout.full(3))
    served = WorkerService(worker, heartbeat_seconds=heartbeat_seconds, meter=meter)
    server, address = await start_server(served, f"unix:{folder / 'w'}")
    channels = []

    def connect() -> Peer:
        channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        channels.append(channel)
        return Peer(worker_pb2_grpc.WorkerStub(channel).Serve())  # type: ignore[no-untyped-call]

    try:
        yield served, connect
    finally:
        for channel in channels:
            await channel.close()
        await server.stop(grace=0)


async def test_a_sequence_from_admission_to_release(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, connect):
        peer = connect()
        hello = await peer.hear()
        assert hello is not None
        assert (hello.hello.num_blocks, hello.hello.protocol_major) == (256, 1)
        await peer.say(start(), admit(1))
        reports = await peer.hear_until(lambda report: any(s.finish for s in report.sequences))
        tokens = [token for report in reports for s in report.sequences for token in s.tokens]
        assert tokens == [ScriptedModel().text(position) for position in range(3, 11)]
        await peer.say(release(1), release(44))
        reports = await peer.hear_until(lambda report: 44 in report.released)
        assert [n for report in reports for n in report.released] == [1, 44]


class Battery:
    """A sensor that counts 5 joules each time it is read."""

    device = "package-0"

    def __init__(self) -> None:
        self.num_readings = 0

    def joules(self) -> float:
        self.num_readings += 1
        return 5.0 * self.num_readings


async def test_what_the_machine_draws_is_said_now_and_then_and_not_what_it_drew_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "ENERGY_SECONDS", 1e9)

    battery = Battery()
    async with serving(tmp_path, heartbeat_seconds=0.3, meter=Meter([battery], "here")) as (_, connect):
        peer = connect()
        await peer.hear()
        first = await peer.hear_until(lambda report: bool(report.energy))
        assert [(one.machine, one.device) for one in first[0].energy] == [("here", "package-0")]
        begun = battery.num_readings
        await peer.say(start(), admit(1))
        reports = await peer.hear_until(lambda report: any(s.finish for s in report.sequences))
        assert not any(report.energy for report in reports)  # they come too soon after the first
        assert battery.num_readings == begun
        monkeypatch.setattr(grpc_server, "ENERGY_SECONDS", 0.0)
        reports = await peer.hear_until(lambda report: bool(report.energy))
        assert [one.joules for one in reports[-1].energy] == [5.0]


async def test_port_0_takes_a_free_port_and_says_which() -> None:
    worker = Worker(ScriptedModel(), num_blocks=8)
    server, address = await start_server(WorkerService(worker), "127.0.0.1:0")
    assert address.startswith("127.0.0.1:")
    assert not address.endswith(":0")
    with pytest.raises(OSError, match="Cannot listen on"):
        await start_server(WorkerService(worker), address)
    async with grpc.aio.insecure_channel(address) as channel:
        hello = await Peer(worker_pb2_grpc.WorkerStub(channel).Serve()).hear()  # type: ignore[no-untyped-call]
        assert hello is not None
        assert hello.hello.num_blocks == 8
    await server.stop(grace=0)


async def test_a_heartbeat_breaks_every_silence(tmp_path: Path) -> None:
    async with serving(tmp_path, heartbeat_seconds=0.01) as (_, connect):
        peer = connect()
        await peer.hear()
        for _ in range(3):
            message = await peer.hear()
            assert message is not None
            assert not message.report.stepped


async def test_another_protocol_is_refused_and_both_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, connect):
        peer = connect()
        await peer.say(start(major=7))
        last = await peer.last_word()
        assert last is not None
        assert f"speaks protocol 7.0, this worker 1.{PROTOCOL_MINOR}." in last.refusal.reason
        peer = connect()
        await peer.say(admit(1))
        last = await peer.last_word()
        assert last is not None
        assert last.refusal.reason == "The router sent admit before Start."


async def test_a_message_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    worker = Worker(ScriptedModel(), num_blocks=256, block_size=4)
    server, address = await start_server(WorkerService(worker), f"unix:{tmp_path / 'w'}")
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/spaceserve.v1.Worker/Serve", response_deserializer=pb.WorkerMessage.FromString)()
        peer = Peer(call)
        await peer.hear()
        await call.write(b"\xff")
        last = await peer.last_word()
    assert last is not None
    assert last.refusal.reason.startswith("The router sent a message that cannot be read")
    await server.stop(grace=0)


async def test_the_next_router_finds_an_empty_worker(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, connect):
        first = connect()
        await first.say(start(), admit(1, max_tokens=900), admit(2, max_tokens=900))
        await first.hear_until(lambda report: report.stepped)
        first.call.cancel()
        second = connect()
        await second.say(start(), admit(1))
        reports = await second.hear_until(lambda report: any(s.finish for s in report.sequences))
        assert {s.seq_id for report in reports for s in report.sequences} == {1}


async def test_the_newest_router_ends_the_conversation_before(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, connect):
        first = connect()
        await first.say(start(), admit(1))
        await first.hear_until(lambda report: report.stepped)
        second = connect()
        await second.say(start(), admit(1))
        last = await first.last_word()
        assert last is not None
        assert last.refusal.reason == "Another router has connected to this worker."
        await second.hear()
        await second.hear_until(lambda report: any(s.finish for s in report.sequences))


async def test_half_closing_ends_the_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, connect):
        peer = connect()
        await peer.say(start())
        await peer.hear()
        await peer.call.done_writing()
        await peer.last_word()
        assert await peer.call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("by_signal", [False, True])
async def test_draining_finishes_what_runs_and_then_the_process(tmp_path: Path, by_signal: bool) -> None:
    async with serving(tmp_path) as (service, connect):
        peer = connect()
        await peer.say(start(), admit(1, max_tokens=20))
        await peer.hear()
        if by_signal:
            service.drain()
        else:
            await peer.say(pb.Command(drain=pb.Drain()))
        reports = await peer.hear_until(lambda report: any(s.finish for s in report.sequences))
        assert not any(s.error for report in reports for s in report.sequences) or by_signal
        farewell = await peer.last_word()
        assert farewell is not None
        assert farewell.report.leaving
        await asyncio.wait_for(service.finished.wait(), 30)
        last = await connect().last_word()  # the process still listens, and ends
        assert last is not None
        assert last.refusal.reason == "The worker is draining."


async def test_a_router_that_hangs_up_while_draining_leaves_nothing_to_finish(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, connect):
        peer = connect()
        await peer.say(start(), admit(1, max_tokens=900), pb.Command(drain=pb.Drain()))
        await peer.hear()
        await peer.hear_until(lambda report: any(s.paused for s in report.sequences))
        assert not service.finished.is_set()
        peer.call.cancel()
        await asyncio.wait_for(service.finished.wait(), 30)


async def test_draining_without_a_router_is_over_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, connect):
        service.drain()
        assert service.finished.is_set()
        last = await connect().last_word()
        assert last is not None
        assert last.refusal.reason == "The worker is draining."


async def test_a_router_that_does_not_read_is_not_run_ahead_of() -> None:
    worker = Worker(ScriptedModel(num_masks=0), num_blocks=256, block_size=4)
    conversation = RouterSession(worker)
    conversation.receive([start(), admit(1, max_tokens=900)])
    conversation.receive([pb.Command(extend=pb.Extend(seq_id=1, pages=range(20, 256)))])
    conversation.start()
    said = [await conversation.message(10) for _ in range(MAX_UNSENT)]
    assert [len(message.report.sequences) for message in said if message is not None] == [1] * MAX_UNSENT
    assert await conversation.message(0.05) == pb.WorkerMessage(report=pb.StepReport())  # a heartbeat: no step
    assert worker.num_forwards == MAX_UNSENT
    for message in said:
        assert message is not None
        conversation.sent(message)
    assert await conversation.message(10) != pb.WorkerMessage(report=pb.StepReport())
    await conversation.stop()
    assert len(worker.batch) == 0


async def test_a_stream_that_is_cancelled_while_it_ends_still_leaves_an_empty_worker() -> None:
    model = SlowModel()
    worker = Worker(model, num_blocks=256, block_size=4)
    conversation = RouterSession(worker)
    conversation.receive([start(), admit(1, max_tokens=900)])
    conversation.start()
    await asyncio.to_thread(model.begun.wait, 10)
    stopping = asyncio.create_task(conversation.stop())
    for _ in range(2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stopping.cancel()
    assert not stopping.done()
    model.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert len(worker.batch) == 0


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_step_that_fails_outside_any_sequence_ends_the_stream_and_the_worker_only_where_its_device_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    monkeypatch.setattr(grpc_server, "is_lost", lambda device: is_lost)

    async with serving(tmp_path) as (served, connect):
        first = connect()
        await first.hear()
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "step", lambda worker, report: 1 / 0)
            await first.say(start(), admit(1))
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await first.last_word()
        assert failure.value.code() == grpc.StatusCode.INTERNAL
        assert served.finished.is_set() == served.has_lost_device == is_lost
        if is_lost:
            return
        second = connect()
        await second.say(start(), admit(1))
        await second.hear()
        await second.hear_until(lambda report: any(s.finish for s in report.sequences))
    assert "stepping failed" in caplog.text


SOON = 20.0


def a_worker() -> Worker:
    return Worker(ScriptedModel(), num_blocks=256, block_size=4, controller=FixedLayout.full(3))


def serve_call(channel: grpc.aio.Channel) -> Any:
    return worker_pb2_grpc.WorkerStub(channel).Serve()  # type: ignore[no-untyped-call]


async def test_a_workers_socket_is_for_its_own_user_alone(tmp_path: Path) -> None:
    server, address = await start_server(WorkerService(a_worker()), f"unix:{tmp_path / 'w'}")
    mode = (tmp_path / "w").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert address == f"unix:{tmp_path / 'w'}"
    await server.stop(grace=0)


async def test_only_a_router_with_a_certificate_of_the_named_authority_is_heard(tmp_path: Path) -> None:
    ours, other = authority(tmp_path), authority(tmp_path, "other")
    of_worker, of_router = signed(tmp_path, "worker", ours), signed(tmp_path, "router", ours)
    of_stranger = signed(tmp_path, "stranger", other)
    root = ours.cert.read_bytes()
    tls = CertificateFiles(of_worker.cert, of_worker.key, ours.cert)

    server, address = await start_server(WorkerService(a_worker()), "localhost:0", tls)

    async def hello(credentials: grpc.ChannelCredentials | None) -> bool:
        channel = (
            grpc.aio.insecure_channel(address) if credentials is None else grpc.aio.secure_channel(address, credentials)
        )
        async with channel:
            call = serve_call(channel)
            try:
                message = await asyncio.wait_for(call.read(), SOON)
            except grpc.aio.AioRpcError:
                return False
            finally:
                call.cancel()
            return bool(message.HasField("hello"))

    known, unknown = (
        grpc.ssl_channel_credentials(root, shown.key.read_bytes(), shown.cert.read_bytes())
        for shown in (of_router, of_stranger)
    )
    assert await hello(known)
    assert not await hello(unknown)
    assert not await hello(grpc.ssl_channel_credentials(root)), "without a certificate"
    assert not await hello(None), "without TLS"
    assert await hello(known), "the others have done no harm"
    await server.stop(grace=0)


def test_tls_flags_that_are_incomplete_or_useless_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = authority(tmp_path)
    _, other_key = authority(tmp_path, "other")

    def said(*flags: str, listen: str = "0.0.0.0:0") -> str:
        with pytest.raises(SystemExit):
            parse(["--listen", listen, *flags])
        return capsys.readouterr().err

    assert "--tls-key and --tls-client-ca is missing" in said("--tls-cert", str(cert))
    whole = ["--tls-cert", str(cert), "--tls-client-ca", str(cert), "--tls-key"]
    assert "cannot be read" in said(*whole, "/nonexistent")
    assert "is no PEM file" in said(*whole, __file__)
    assert "do not go together" in said(*whole, str(other_key))
    assert "does nothing on a Unix socket" in said(*whole, str(key), listen="unix:/w")
    config = parse(["--listen", "0.0.0.0:0", *whole, str(key)])
    assert config.certificate() is not None
    assert key.read_text().splitlines()[1] not in repr(config)


async def test_a_router_that_never_reads_loses_the_worker_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "DISPLACED_SECONDS", 0.1)

    service = WorkerService(a_worker(), heartbeat_seconds=0.0005)
    server, address = await start_server(service, f"unix:{tmp_path / 'w'}")
    options = [
        ("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024),
    ]  # fmt: skip
    async with grpc.aio.insecure_channel(address, options=options) as deaf_channel:
        deaf = serve_call(deaf_channel)
        await deaf.write(pb.RouterMessage(commands=[pb.Command(start=pb.Start(protocol_major=1))]))
        seen = None
        while seen is None or service._writing is not seen:
            seen = service._writing
            await asyncio.sleep(0.3)  # for which one write has lasted
        async with grpc.aio.insecure_channel(address, options=options[:1]) as channel:
            begun = asyncio.get_running_loop().time()
            message = await asyncio.wait_for(serve_call(channel).read(), SOON)
            assert message.HasField("hello")
            assert asyncio.get_running_loop().time() - begun < grpc_server.UNREAD_SECONDS / 2
        deaf.cancel()
    await server.stop(grace=0)
