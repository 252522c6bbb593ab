"""Whether the server of a container is well: what Docker asks by `entrypoint.sh healthcheck`.

It asks where the server was told to listen: by the words that the container's first process was started with, and by
the container's variables. `entrypoint.sh healthcheck router --port 9000` says it instead.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from space_router.commands.programs import PROGRAMS
from space_router.config import ENVIRONMENT_PREFIX, settings
from space_router.http_server.listening import UNIX, connected
from space_router.output import say

PATIENCE = 4.0
"""Seconds that an answer may take; Docker waits 5."""
EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
"""Where a server that listens on all addresses is asked."""
OWN = ("spaceserve", "entrypoint.sh")
"""Scripts whose first argument is a program of ours."""


class Unwell(Exception):
    """The server does not answer, or says that it is not ready."""


def main(words: Sequence[str], environment: Mapping[str, str], first: Path = Path("/proc/1/cmdline")) -> int:
    """The exit code: 0 where the server is ready, or none was started; else 1.

    `words`: a program and its flags; none: those of the process whose command line is `first`.
    """
    program, *flags = words or started(first.read_text(encoding="utf-8", errors="replace").split("\0")[:-1]) or ["none"]
    try:
        if program in ("serve", "router"):
            ask_router(flags, environment)
        elif program == "worker":
            ask_worker(flags)
        else:
            say("no server was started here: there is nothing to ask")
    except (Unwell, OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"healthcheck: {error or type(error).__name__}\n")
        return 1
    return 0


def started(command: Sequence[str]) -> list[str]:
    """The program of ours that a command line starts, and its flags; empty where it starts none.

    Before it there may be an interpreter, or the init that `docker run --init` puts there.
    """
    modules = {program.module: name for name, program in PROGRAMS.items()}
    for place, word in enumerate(command):
        if word in modules and command[place - 1] == "-m":
            return [modules[word], *command[place + 1 :]]
        if Path(word).name in OWN:
            words = list(command[place + 1 :])
            return words if words and not words[0].startswith("-") else ["serve", *words]  # as the entrypoint does
    return []


def ask_router(flags: Sequence[str], environment: Mapping[str, str]) -> None:
    """Is it ready? Raises Unwell, OSError or HTTPException.

    The certificate is not looked at: it names the server as clients know it.
    """
    host, port, certificate = (_setting(name, flags, environment) for name in ("host", "port", "tls_cert"))
    if host.startswith(UNIX):
        place = host
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
        connection.sock = _connected(place)
    elif port == "0":
        raise Unwell("the server chose its port itself: give it --port, or the health check one")
    else:
        name = EVERYWHERE.get(host, host)
        scheme, where = "https" if certificate else "http", f"[{name}]" if ":" in name else name
        place = f"{scheme}://{where}:{port}/readyz"
        connection = http.client.HTTPConnection(name, int(port), timeout=PATIENCE)
        if certificate:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(name, int(port), timeout=PATIENCE, context=context)
    try:
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Unwell(f"{place}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if status != 200:
        raise Unwell(f"{place}: {status}")


def ask_worker(flags: Sequence[str]) -> None:
    """Does it listen? It does once its weights are read; a word more would take it from its router.

    Raises Unwell or OSError.
    """
    if (listen := _given(flags, "listen")["listen"]) is None:
        raise Unwell("the worker was given no --listen")
    _connected(listen).close()


def _connected(place: str) -> socket.socket:
    """To unix:PATH or HOST:PORT. Raises Unwell."""
    host, _, port = place.rpartition(":")
    try:
        return connected(f"{EVERYWHERE[host]}:{port}" if host in EVERYWHERE else place, PATIENCE)
    except (OSError, ValueError) as error:
        raise Unwell(f"{place}: {error}") from error


def _setting(name: str, flags: Sequence[str], environment: Mapping[str, str]) -> str:
    """Its text; empty where it has none."""
    given = _given(flags, name)[name]
    return given or environment.get(ENVIRONMENT_PREFIX + name.upper()) or str(settings()[name][0].default or "")


def _given(flags: Sequence[str], *names: str) -> dict[str, str | None]:
    """The texts of these flags; None where one is not there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument("--" + name.replace("_", "-"))
    return dict(vars(parser.parse_known_args(flags)[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
