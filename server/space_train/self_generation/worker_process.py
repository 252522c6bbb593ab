"""A private worker process: started, its output read, and always terminated."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from space_common.python_process import module_command, safe_environment

from space_train.self_generation.own_text_file import OwnTextError

KEPT_LINES = 20  # lines kept of the worker's output
GRACE = 5.0  # seconds from SIGTERM to SIGKILL


class WorkerError(OwnTextError):
    """The worker failed; the message has its last output."""


class TrainingWorkerDidNotStart(WorkerError):
    """The process exited or timed out before it listened: the checkpoint or the machine is unsuitable."""


class WorkerLost(WorkerError):
    """The process died, stopped reporting or closed the stream during generation."""


class WorkerProcess:
    """`python -m space_server` on a socket that only this user can reach. Leaving the block terminates it.

    with WorkerProcess({"--model": "demo"}) as process:
        process.address
    """

    def __init__(
        self, flags: Mapping[str, object], *, start_timeout: float = 1800.0, module: str = "space_server"
    ) -> None:
        """`flags`: of `python -m space_server`, without the listen address. `start_timeout`: seconds to load the model.
        `module`: the module to run instead.
        """
        self.address = ""
        self._command = module_command(module)
        self._flags, self._start_timeout = dict(flags), start_timeout
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
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

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

    def _start(self) -> None:
        listen = f"unix:{Path(self._folder.name) / 'worker.sock'}"
        flags = {**self._flags, "--listen": listen, "--parent-pid": os.getpid()}
        process = self._process = subprocess.Popen(
            [*self._command, *(str(word) for flag in flags.items() for word in flag)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=safe_environment(),
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
            raise TrainingWorkerDidNotStart(
                self.obituary(f"The worker was not ready{late}", 2.0 if self._ended else 0.0)
            )

    def _stop(self) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                process.terminate()
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    pass
                finally:
                    _kill_group(process.pid)  # the worker, if it still runs, and its children
                    process.wait()
                for reader in self._readers:
                    reader.join()
                for pipe in (process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()
        finally:
            self._folder.cleanup()

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
            if line.strip():
                self._last_words.append(line.rstrip())


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
