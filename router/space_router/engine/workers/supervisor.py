"""A worker process that this router starts and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from space_common.python_process import safe_environment

from space_router.engine.workers.backoff import Backoff
from space_router.engine.workers.exit_cause import ExitCause, cause_of_end, cause_of_silence, count_oom_kills

logger = logging.getLogger(__name__)

KEPT_LINES = 40  # of the worker's stderr
GRACE = 5.0  # seconds
INQUEST_SECONDS = 1.0  # seconds that a process may take to end after its connection has


class WorkerDidNotStart(Exception):
    """The process ended, or timed out, before it was ready; the message has the end of its stderr."""


class Supervisor:
    """Starts one worker process on its own Unix socket, restarts it on request, and ends it.

        async with Supervisor(command, name="worker 0", start_timeout=600.0) as supervisor:
            address = await supervisor.start()
            ...
            address = await supervisor.start()   # restarts it

    The socket is in a folder that only this user can enter. Leaving the block ends the process and its children (it
    leads a process group).
    """

    def __init__(
        self, command: Callable[[str], Sequence[str]], *, name: str, start_timeout: float, grace: float = GRACE
    ) -> None:
        """`command`: returns the argument list for an address. The process must print `ready ADDRESS` when it listens,
        and may print `busy WHY` before, which restarts the timeout.
        `start_timeout`: seconds until `ready`; `grace`: seconds from SIGTERM to SIGKILL.
        """
        self.name = name
        self.credentials: grpc.ChannelCredentials | None = None  # no TLS: only this user can reach the socket
        self._grace = grace
        self.num_starts = 0
        self._command = command
        self._start_timeout = start_timeout
        self._last_busy = 0.0  # time of the process's start or of its last `busy` line
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._last_words: deque[str] = deque(maxlen=KEPT_LINES)
        self._backoff = Backoff()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_oom_kills: int | None = None  # of the machine when the process was started

    @property
    def pid(self) -> int | None:
        """Id of the process while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def __aenter__(self) -> Supervisor:
        self._folder = tempfile.TemporaryDirectory(prefix="spaceserve-")  # mode 0700
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            if self._folder is not None:
                self._folder.cleanup()

    async def start(self) -> str:
        """Kill the running process if any, wait for the backoff, start a new one and return its address once ready.

        Raises WorkerDidNotStart if it ends or times out before it is ready.
        """
        await self._end(0.0)  # it is lost, so it needs no time to finish
        if self._folder is None:
            raise RuntimeError("Supervisor.start is called outside its `async with` block")
        await asyncio.sleep(self._backoff.next())
        self.num_starts += 1
        socket = Path(self._folder.name) / f"{self.num_starts}.sock"
        self._last_words.clear()
        self._num_oom_kills = count_oom_kills()
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command(f"unix:{socket}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=safe_environment(),
            start_new_session=True,  # Ctrl-C must reach only the router, which then drains
        )
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._readers = [
            asyncio.create_task(self._read_stdout(process, ready)),
            asyncio.create_task(self._read_stderr(process)),
        ]
        ended = asyncio.create_task(process.wait())
        try:
            first: set[asyncio.Future[Any]] = {ready, ended}
            clock = asyncio.get_running_loop().time
            self._last_busy = clock()
            while not (ready.done() or ended.done()) and (left := self._last_busy + self._start_timeout - clock()) > 0:
                await asyncio.wait(first, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            code = process.returncode
            if code is not None:  # its last lines may still be in the pipe
                await asyncio.wait(self._readers, timeout=1.0)
            await self.stop()
            raise WorkerDidNotStart(self._start_failure(code))
        finally:
            ended.cancel()
            ready.cancel()

    def reset_backoff(self) -> None:
        """Restart the worker without delay if it is lost now, because it has worked."""
        self._backoff.worked()

    async def ended(self) -> None:
        """Wait until the current process has ended."""
        if self._process is not None:
            await self._process.wait()

    async def find_exit_cause(self) -> ExitCause:
        """Return why the process was lost, after its connection has ended or fallen silent."""
        process = self._process
        if process is None:
            return ExitCause.CRASHED
        if process.returncode is None:
            cause = cause_of_silence(process.pid)
            if cause is ExitCause.EXTERNAL:
                return cause
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), INQUEST_SECONDS)
        if process.returncode is None:
            return ExitCause.CRASHED
        return cause_of_end(process.returncode, num_oom_kills=(self._num_oom_kills, count_oom_kills()))

    async def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after the grace period, to the whole process group."""
        await self._end(self._grace)

    async def _end(self, grace: float) -> None:
        """End the process group; with `grace` 0 there is no SIGTERM."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None and grace:
                _signal(process.pid, signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), grace)
                except TimeoutError:
                    logger.warning("%s did not end within %g s of SIGTERM: it is killed", self.name, grace)
            _signal(process.pid, signal.SIGKILL)  # the rest of its group, and itself if it still runs
            await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._readers = []

    async def _read_stdout(self, process: asyncio.subprocess.Process, ready: asyncio.Future[str]) -> None:
        async for line in _lines(process.stdout):
            if line.startswith("ready ") and not ready.done():
                ready.set_result(line.removeprefix("ready ").strip())
            else:
                if line.startswith("busy "):  # for example a download, which does not count as start time
                    self._last_busy = asyncio.get_running_loop().time()
                logger.info("%s: %s", self.name, line.removeprefix("busy "))

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        async for line in _lines(process.stderr):
            self._last_words.append(line)
            with contextlib.suppress(OSError):  # e.g. a full disk; reading must go on, or the worker blocks on its pipe
                sys.stderr.write(f"{self.name}: {line}\n")

    def _start_failure(self, code: int | None) -> str:
        how = (
            f"was not ready within {self._start_timeout:g} s"
            if code is None
            else f"ended with code {code} before it was ready"
        )
        words = "\n".join(f"    {line}" for line in self._last_words) or "    (nothing)"
        return f"{self.name} {how}. Its last words:\n{words}"


def _signal(group: int, number: signal.Signals) -> None:
    """Signal every process of a group; no error if none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


async def _lines(pipe: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Yield lines of any length until the pipe closes."""
    rest = b""
    while pipe is not None and (chunk := await pipe.read(65536)):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
