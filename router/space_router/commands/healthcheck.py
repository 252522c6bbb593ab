"""The container health check, run by Docker as `entrypoint.py healthcheck`.

The address is taken from the command line of the container's first process and from the environment, or from arguments
such as `entrypoint.py healthcheck router --port 9000`.
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

from space_common.process import say

from space_router.commands.programs import PROGRAMS
from space_router.config import ENVIRONMENT_PREFIX, LISTENING, settings
from space_router.foreign_flags.command_line import translate
from space_router.http_server.listening import UNIX, connected

PATIENCE = 4.0  # seconds; Docker's timeout is 5
EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
"""Address to ask if the server listens on all addresses."""
OWN = ("spaceserve", "entrypoint.py")  # scripts that take a subcommand of `spaceserve` first


class Unwell(Exception):
    """The server does not answer or is not ready."""


def main(words: Sequence[str], environment: Mapping[str, str], first: Path = Path("/proc/1/cmdline")) -> int:
    """Return the exit code: 0 if the server is ready or none was started, else 1.

    `words`: a subcommand and its flags; empty: those of the process whose command line is in `first`.
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
    """Return the subcommand that a command line starts, and its flags; empty if none.

    It may follow an interpreter, or the init of `docker run --init`.
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
    """Check that a router is ready. Raises Unwell, OSError or HTTPException.

    The certificate is not verified, because it has the server's public name.
    """
    translated = translate(flags, environment, [*settings()], ("--help", "-h"))
    flags, environment = translated.arguments, translated.environment
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
    """Check that a worker listens, which it does once its weights are loaded. Raises Unwell or OSError.

    Nothing is sent: a session would take the worker from its router.
    """
    if (listen := _given(flags, "listen")) is None:
        raise Unwell("the worker was given no --listen")
    _connected(listen).close()


def _connected(place: str) -> socket.socket:
    """Connect to unix:PATH or HOST:PORT. Raises Unwell."""
    host, _, port = place.rpartition(":")
    try:
        return connected(f"{EVERYWHERE[host]}:{port}" if host in EVERYWHERE else place, PATIENCE)
    except (OSError, ValueError) as error:
        raise Unwell(f"{place}: {error}") from error


def _setting(name: str, flags: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a setting's text; empty if it has none."""
    variable = environment.get(ENVIRONMENT_PREFIX + name.upper())
    drop_in = _given(flags, "drop_in") or environment.get(f"{ENVIRONMENT_PREFIX}DROP_IN", "")
    default = LISTENING.get(drop_in, {}).get(name, settings()[name][0].default)
    return _given(flags, name) or variable or str(default or "")


def _given(flags: Sequence[str], name: str) -> str | None:
    """Return the text of a flag, or None if it is absent."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--" + name.replace("_", "-"), dest="value")
    value: str | None = parser.parse_known_args(flags)[0].value
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
