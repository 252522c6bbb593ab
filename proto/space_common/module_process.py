"""A child process that runs a Python module of ours, whose output is read line by line; and what /proc says of one."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from space_common.process import safe_environment


class ModuleProcess:
    """A child process; a subclass learns from its output, in `read_line`, when it is ready."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, kept: int = 400
    ) -> None:
        """`environment` is added to this process's. `kept`: lines kept of the output."""
        self.lines: collections.deque[str] = collections.deque(maxlen=kept)
        self._command = list(command)
        self._environment = safe_environment(environment)
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._news = threading.Condition()
        self._ready = False

    @property
    def process(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("The process has not been started: use it in a `with` block.")
        return self._process

    @property
    def pid(self) -> int:
        """The process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    def last_lines(self) -> str:
        """Return the kept output, indented."""
        with self._news:
            return "\n".join(f"    {line}" for line in self.lines)

    def start(self) -> None:
        """Start without waiting, in a new process group, so that Ctrl-C does not reach it."""
        with _unbroken():
            process = self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                if pipe is not None:
                    self._readers.append(threading.Thread(target=self._read, args=(name, pipe), daemon=True))
            for reader in self._readers:
                reader.start()

    def read_line(self, pipe: str, line: str) -> None:
        """Take a line of `pipe` (stdout or stderr); set `self._ready` where it says so. Called under `self._news`."""
        self.lines.append(line)

    def is_ready_within(self, seconds: float) -> bool:
        """Wait until it is ready; False if its output ends before, or after `seconds`."""
        with self._news:
            self._news.wait_for(lambda: self._ready or not self.has_output(), seconds)
            return self._ready

    def has_output(self) -> bool:
        """Whether more output may come."""
        return any(reader.is_alive() for reader in self._readers if reader is not threading.current_thread())

    def close(self) -> None:
        """Read the output of the ended process to its end."""
        for reader in self._readers:
            reader.join(5.0)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self, name: str, pipe: IO[str]) -> None:
        for line in pipe:
            with self._news:
                self.read_line(name, line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


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


def command_line(pid: int) -> bytes:
    """Return the words of a process's command, each ended by a zero byte (Linux; empty elsewhere)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
