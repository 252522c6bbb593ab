"""The sources of workers: processes that this router starts and restarts, and addresses of remote ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path
from typing import Any

import grpc
from space_common.certificate import CertificateFiles
from space_common.process import forward_stderr, module_command, safe_environment
from space_common.visible_gpus import VISIBLE, gpus_of
from space_common.worker.secret import SecretFile
from space_common.worker.settings import worker_argv

from space_router.config import ServeConfig

FIRST_BACKOFF = 0.1  # seconds
LAST_BACKOFF = 5.0


class Backoff:
    """0, then 0.1 s doubling to 5 s, until something `worked`."""

    def __init__(self) -> None:
        self._next = 0.0

    def next(self) -> float:
        """Return the seconds to wait now; the next wait is longer."""
        now, self._next = self._next, min(LAST_BACKOFF, max(FIRST_BACKOFF, 2 * self._next))
        return now

    def worked(self) -> None:
        self._next = 0.0


TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the process was asked to end


class ExitCause(Enum):
    """Why a worker was lost, as far as the system tells."""

    EXTERNAL = "external"  # killed or stopped from outside: no request caused it
    CRASHED = "crashed"  # it crashed, hung, ran out of memory or violated the protocol
    UNKNOWN = "unknown"  # killed, its machine is off, or it crashed: of a remote worker, or where kills are not counted


def cause_of_end(code: int, *, num_oom_kills: tuple[int | None, int | None]) -> ExitCause:
    """Return the cause for a process that ended with exit code `code` (negative: by that signal).

    SIGKILL comes from another process, or from the kernel when memory runs out; the kernel counts the latter.
    `num_oom_kills`: its count when the process began and now; None if unavailable, and the cause of SIGKILL is unknown.
    """
    if -code in TERMINATION_SIGNALS:
        return ExitCause.EXTERNAL
    if code != -signal.SIGKILL:
        return ExitCause.CRASHED
    before, now = num_oom_kills
    if before is None or now is None:
        return ExitCause.UNKNOWN
    return ExitCause.EXTERNAL if before == now else ExitCause.CRASHED


def cause_of_silence(pid: int, processes: Path = Path("/proc")) -> ExitCause:
    """Return the cause for a process that is alive but silent: EXTERNAL if it was stopped by a signal."""
    try:
        state = (processes / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ExitCause.CRASHED
    return ExitCause.EXTERNAL if state[:1] in (["T"], ["t"]) else ExitCause.CRASHED


def count_oom_kills(statistics: Path = Path("/proc/vmstat")) -> int | None:
    """Return the kernel's count of out-of-memory kills since boot; None if unavailable."""
    try:
        for line in statistics.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


