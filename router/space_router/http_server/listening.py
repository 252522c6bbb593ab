"""Where the web server listens: a TCP address, or a Unix socket that only this user may use."""

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

OTHER_FILES = 256
"""Open files of a server beside its clients' connections: workers, logs, refused clients on their way out."""

GUARD = (
    "Set SPACESERVE_API_KEYS or --api-key-file, or keep others from the port (--host 127.0.0.1, docker run -p "
    "127.0.0.1:8080:8080)."
)
"""What makes a server that others reach ask who they are."""


@contextmanager
def listening(host: str, port: int, *, flag: str = "--port", buffer: int | None = None) -> Iterator[socket.socket]:
    """A bound socket, so that a taken address is known before the model is read; a Unix one is removed at the end.

    `buffer`: bytes that the system may hold for one client. Raises ConfigError.
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
    """Connections inherit it."""
    if buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, min(buffer, 2**30))
    return bound


def _unix(path: Path, host: str) -> socket.socket:
    """A socket with mode 0600 from its first moment on. One that a killed server left behind is taken over."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
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
    """To unix:PATH or HOST:PORT. Raises OSError, or ValueError for a place that is neither."""
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


def _answers(path: Path) -> bool:
    """Somebody listens on this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def bound_buffers(port: int, buffer: int) -> int:
    """Bound what the system may hold for one client on sockets of this process that listen at `port` and were made by a
    library that has no option for it; how many there are.
    """
    found = 0
    for file in list(Path("/dev/fd").iterdir()):
        try:
            one = socket.socket(fileno=int(file.name))
        except OSError:  # no socket, or gone meanwhile
            continue
        try:
            is_internet = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and one.getsockname()[1] == port and _listens(one):
                _buffered(one, buffer)
                found += 1
        finally:
            one.detach()  # it is somebody else's
    return found


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def room_for(num_connections: int) -> int:
    """Let this process open so many connections, if it may; how many it can have."""
    wanted = num_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, min(num_connections, (most if soft == resource.RLIM_INFINITY else max(soft, most)) - OTHER_FILES))


def is_open_to_others(bound: socket.socket) -> bool:
    """Other machines may reach it, as far as the address tells."""
    if bound.family == socket.AF_UNIX:
        return False
    return not ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket, *, encrypted: bool) -> str:
    """How a client names the place; of a Unix socket, its path behind `unix:`."""
    if bound.family == socket.AF_UNIX:
        return f"{UNIX}{bound.getsockname()}"
    scheme = "https" if encrypted else "http"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def curl(place: str, path: str) -> str:
    """The beginning of a command that asks there."""
    if place.startswith(UNIX):
        return f"curl --unix-socket {place.removeprefix(UNIX)} http://localhost{path}"
    return f"curl {place}{path}"
