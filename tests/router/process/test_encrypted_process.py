"""A server behind TLS or on a Unix socket, certificates that are renewed, and what it writes down of those who ask."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
import httpx
import pytest
from doubles.router.whole_router import Certificate, authority, signed
from space_common.certificate import CertificateError, CertificateFiles, server_credentials
from space_proto import generate_pb2, generate_pb2_grpc
from space_router.commands import healthcheck
from space_router.config import build
from space_router.errors import ConfigError
from space_router.http_server.http_connection import FLUSH_SECONDS

pytestmark = pytest.mark.e2e
StartServer = Callable[..., AbstractContextManager[Any]]
BODY = {"prompt": "x", "max_tokens": 4, "seed": 1, "temperature": 1}
SECRET = "Xyzzy-the-secret-of-a-prompt"


def test_with_a_certificate_http_and_grpc_are_encrypted_and_plain_text_is_not_heard(
    start_server: StartServer, tmp_path: Path
) -> None:
    ours = authority(tmp_path)
    own = signed(tmp_path, "server", ours)
    flags = ["--tls-cert", str(own.cert), "--tls-key", str(own.key), "--grpc-port", "0"]
    with start_server(*flags) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert healthcheck.main(["serve", *flags, "--port", server.url.rpartition(":")[2]], {}) == 0
        trusted = ssl.create_default_context(cafile=str(ours.cert))
        whole = httpx.post(f"{server.url}/v1/completions", json=BODY, verify=trusted).json()["choices"][0]["text"]
        assert whole
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", verify=ssl.create_default_context())
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
        address = server.router.wait_for(r"gRPC on (\S+)")[1]
        request = generate_pb2.GenerateRequest(**BODY)
        credentials = grpc.ssl_channel_credentials(ours.cert.read_bytes())
        with grpc.secure_channel(address, credentials) as channel:
            events = generate_pb2_grpc.GenerateStub(channel).Generate(request)  # type: ignore[no-untyped-call]
            assert "".join(event.text for event in events) == whole
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            list(generate_pb2_grpc.GenerateStub(channel).Generate(request))  # type: ignore[no-untyped-call]
        assert server.router.stop() == 0


def test_older_protocols_than_tls_1_2_are_refused(tmp_path: Path) -> None:
    own = signed(tmp_path, "server", authority(tmp_path))
    context = CertificateFiles(own.cert, own.key).latest().context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    for newest, is_taken in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.set_ciphers("ALL:@SECLEVEL=0")
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1, newest
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(to_client, to_server)
        with pytest.raises(ssl.SSLWantReadError):
            asking.do_handshake()
        with pytest.raises(ssl.SSLError) as ended:
            context.wrap_bio(to_server, to_client, server_side=True).do_handshake()
        assert isinstance(ended.value, ssl.SSLWantReadError) == is_taken, ended.value


def test_the_end_waits_for_no_client_that_does_not_take_leave(start_server: StartServer, tmp_path: Path) -> None:
    ours = authority(tmp_path)
    own = signed(tmp_path, "server", ours)
    trusted = ssl.create_default_context(cafile=str(ours.cert))

    def seconds() -> float:
        with start_server("--tls-cert", str(own.cert), "--tls-key", str(own.key)) as server:
            place = urlsplit(server.url)
            with (
                socket.create_connection((place.hostname, place.port)) as connection,
                trusted.wrap_socket(connection, server_hostname=place.hostname),
            ):
                begun = time.monotonic()
                assert server.router.stop() == 0
                assert not any("ERROR" in line for line in server.router.lines)
                return time.monotonic() - begun

    assert any(seconds() < FLUSH_SECONDS for _ in range(3)), "the machine itself may stop now and then"


def test_a_unix_socket_is_for_this_user_alone_and_gone_at_the_end(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with start_server("--host", f"unix:{path}") as server:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert healthcheck.main(["serve", "--host", f"unix:{path}"], {}) == 0
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
        server.router.wait_for(f"curl --unix-socket {path} http://localhost/v1/completions")
        assert server.router.stop() == 0
    assert not path.exists()


def test_no_word_of_a_prompt_an_answer_or_a_key_is_logged_whatever_goes_wrong(
    start_server: StartServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-key-itself name=team requests-per-minute=1000 operator=yes\n")
    answer = "plugh-the-secret-of-an-answer"
    flags = ["--log-level", "debug", "--api-key-file", str(keys), "--chat-template", "chatml"]
    with start_server(*flags, worker=["--reply", answer]) as server:
        headers = {"authorization": "Bearer the-key-itself"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
            message = {"role": "user", "content": SECRET}
            asked: list[tuple[str, Any]] = [
                ("/v1/completions", {"prompt": SECRET, "max_tokens": 8}),
                ("/v1/completions", {"prompt": SECRET, "max_tokens": 8, "stream": True, "echo": True, "logprobs": 2}),
                ("/v1/completions", {"prompt": SECRET, "stop": [SECRET], "user": SECRET, "suffix": SECRET}),
                ("/v1/completions", {"prompt": [SECRET, 4]}),
                ("/v1/completions", {SECRET: SECRET}),
                ("/v1/completions", {"prompt": SECRET, "max_tokens": SECRET}),
                ("/v1/completions", {"prompt": SECRET, "structured_outputs": {"regex": SECRET + "("}}),
                ("/v1/completions", {"prompt": SECRET, "timeout": 1e-9}),
                ("/v1/chat/completions", {"messages": [message], "max_tokens": 8}),
                ("/v1/chat/completions", {"messages": [message, {"role": SECRET}]}),
                ("/v1/chat/completions", {"messages": [message], "tools": [{"function": {"name": SECRET}}]}),
                ("/v1/responses", {"input": SECRET, "max_output_tokens": 8}),
                ("/generate", {"inputs": SECRET, "parameters": {"max_new_tokens": 8}}),
                ("/tokenize", {"inputs": SECRET}),
                (f"/{SECRET}", {}),
            ]
            statuses = [client.post(path, json=body).status_code for path, body in asked]
            assert {200, 400, 404} <= set(statuses)
            assert 500 not in statuses
            client.post("/v1/completions", content=b'{"prompt": "' + SECRET.encode())
            client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {SECRET}"})
            with client.stream("POST", "/v1/completions", json={"prompt": SECRET, "max_tokens": 500, "stream": True}):
                pass  # and goes away
            metrics = client.get("/metrics").text
        server.router.stop()
        said = "\n".join([*server.router.lines, *server.worker.lines]) + metrics
    assert "499" in said, "something is logged"
    for word in (SECRET, answer, "the-key-itself", json.dumps(SECRET)[1:-1]):
        assert word not in said
    assert 'spaceserve_key_requests_total{key="team"}' in metrics


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tls_cert": "/c"}, "--tls-cert and --tls-key go together"),
        ({"tls_cert": "/nonexistent", "tls_key": "/k"}, "--tls-cert='/nonexistent' --tls-key='/k': /nonexistent: "),
        ({"tls_cert": __file__, "tls_key": __file__}, "is no PEM file"),
        ({"worker_tls_ca": "/c", "worker_address": "w:1"}, "give all three"),
        ({"worker_tls_ca": "a", "worker_tls_cert": "b", "worker_tls_key": "c"}, "goes with --worker-address"),
        ({"host": "unix:/s", "grpc_port": "0"}, "--grpc-port=0 needs an address in --host"),
    ],
)
def test_flags_of_encryption_that_do_not_fit_together_are_refused(flags: dict[str, str | None], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(flags, {})
    assert words in str(caught.value)


def test_a_certificate_on_a_unix_socket_is_refused(tmp_path: Path) -> None:
    own = authority(tmp_path)
    with pytest.raises(ConfigError, match="--tls-cert does nothing on a Unix socket"):
        build({"host": "unix:/s", "tls_cert": str(own.cert), "tls_key": str(own.key)}, {})


def test_a_key_of_another_certificate_is_refused_and_not_shown(tmp_path: Path) -> None:
    one, other = authority(tmp_path, "one"), authority(tmp_path, "other")
    with pytest.raises(ConfigError, match="do not go together") as caught:
        build({"tls_cert": str(one.cert), "tls_key": str(other.key)}, {})
    assert other.key.read_text().splitlines()[1] not in str(caught.value)


STREAM: dict[str, Any] = {"prompt": "x", "max_tokens": 2000, "seed": 1, "ignore_eos": True}


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
            running = stub.Generate(generate_pb2.GenerateRequest(**STREAM), timeout=60)
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
