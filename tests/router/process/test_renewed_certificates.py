"""Certificates that are renewed while a server runs are shown to the next client, over HTTP, gRPC and to workers."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from doubles.router.whole_router import Certificate, authority, signed
from space_common.certificate import CertificateError, CertificateFiles, server_credentials
from space_proto import generate_pb2, generate_pb2_grpc

StartServer = Callable[..., AbstractContextManager[Any]]
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 2000, "seed": 1, "ignore_eos": True}


def put(renewed: Certificate, place: Certificate) -> None:
    """As renewal does it: each file is replaced as a whole, one after the other."""
    renewed.cert.replace(place.cert)
    renewed.key.replace(place.key)


@pytest.mark.e2e
def test_a_renewed_certificate_is_shown_to_new_clients_and_running_streams_go_on(
    start_server: StartServer, tmp_path: Path
) -> None:
    first, second = authority(tmp_path, "first"), authority(tmp_path, "second")
    own, renewed = signed(tmp_path, "server", first), signed(tmp_path, "renewed", second)
    flags = ["--tls-cert", str(own.cert), "--tls-key", str(own.key), "--grpc-port", "0"]
    with start_server(*flags, worker=["--step-seconds", "0.001"]) as server:
        address = server.router.wait_for(r"gRPC on (\S+)")[1]

        def over_http(trusted: Certificate) -> bool:
            try:
                context = ssl.create_default_context(cafile=str(trusted.cert))
                return httpx.get(f"{server.url}/health", verify=context).status_code == 200
            except httpx.ConnectError:
                return False

        def channel_of(trusted: Certificate) -> grpc.Channel:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted.cert.read_bytes()))

        def over_grpc(trusted: Certificate) -> bool:
            with channel_of(trusted) as channel:
                try:
                    info = generate_pb2_grpc.GenerateStub(channel).Info  # type: ignore[no-untyped-call]
                    return bool(info(generate_pb2.InfoRequest(), timeout=20).ready)
                except grpc.RpcError:
                    return False

        assert (over_http(first), over_grpc(first)) == (True, True)
        assert (over_http(second), over_grpc(second)) == (False, False)
        with channel_of(first) as channel:
            stub = generate_pb2_grpc.GenerateStub(channel)  # type: ignore[no-untyped-call]
            running = stub.Generate(generate_pb2.GenerateRequest(**BODY), timeout=60)
            next(running)
            renewed.cert.replace(own.cert)  # and the key is still the old one's
            assert (over_http(first), over_grpc(first)) == (True, True), "what does not go together is not shown"
            renewed.key.replace(own.key)
            assert (over_http(second), over_grpc(second)) == (True, True)
            assert (over_http(first), over_grpc(first)) == (False, False)
            assert sum(len(event.token_ids) for event in running) > 1000, "the stream came to its end"
        assert server.router.stop() == 0
        said = "\n".join(server.router.lines)
    assert "a renewed certificate is not used yet" in said
    assert "is used from now on" in said


async def test_a_client_of_an_authority_that_was_renewed_is_let_in_and_one_of_the_former_is_not(tmp_path: Path) -> None:
    """As workers see routers."""
    first, second = authority(tmp_path, "first"), authority(tmp_path, "second")
    ours = signed(tmp_path, "ours", first)
    before, after = signed(tmp_path, "before", first), signed(tmp_path, "after", second)
    root = ours.cert.parent / "root.crt"
    root.write_bytes(first.cert.read_bytes())
    known = first.cert.read_bytes()

    server = grpc.aio.server()
    port = server.add_secure_port("localhost:0", server_credentials(CertificateFiles(ours.cert, ours.key, root)))
    await server.start()

    async def let_in(client: Certificate) -> bool:
        shown = grpc.ssl_channel_credentials(known, client.key.read_bytes(), client.cert.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", shown) as channel:
            try:
                nobody: Any = channel.unary_unary("/nobody/there")
                await nobody(b"", timeout=20)
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNIMPLEMENTED
        return False

    assert (await let_in(before), await let_in(after)) == (True, False)
    (tmp_path / "new.crt").write_bytes(second.cert.read_bytes())
    (tmp_path / "new.crt").replace(root)
    assert (await let_in(before), await let_in(after)) == (False, True)
    await server.stop(grace=0)


def test_files_that_cannot_be_used_leave_what_was_and_whole_ones_follow(tmp_path: Path) -> None:
    one, other = authority(tmp_path, "one"), authority(tmp_path, "other")
    expected = other.cert.read_bytes()
    files = CertificateFiles(one.cert, one.key)
    first = files.latest()
    assert files.latest() is first, "nothing is read where nothing has changed"
    one.cert.unlink()
    assert files.latest() is first
    one.cert.write_text("no certificate")
    assert files.latest() is first
    put(other, one)
    assert files.latest().cert == expected
    assert "PRIVATE" not in repr(files.latest())


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    one = authority(tmp_path, "one")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", one.key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    with pytest.raises(CertificateError, match="encrypted with a password"):
        CertificateFiles(one.cert, locked)
