"""A private worker process: started, its output read, and always terminated."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from space_common.process import module_command, safe_environment

KEPT_LINES = 20  # lines kept of the worker's output
GRACE = 5.0  # seconds from SIGTERM to SIGKILL


class WorkerError(RuntimeError):
    """The worker failed; the message has its last output."""


class WorkerNotReady(WorkerError):
    """The process exited or timed out before it listened: the checkpoint or the machine is unsuitable."""


class WorkerLost(WorkerError):
    """The process died, stopped reporting, refused the client or closed the stream."""


class WorkerProcess:
    """`python -m space_server` on a socket that only this user can reach. Leaving the block terminates it.

    with WorkerProcess(["--model", "demo"]) as process:
        process.address
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        start_timeout: float = 1800.0,
        module: str = "space_server",
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], object] | None = None,
    ) -> None:
        """`flags`: of `python -m space_server`, without the listen address. `start_timeout`: seconds to load the model.
        `module`: the module to run instead; `environment`: added to this process's; `on_line`: called with each line
        of its log, in another thread.
        """
        self.address = ""
        self._command = [*module_command(module), *flags]
        self._start_timeout, self._environment, self._on_line = start_timeout, environment, on_line
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._news = threading.Condition()
        self._ended = False  # stdout is at its end  (under _news)
        self._last_words: deque[str] = deque(maxlen=KEPT_LINES)
        self._folder = tempfile.TemporaryDirectory(prefix="spaceserve-")  # mode 0700

    @property
    def pid(self) -> int:
        """The process id; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def __enter__(self) -> WorkerProcess:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def obituary(self, what: str, patience: float = 2.0) -> str:
        """Return `what`, the exit status if the process ends within `patience` seconds, and its last lines."""
        process = self._process
        code: int | None = None
        if process is not None:
            try:
                code = process.wait(patience)
            except subprocess.TimeoutExpired:
                pass
            else:
                for reader in self._readers:
                    reader.join(1.0)  # its last output may still be in the pipe
        if code is not None:
            how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
            what = f"{what}: {how}"
        lines = "".join(f"\n    {line}" for line in self._last_words)
        return f"{what}. It said last:{lines or ' (nothing)'}"

    def stop(self, grace: float = GRACE) -> int:
        """Send SIGTERM, after `grace` seconds SIGKILL; return the exit status (0 if there is no process)."""
        process, self._process = self._process, None
        if process is None:
            self._folder.cleanup()
            return 0
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the worker, if it still runs, and its children
            process.wait()
            for reader in self._readers:
                reader.join()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            self._folder.cleanup()
        return process.returncode

    def _start(self) -> None:
        listen = f"unix:{Path(self._folder.name) / 'worker.sock'}"
        process = self._process = subprocess.Popen(
            [*self._command, "--listen", listen, "--parent-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=safe_environment(self._environment),
            start_new_session=True,  # Ctrl-C reaches only this process, which then terminates the worker
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        with self._news:
            self._news.wait_for(lambda: self.address or self._ended, self._start_timeout)
        if not self.address:
            late = "" if self._ended else f" within {self._start_timeout:g} s"
            raise WorkerNotReady(self.obituary(f"The worker was not ready{late}", 2.0 if self._ended else 0.0))

    def _read_stdout(self, pipe: IO[str]) -> None:
        for line in pipe:
            if line.startswith("ready "):
                with self._news:
                    self.address = line.split()[1]
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _read_stderr(self, pipe: IO[str]) -> None:
        for line in pipe:
            if self._on_line is not None:
                self._on_line(line)
            if line.strip():
                self._last_words.append(line.rstrip())
