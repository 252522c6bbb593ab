"""Who can have a worker: its own user, whoever shows a certificate, and not for ever who does not listen."""

import asyncio
import stat
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router.whole_router import authority, signed
from doubles.worker import ScriptedModel
from space_common.certificate import CertificateFiles
from space_proto import worker_pb2 as pb
from space_proto import worker_pb2_grpc
from space_server.config import parse
from space_server.grpc_server import service as service_module
from space_server.grpc_server.service import WorkerService, start_server
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

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
    monkeypatch.setattr(service_module, "DISPLACED_SECONDS", 0.1)

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
            assert asyncio.get_running_loop().time() - begun < service_module.UNREAD_SECONDS / 2
        deaf.cancel()
    await server.stop(grace=0)
