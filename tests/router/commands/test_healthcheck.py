"""The health check finds the container's server at whatever address its flags give."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from doubles.router.whole_router import authority, signed
from space_router.commands.healthcheck import main, started
from space_router.commands.server_client import ChatError, ServerClient

VENV = "/opt/spaceserve/bin"


class Server(HTTPServer):
    """Says `status` on /readyz, and 404 elsewhere."""

    status = 200

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)  # no name is looked up


class Answer(BaseHTTPRequestHandler):
    """Of that server."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.send_response(self.server.status if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def address_string(self) -> str:
        return "somebody"


@contextmanager
def answering(family: int = socket.AF_INET, address: object = ("127.0.0.1", 0), status: int = 200,
              context: ssl.SSLContext | None = None) -> Iterator[int]:  # fmt: skip
    """Its port; 0 on a Unix socket."""
    server = Server(("127.0.0.1", 0), Answer, bind_and_activate=False)
    server.status = status
    with closing(server.socket):
        bound = socket.socket(family, socket.SOCK_STREAM)
    bound.bind(address)  # type: ignore[arg-type]
    bound.listen()
    port = 0 if family == socket.AF_UNIX else bound.getsockname()[1]
    server.socket = bound if context is None else context.wrap_socket(bound, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python", f"{VENV}/spaceserve", "serve", "--port", "9000"], ["serve", "--port", "9000"]),
        (["/sbin/docker-init", "--", "entrypoint.py", "router", "--port=1"], ["router", "--port=1"]),
        (["/sbin/docker-init", "--", "entrypoint.py", "--port", "9000"], ["serve", "--port", "9000"]),
        (["/sbin/docker-init", "--", "entrypoint.py"], ["serve"]),
        (
            ["/opt/spaceserve/bin/python", "-P", "/usr/local/bin/entrypoint.py", "serve"],
            ["serve"],
        ),  # which is about to begin
        (["python", "-m", "space_server", "--listen", "h:1"], ["worker", "--listen", "h:1"]),
        (["python", "-m", "space_eval.bench", "--rounds", "1"], ["bench", "--rounds", "1"]),
        (["bash"], []),
        ([], []),
    ],
)
def test_what_was_started_is_read_from_the_first_command_line(command: list[str], words: list[str]) -> None:
    assert started(command) == words


def test_the_words_of_the_first_process_are_taken_where_none_are_given(tmp_path: Path) -> None:
    first = tmp_path / "cmdline"
    with answering() as port:
        for said, code in ((f"--port\0{port}", 0), ("--port\x001", 1)):
            first.write_text(f"python\0{VENV}/spaceserve\0serve\0{said}\0")
            assert main([], {}, first) == code


@pytest.mark.parametrize("program", ["serve", "router"])
def test_a_port_is_taken_from_the_flag_then_from_the_variable(program: str) -> None:
    with answering() as port:
        assert main([program, "--model", "demo", "--port", str(port)], {"SPACESERVE_PORT": "1"}) == 0
        assert main([program, f"--port={port}"], {}) == 0
        assert main([program], {"SPACESERVE_PORT": str(port)}) == 0
        assert main([program, "--port", "1"], {"SPACESERVE_PORT": str(port)}) == 1


@pytest.mark.parametrize("status", [503, 404])
def test_who_is_not_ready_is_unwell(status: int, capfd: pytest.CaptureFixture[str]) -> None:
    with answering(status=status) as port:
        assert main(["serve", "--port", str(port)], {}) == 1
    assert f"http://127.0.0.1:{port}/readyz: {status}" in capfd.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.2"])
def test_another_host_is_asked_there(host: str) -> None:
    with answering(address=(host, 0)) as port:
        assert main(["serve", "--host", host, "--port", str(port)], {}) == 0
        assert main(["serve", "--port", str(port)], {"SPACESERVE_HOST": host}) == 0
        assert main(["serve", "--host", "127.0.0.3", "--port", str(port)], {}) == (0 if host == "0.0.0.0" else 1)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_all_addresses_of_ipv6_are_asked_at_its_loopback(capfd: pytest.CaptureFixture[str]) -> None:
    with answering(socket.AF_INET6, ("::1", 0)) as port:
        assert main(["serve", "--host", "::", "--port", str(port)], {}) == 0
        assert main(["worker", "--listen", f"[::]:{port}"], {}) == 0
    assert main(["serve", "--host", "::", "--port", str(port)], {}) == 1
    assert f"http://[::1]:{port}/readyz: " in capfd.readouterr().err


def test_a_unix_socket_is_asked_at_its_path(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    assert main(["serve", "--host", f"unix:{path}"], {}) == 1
    with answering(socket.AF_UNIX, str(path)):
        assert main(["serve", "--host", f"unix:{path}"], {}) == 0
        assert main(["worker", "--listen", f"unix:{path}"], {}) == 0


def test_with_a_certificate_it_speaks_https_whatever_names_the_certificate_has(tmp_path: Path) -> None:
    own = signed(tmp_path, "server", authority(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    with answering(context=context) as port:
        assert main(["serve", "--port", str(port), "--tls-cert", str(own.cert)], {}) == 0
        assert main(["serve", "--port", str(port)], {"SPACESERVE_TLS_CERT": str(own.cert)}) == 0
        assert main(["serve", "--port", str(port)], {}) == 1


def test_other_clients_trust_a_private_authority_if_told_and_else_name_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = authority(tmp_path)
    own = signed(tmp_path, "server", ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    with answering(context=context) as port:
        url = f"https://127.0.0.1:{port}"
        with pytest.raises(ChatError, match=r"answers, but its certificate is not trusted .* --cacert FILE"):
            ServerClient(url).info()
        with pytest.raises(ChatError, match="/info answered 404"):  # so it was reached
            ServerClient(url, cacert=ca.cert).info()
        with pytest.raises(ChatError, match="there is no certificate in it"):
            ServerClient(url, cacert=own.key).info()
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.cert))
        with pytest.raises(ChatError, match="/info answered 404"):
            ServerClient(url).info()
    with answering() as port, pytest.raises(ChatError, match="it speaks no TLS"):
        ServerClient(f"https://127.0.0.1:{port}").info()


def test_a_worker_is_well_while_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            assert main(["worker", "--model", "demo", "--listen", f"{host}:{port}"], {}) == 0
    assert main(["worker", "--listen", f"127.0.0.1:{port}"], {}) == 1


@pytest.mark.parametrize("words", [["worker"], ["worker", "--listen", "nowhere"], ["serve", "--port", "0"]])
def test_who_cannot_be_asked_is_unwell_with_a_reason(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words, {}) == 1
    assert capfd.readouterr().err.startswith("healthcheck: ")


@pytest.mark.parametrize("words", [["bench", "--port", "1"], ["chat"], ["convert", "a", "b"]])
def test_a_container_without_a_server_is_well(words: list[str], tmp_path: Path) -> None:
    assert main(words, {}) == 0
    (tmp_path / "cmdline").write_text("bash\0")
    assert main([], {}, tmp_path / "cmdline") == 0
