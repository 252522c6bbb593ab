"""A whole server behind TLS or on a Unix socket, and what it writes down about those who ask."""

import json
import socket
import ssl
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from doubles.router.whole_router import authority, signed
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
    keys.write_text("the-key-itself name=team requests-per-minute=1000\n")
    answer = "plugh-the-secret-of-an-answer"
    flags = ["--log-level", "debug", "--api-key-file", str(keys), "--chat-template", "chatml"]
    with start_server(*flags, worker=["--reply", answer]) as server:
        headers = {"authorization": "Bearer the-key-itself"}
        with httpx.Client(base_url=server.url, headers=headers) as client:
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
        said = "\n".join(server.router.lines + server.worker.lines) + metrics
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


def test_a_key_of_another_certificate_is_refused_and_not_shown(tmp_path: Path) -> None:
    one, other = authority(tmp_path, "one"), authority(tmp_path, "other")
    with pytest.raises(ConfigError, match="do not go together") as caught:
        build({"tls_cert": str(one.cert), "tls_key": str(other.key)}, {})
    assert other.key.read_text().splitlines()[1] not in str(caught.value)
