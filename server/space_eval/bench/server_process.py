"""Runs `spaceserve serve` as a local process on a free port, stopped at the end of a scope."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from space_common.process import module_command, safe_environment

STOP_SECONDS = 60.0
"""From SIGTERM to SIGKILL: longer than a server may need to drain and stop its workers."""


class ServerError(RuntimeError):
    """The server failed to start or to exit cleanly; the message has its last output."""


class ServerProcess:
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
        environment = dict(environment or {})
        free_port = [] if "--port" in flags or "SPACESERVE_PORT" in environment else ["--port", "0"]
        self.url = ""  # http://host:port, once it listens
        self.grpc_address = ""  # host:port, once it listens there, with --grpc-port
        self.lines: collections.deque[str] = collections.deque(maxlen=400)  # its last output, from both pipes
        self._command = module_command("space_router", "serve", *flags, *free_port)
        self._environment = safe_environment(environment)
        self._start_seconds = start_seconds
        self._wait_ready = wait_ready
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._news = threading.Condition()
        self._ready = False

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

    @property
    def process(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ServerError("The server has not been started: use it in a `with` block.")
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the router."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code of the router; None while it runs."""
        return self.process.poll()

    def worker_pids(self) -> list[int]:
        """Return the router's live child processes, oldest first (Linux)."""
        return [pid for pid in children(self.pid) if b"space_server" in _command_line(pid)]

    def last_words(self) -> str:
        with self._news:
            return "\n".join(f"    {line}" for line in self.lines) or "    (nothing)"

    def start(self) -> None:
        """Start without waiting, in a new process group, so that Ctrl-C does not reach the server."""
        with _unbroken():
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._readers = [
                threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("stdout", "stderr")
            ]
            for reader in self._readers:
                reader.start()

    def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ServerError if the process exits or times out before."""
        with self._news:
            self._news.wait_for(lambda: self._ready or not self._alive(), self._start_seconds)
            if self._ready:
                return
        if not self._alive():  # its pipes close slightly before it exits
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
        self._close()
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
        self._close()

    def _alive(self) -> bool:
        return any(reader.is_alive() for reader in self._readers if reader is not threading.current_thread())

    def _read(self, name: str) -> None:
        pipe = self.process.stdout if name == "stdout" else self.process.stderr
        for line in pipe or ():
            with self._news:
                self.lines.append(line.rstrip("\n"))
                if line.startswith("spaceserve: listening on "):
                    self.url = line.split()[3]
                elif line.startswith("spaceserve: gRPC on "):
                    self.grpc_address = line.split()[3]
                self._ready = self._ready or line.startswith("spaceserve: ready: ")
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _close(self) -> None:
        for reader in self._readers:
            reader.join(5.0)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def _unbroken() -> Iterator[None]:
    """Delay signals that raise an exception until after the block, so that no started process is left untracked. A
    signal mask would be inherited by that process.
    """
    if threading.current_thread() is not threading.main_thread():  # signal handlers run only in the main thread
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in ours:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    for came in arrived:
        signal.raise_signal(came)


def unwind_when_told_to_end() -> None:
    """Make SIGTERM unwind the program's scopes, and so stop its servers. Call before starting servers."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def children(pid: int) -> list[int]:
    """Return the child processes of `pid`, by number (Linux; empty elsewhere)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(entry)
        if len(fields) > 1 and fields[1] == str(pid) and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return sorted(found)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, all threads (Linux; 0 elsewhere, or if it is gone)."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def _stat(path: Path) -> list[str]:
    """Return the fields after the name, which may contain any character: state, parent, ..."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
