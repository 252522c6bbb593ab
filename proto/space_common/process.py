"""Processes of this project: environment, log lines, garbage collection; a child process of ours and its output."""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

SAFE_PATH = "PYTHONSAFEPATH"


def module_command(module: str, *words: object) -> list[str]:
    """Return the command `python -m module words` of this interpreter.

    `python -m` puts the current folder first on the path, so that a `json.py` or `torch.py` there would run in place of
    the real module. `-P` omits the folder; the folders of PYTHONPATH stay.
    """
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def safe_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment for a subprocess, with the variables `added`.

    PYTHONSAFEPATH does for the subprocess's own children what `-P` does for it.
    """
    return {**os.environ, **(added or {}), SAFE_PATH: "1"}


def sleep_soon(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP threads sleep after some 1.3 ms of waiting, unless the environment sets how they wait.

    By default they spin for 20 ms, which on a shared machine uses up most of their time slice. OpenMP reads this when
    it is loaded, so call it before importing torch. With a shorter time they would sleep between two of torch's
    operations on a quiet machine, which took a third of the rate at 16 sequences in float32.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "20000")


_NEW_OBJECTS = 50_000
"""Net new objects before a collection. Steps and events create no cycles, so reference counting frees what they
allocate."""


def collect_seldom() -> None:
    """Exclude all current objects from garbage collection, and collect new ones seldom.

    A step of many sequences, or the events of many streams, allocates more objects than Python's default threshold, so
    each would trigger a collection. Measured with 1,000 streams: a ninth of the router's time, in pauses.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extensions report frozen objects as leaks and print lists of them
    gc.set_threshold(_NEW_OBJECTS, 20, 50)


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"}, plus "exception" if any, and "trace_id" and "span_id" within a span."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        trace = sys.modules.get("opentelemetry.trace")  # loaded only if there may be spans
        if trace is not None and (context := trace.get_current_span().get_span_context()).is_valid:
            line["trace_id"], line["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str) -> None:
    """Log this process's messages from `level` on to stderr. `form`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def logs_json() -> bool:
    """Whether this process's log is JSON, one object a line."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def report_error(program: str, message: str) -> None:
    """Write why a program ends to stderr: `program: message`, or as a line of a JSON log."""
    _write_error(f"{program}: {message}", logging.LogRecord(program, logging.ERROR, "", 0, message, None, None))


def forward_stderr(name: str, line: str) -> None:
    """Pass on a line that the process called `name` wrote to its stderr; in a JSON log as an object with its name."""
    if logs_json():
        with contextlib.suppress(ValueError):
            if isinstance(entry := json.loads(line), dict):
                _write_error(json.dumps({**entry, "process": name}, ensure_ascii=False), None)
                return
    _write_error(f"{name}: {line}", logging.LogRecord(name, logging.WARNING, "", 0, line, None, None))


def _write_error(text: str, record: logging.LogRecord | None) -> None:
    """Write the text, or in a JSON log the record, to stderr; write errors are ignored."""
    if record is not None and logs_json():
        text = JsonLines().format(record)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def quieten_grpc(*, logs_json: bool) -> None:
    """Keep the C++ part of gRPC from writing to stderr about forks and, where the log is JSON, at all.

    It reads these variables when it is imported. What it would write is in the errors that it raises, too.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # children are started by exec alone
    if logs_json:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def say(line: str) -> None:
    """Write and flush one line to stdout; write errors, as of a full disk or a closed pipe, are ignored."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def drop_unwritable_output() -> None:
    """Drop output that cannot be written before exit; Python would turn the error into an exit code."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError, AttributeError):
            setattr(sys, name, None)


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
    try:
        with os.scandir("/proc") as entries:
            processes = [int(entry.name) for entry in entries if entry.name.isdigit()]
    except OSError:
        return []
    parent = str(pid)
    return sorted(each for each in processes if (fields := _stat(each))[1:2] == [parent] and fields[0] != "Z")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, all threads (Linux; 0 elsewhere, or if it is gone)."""
    fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields after the name, which may contain any character: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return []


def command_line(pid: int) -> bytes:
    """Return the words of a process's command, each ended by a zero byte (Linux; empty elsewhere)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


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

    def __exit__(self, *error: object) -> None:
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

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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


_CHUNK = 1 << 18  # bytes of one read


class PipedProcess:
    """Sends bytes to a process and reads its answers. The process ends with this object."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`environment`: of the process; None: this process's."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
            start_new_session=True,  # Ctrl-C must reach only the server, which ends this process
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("The process has no pipes.")
        self._asked, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._asked, False)
        self._received = bytearray()
        self.close = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes, seconds: float) -> bool:
        """Return whether all of it was written within `seconds`. If not, the process can only be closed."""
        deadline = time.monotonic() + seconds
        rest = memoryview(message)
        while rest:
            if not _ready(self._asked, select.POLLOUT, deadline):
                return False
            try:
                rest = rest[os.write(self._asked, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def receive(self, whole: Callable[[bytearray], int], seconds: float) -> bytes | None:
        """Return the next message, or None if it is not there within `seconds`; it can be waited for again.

        `whole`: the length of the first message in what was received, 0 if it is not complete. Raises EOFError if the
        process has ended.
        """
        deadline = time.monotonic() + seconds
        while not (size := whole(self._received)):
            if not _ready(self._answers, select.POLLIN, deadline):
                return None
            piece = os.read(self._answers, _CHUNK)
            if not piece:
                raise EOFError("The process has ended.")
            self._received += piece
        message = bytes(self._received[:size])
        del self._received[:size]
        return message


def _ready(pipe: int, event: int, deadline: float) -> bool:
    """Return whether the pipe becomes usable or breaks before `deadline`.

    Uses poll, because select does not support descriptors from 1024 on.
    """
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # flushing fails, because the reader has ended
                pipe.close()
