"""Runs `spaceserve serve` as a local process on a free port, stopped at the end of a scope."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from space_common.process import ModuleProcess, children, command_line, module_command

STOP_SECONDS = 60.0  # from SIGTERM to SIGKILL: longer than a server may need to drain and stop its workers


class ServerError(RuntimeError):
    """The server failed to start or to exit cleanly; the message has its last output."""


class ServerProcess(ModuleProcess):
    """`spaceserve serve`: entering waits until it is ready; leaving sends SIGTERM and requires exit code 0.

    with ServerProcess(["--model", "demo"]) as server:
        ... http requests to server.url ...
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 600.0,
        wait_ready: bool = True,
    ) -> None:
        """`flags` of `serve`; a free port is chosen unless they or `environment` (added to this process's) name one."""
        free_port = [] if "--port" in flags or "SPACESERVE_PORT" in (environment or {}) else ["--port", "0"]
        super().__init__(module_command("space_router", "serve", *flags, *free_port), environment)
        self.url = ""  # http://host:port, once it listens
        self.grpc_address = ""  # host:port, once it listens there, with --grpc-port
        self._start_seconds = start_seconds
        self._wait_ready = wait_ready

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
            if self._wait_ready:
                self.wait_ready()
        except BaseException:
            if self._process is not None:
                self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.code is not None:
            self.kill()
            return
        code = self.stop()
        if code != 0 and error is None:
            raise ServerError(f"The server ended with code {code} after SIGTERM.\n{self.last_words()}")

    def worker_pids(self) -> list[int]:
        """Return the router's live child processes, oldest first (Linux)."""
        return [pid for pid in children(self.pid) if b"space_server" in command_line(pid)]

    def last_words(self) -> str:
        return self.last_lines() or "    (nothing)"

    def read_line(self, pipe: str, line: str) -> None:
        self.lines.append(line)
        if line.startswith("spaceserve: listening on "):
            self.url = line.split()[3]
        elif line.startswith("spaceserve: gRPC on "):
            self.grpc_address = line.split()[3]
        self._ready = self._ready or line.startswith("spaceserve: ready: ")

    def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ServerError if the process exits or times out before."""
        if self.is_ready_within(self._start_seconds):
            return
        if not self.has_output():  # its pipes close slightly before it exits
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        code = self.code
        how = f"was not ready within {self._start_seconds:g} s" if code is None else f"ended with code {code}"
        raise ServerError(f"The server {how}. It said:\n{self.last_words()}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the exit code. Raises ServerError on timeout."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ServerError(f"The server has not ended within {seconds:g} s.\n{self.last_words()}") from None
        self.close()
        return code

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        if self.code is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait()
        except ServerError:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the router; its workers notice and exit."""
        if self.code is None:
            self.process.kill()
        self.process.wait()
        self.close()


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the program's scopes, and so stop its servers. Call before starting servers."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