class RemoteWorker:
    """The address of a remote worker; `start` only waits for the backoff."""

    def __init__(
        self, address: str, certificate: CertificateFiles | None = None, secret: SecretFile | None = None
    ) -> None:
        """`certificate`: this router's certificate and the authority it trusts; None: no TLS. `secret`: what the worker
        must prove to know; None: nothing."""
        self._certificate = certificate
        self.secret = secret
        self.name = f"the worker at {address}"
        self.backoff = Backoff()
        self._address = address

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials for the next connection, from the current files; None: no TLS."""
        if self._certificate is None:
            return None
        shown = self._certificate.latest()
        return grpc.ssl_channel_credentials(shown.authority, shown.key, shown.cert)

    async def start(self) -> str:
        await asyncio.sleep(self.backoff.next())
        return self._address

    async def find_exit_cause(self) -> ExitCause:
        return ExitCause.UNKNOWN


logger = logging.getLogger(__name__)

KEPT_LINES = 40  # of the worker's stderr
GRACE = 5.0  # seconds
INQUEST_SECONDS = 1.0  # seconds that a process may take to end after its connection has


class WorkerDidNotStart(Exception):
    """The process ended, or timed out, before it was ready; the message has the end of its stderr."""

    def __init__(self, message: str, summary: str = "") -> None:
        """`summary`: the message without that end, for where all of its stderr is shown already."""
        super().__init__(message)
        self.summary = summary


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
        self,
        command: Callable[[str], Sequence[str]],
        *,
        name: str,
        start_timeout: float,
        grace: float = GRACE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command`: returns the argument list for an address. The process must print `ready ADDRESS` when it listens,
        and may print `busy WHY` before, which restarts the timeout.
        `start_timeout`: seconds until `ready`; `grace`: seconds from SIGTERM to SIGKILL; `environment`: variables that
        it has beside those of this process.
        """
        self._environment = environment or {}
        self.name = name
        self.credentials: grpc.ChannelCredentials | None = None  # no TLS: only this user can reach the socket
        self.secret: SecretFile | None = None  # none either
        self.backoff = Backoff()
        self.num_starts = 0
        self._grace = grace
        self._command = command
        self._start_timeout = start_timeout
        self._last_busy = 0.0  # time of the process's start or of its last `busy` line
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._last_words: deque[str] = deque(maxlen=KEPT_LINES)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_oom_kills: int | None = None  # of the machine when the process was started

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def __aenter__(self) -> Supervisor:
        self._folder = tempfile.TemporaryDirectory(prefix="spaceserve-")  # mode 0700
        return self

    async def __aexit__(self, *_: object) -> None:
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
        await asyncio.sleep(self.backoff.next())
        self.num_starts += 1
        socket = Path(self._folder.name) / f"{self.num_starts}.sock"
        self._last_words.clear()
        self._num_oom_kills = count_oom_kills()
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command(f"unix:{socket}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=safe_environment(self._environment),
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
            raise self._start_failure(code)
        finally:
            ended.cancel()
            ready.cancel()

    async def ended(self) -> None:
        if self._process is not None:
            await self._process.wait()

    async def find_exit_cause(self) -> ExitCause:
        """Return why the process was lost, after its connection has ended or fallen silent."""
        process = self._process
        if process is None:
            return ExitCause.CRASHED
        if process.returncode is None:
            if cause_of_silence(process.pid) is ExitCause.EXTERNAL:
                return ExitCause.EXTERNAL
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
            forward_stderr(self.name, line)  # never raises: reading must go on, or the worker blocks on its pipe

    def _start_failure(self, code: int | None) -> WorkerDidNotStart:
        how = f"was not ready within {self._start_timeout:g} s"
        if code is not None:
            how = f"ended with code {code} before it was ready"
        words = "\n".join(f"    {line}" for line in self._last_words) or "    (nothing)"
        summary = f"{self.name} {how}. Its output is above." if self._last_words else ""
        return WorkerDidNotStart(f"{self.name} {how}. Its last words:\n{words}", summary)


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


def worker_sources(
    config: ServeConfig, worker_argv: Callable[[ServeConfig, str], Sequence[str]]
) -> list[RemoteWorker | Supervisor]:
    """Return remote workers for the config's addresses, else a supervised process for each of its `workers`."""
    if config.worker_address:
        certificate, secret = config.worker_certificate(), config.worker_secret()
        for address in config.unproven_workers():
            logger.warning("%s", unproven(address))
        return [RemoteWorker(address, certificate, secret) for address in config.worker_address]
    return [
        Supervisor(
            lambda address: worker_argv(config, address),
            name=f"worker {number}",
            start_timeout=config.worker_start_timeout,
            environment=_environment_of(number, config),
        )
        for number in range(config.workers)
    ]


def unproven(address: str) -> str:
    """Return what it means that the worker at this address has nothing to prove."""
    return (
        f"The worker at {address} proves nothing to this router, so any process that answers there gets prompts: give "
        "--worker-secret-file here and there, or --worker-tls-ca."
    )


def _environment_of(number: int, config: ServeConfig) -> dict[str, str]:
    """Return the variables that show worker `number` its own GPUs alone; none for a single worker and on a CPU."""
    names = gpus_of(number, config.gpus, config.workers, config.tensor_parallel)
    return {VISIBLE: ",".join(names)} if names else {}


def worker_command(
    config: ServeConfig, address: str, *, module: str = "space_server", secret_file: Path | None = None
) -> list[str]:
    """Return the argument list of `python -m MODULE` with this router's settings, listening on `address`.

    `secret_file`: of an address that other machines reach.
    """
    settings = {
        **vars(config),
        "tls_cert": None,  # the router's own, for its clients
        "tls_key": None,
        "worker_secret_file": secret_file,
        "listen": address,
        "parent_pid": os.getpid(),  # the worker ends when its router is gone
        "num_workers": config.workers,
        "cores": for_workers(config.placement, processors()),
    }
    return module_command(module, *worker_argv(settings))


def processors() -> set[int]:
    """Return the processors this process may run on; empty if unknown."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def for_workers(placement: str, allowed: Set[int]) -> str | None:
    """Return a worker's `--cores` value, or None to leave placement to the system.

    `apart` keeps workers off the last processor, so that the router does not displace a thread that a step waits for;
    `auto` lets the worker decide whether it needs that one. With fewer than two processors the result is None.
    """
    if placement == "shared" or len(allowed) < 2:
        return None
    if placement == "auto":
        return "auto"
    return ",".join(map(str, sorted(allowed)[:-1]))
