"""Listening sockets of the web server: a TCP address, or a Unix socket that only this user may use."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from space_router.errors import ConfigError

UNIX = "unix:"

OTHER_FILES = 256  # file descriptors reserved for other uses: workers, logs, connections that are being refused

GUARD = (
    "Set SPACESERVE_API_KEYS or --api-key-file, or keep others from the port (--host 127.0.0.1, docker run -p "
    "127.0.0.1:8080:8080)."
)
"""Advice for a server without API keys that other machines can reach."""


@contextmanager
def listening(host: str, port: int, *, flag: str = "--port", buffer: int | None = None) -> Iterator[socket.socket]:
    """Bind a socket before the model is loaded, so that an address in use fails early. Raises ConfigError.

    `buffer`: size in bytes of the system's send buffer for each client. A Unix socket is removed at the end.
    """
    if host.startswith(UNIX):
        path = Path(host.removeprefix(UNIX)).expanduser()
        with _unix(path, host) as bound:
            try:
                yield _buffered(bound, buffer)
            finally:
                with suppress(OSError):
                    path.unlink()
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot(host, port, flag, error) from error
    with bound:
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise _cannot(host, port, flag, error) from error
        yield _buffered(bound, buffer)


def _cannot(host: str, port: int, flag: str, error: OSError) -> ConfigError:
    return ConfigError(f"--host={host!r} {flag}={port}: cannot listen there: {error.strerror or error}.")


def _buffered(bound: socket.socket, buffer: int | None) -> socket.socket:
    if buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(buffer, 2**30))
    return bound


def _unix(path: Path, host: str) -> socket.socket:
    """Bind a Unix socket that has mode 0600 from its creation. Replaces a stale socket of a killed server."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                try:
                    connected(f"{UNIX}{path}", 1.0).close()
                except ConnectionRefusedError:
                    path.unlink()
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        bound.close()
        raise ConfigError(f"--host={host!r}: cannot listen there: {error.strerror or error}.") from error
    return bound


def connected(place: str, seconds: float) -> socket.socket:
    """Connect to unix:PATH or HOST:PORT. Raises OSError, or ValueError for any other format."""
    if not place.startswith(UNIX):
        host, _, port = place.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), seconds)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(str(Path(place.removeprefix(UNIX)).expanduser()))
    except OSError:
        connection.close()
        raise
    return connection


def bound_buffers(port: int, buffer: int) -> int:
    """Set the send buffer size of this process's sockets that listen at `port`, and return their number.

    For sockets of a library that has no option for it.
    """
    found = 0
    for file in list(Path("/dev/fd").iterdir()):
        try:
            one = socket.socket(fileno=int(file.name))
        except OSError:  # not a socket, or closed meanwhile
            continue
        try:
            is_there = one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port
            if is_there and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _buffered(one, buffer)
                found += 1
        finally:
            one.detach()  # the library owns the descriptor
    return found


def room_for(num_connections: int) -> int:
    """Raise the open file limit for this many connections; return how many of them the limit allows."""
    wanted = num_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, min(num_connections, (most if soft == resource.RLIM_INFINITY else max(soft, most)) - OTHER_FILES))


def is_open_to_others(bound: socket.socket) -> bool:
    """Return whether the socket's address is reachable from other machines."""
    if bound.family == socket.AF_UNIX:
        return False
    return not ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket, *, encrypted: bool) -> str:
    """Return the base URL of a bound socket; for a Unix socket, `unix:PATH`."""
    if bound.family == socket.AF_UNIX:
        return f"{UNIX}{bound.getsockname()}"
    scheme = "https" if encrypted else "http"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def curl(place: str, path: str) -> str:
    if place.startswith(UNIX):
        return f"curl --unix-socket {place.removeprefix(UNIX)} http://localhost{path}"
    return f"curl {place}{path}"
