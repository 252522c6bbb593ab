"""A private worker process: started, its output read, and always terminated."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from space_common.module_process import ModuleProcess
from space_common.process import module_command

KEPT_LINES = 20  # lines kept of the worker's output
GRACE = 5.0  # seconds from SIGTERM to SIGKILL


class WorkerError(RuntimeError):
    """The worker failed; the message has its last output."""


class WorkerNotReady(WorkerError):
    """The process exited or timed out before it listened: the checkpoint or the machine is unsuitable."""


class WorkerLost(WorkerError):
    """The process died, stopped reporting, refused the client or closed the stream."""


class WorkerProcess(ModuleProcess):
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
        self._folder = tempfile.TemporaryDirectory(prefix="spaceserve-")  # mode 0700
        listen = f"unix:{Path(self._folder.name) / 'worker.sock'}"
        command = [*module_command(module), *flags, "--listen", listen, "--parent-pid", str(os.getpid())]
        super().__init__(command, environment, kept=KEPT_LINES)
        self.address = ""
        self._start_timeout, self._on_line = start_timeout, on_line

    def __enter__(self) -> WorkerProcess:
        try:
            self.start()
            if not self.is_ready_within(self._start_timeout):
                ended = not self.has_output()
                late = "" if ended else f" within {self._start_timeout:g} s"
                raise WorkerNotReady(self.obituary(f"The worker was not ready{late}", 2.0 if ended else 0.0))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def read_line(self, pipe: str, line: str) -> None:
        if pipe == "stdout":
            if line.startswith("ready "):
                self.address, self._ready = line.split()[1], True
            return
        if self._on_line is not None:
            self._on_line(f"{line}\n")
        if line.strip():
            self.lines.append(line)

    def obituary(self, what: str, patience: float = 2.0) -> str:
        """Return `what`, the exit status if the process ends within `patience` seconds, and its last lines."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(patience)
                for reader in self._readers:
                    reader.join(1.0)  # its last output may still be in the pipe
                how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
                what = f"{what}: {how}"
        lines = self.last_lines()
        return f"{what}. It said last:" + (f"\n{lines}" if lines else " (nothing)")

    def stop(self, grace: float = GRACE) -> int:
        """Send SIGTERM, after `grace` seconds SIGKILL; return the exit status (0 if there is no process)."""
        process = self._process
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
            self.close()
            self._process = None
            self._folder.cleanup()
        return process.returncode
