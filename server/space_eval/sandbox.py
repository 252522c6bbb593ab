"""Run an untrusted Python program: bounded in time, memory, files and output, without network, and kill what is left.

What keeps it inside, each where the system has it (an outcome says which were in effect):

    namespace  a network of its own without any device, processes of its own, no rights over the user's (Linux)
    seccomp    the kernel refuses sockets, new processes, exec, and signals to others (Linux on x86-64 and AArch64)
    landlock   the kernel refuses writing outside the program's folder and reading anything personal (Linux 5.13+)
    audit      the interpreter refuses the same; stands in where seccomp or landlock is missing, and is weaker

A pass is a random word that only the end of the program can say: leaving early never passes. The word lives in the
program's process; a program that searches the frames of its interpreter for it could forge it. Models write no such
programs by chance; do not use this against people.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

_CHILD = Path(__file__).with_name("sandbox_child.py")
_VERDICT_BYTES = 1 << 16


class End(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    FAILED = "failed"  # an assertion, an exception, an early exit
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"  # by a signal: a crash, or the system


class Guard(StrEnum):
    """What keeps a program inside; see the module's text."""

    NAMESPACE = "namespace"
    SECCOMP = "seccomp"
    LANDLOCK = "landlock"
    AUDIT = "audit"


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0  # by the clock: tests of HumanEval take milliseconds, a busy machine some more
    cpu_seconds: int | None = None  # of the processor; None: `seconds`, rounded up
    memory: int = 1 << 30  # bytes of address space: the interpreter itself takes about 30 MB
    file_bytes: int = 1 << 20  # of one file
    output_bytes: int = 4096  # kept of stdout and stderr; the rest is read and dropped


@dataclass(frozen=True)
class Outcome:
    """How a program ended, and why."""

    end: End
    detail: str  # the exception, the signal or the limit; "" for a pass
    seconds: float  # by the clock, the start of the interpreter included
    output: str  # the beginning of stdout and stderr
    guards: tuple[Guard, ...]  # in effect

    @property
    def passed(self) -> bool:
        return self.end is End.PASSED


def run_program(program: str, limits: Limits | None = None, guards: Collection[Guard] = tuple(Guard)) -> Outcome:
    """Run `program` in a process of its own. It passes if it runs to its last line."""
    bounds = limits or Limits()
    sentinel = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="spaceserve-", ignore_cleanup_errors=True) as folder:
        order = {
            "program": program,
            "sentinel": sentinel,
            "folder": os.path.realpath(folder),
            "cpu_seconds": math.ceil(bounds.seconds) if bounds.cpu_seconds is None else bounds.cpu_seconds,
            "memory": bounds.memory,
            "file_bytes": bounds.file_bytes,
            "guards": list(guards),
        }
        return _run(order, sentinel, bounds)


def _run(order: dict[str, Any], sentinel: str, bounds: Limits) -> Outcome:
    started = time.monotonic()
    deadline = started + bounds.seconds
    with _pipe() as (verdict, verdict_end), _pipe() as (output, output_end):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=output_end,
            stderr=output_end,
            cwd=order["folder"],
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": order["folder"], "TMPDIR": order["folder"]},
            pass_fds=(verdict_end.fileno(),),
            start_new_session=True,
        )
        try:
            words = json.dumps({**order, "verdict_fd": verdict_end.fileno()}).encode()
            verdict_end.close()
            output_end.close()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # an interpreter that does not start
                stdin.write(words)
            said, text = _listen(process, verdict.fileno(), output.fileno(), deadline, bounds.output_bytes)
            late = False
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late, status = True, 0
        finally:
            _kill(process)
    seconds = time.monotonic() - started
    end, detail, in_effect = _judge(said, sentinel, status, late=late, bounds=bounds)
    return Outcome(end, detail, seconds, text.decode(errors="replace"), in_effect)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Both ends of a pipe, closed at the end of the block if not before."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "wb", buffering=0) as writer:
        yield reader, writer


def _listen(
    process: subprocess.Popen[bytes], verdict_fd: int, output_fd: int, deadline: float, most: int
) -> tuple[bytes, bytes]:
    """Both pipes until they end, the process ends or the deadline: what was said about the verdict, and the output."""
    kept = {verdict_fd: bytearray(), output_fd: bytearray()}
    bound = {verdict_fd: _VERDICT_BYTES, output_fd: most}
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            selector.register(fd, selectors.EVENT_READ)
        ended = False
        while selector.get_map() and not (ended and not selector.select(0)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(min(left, 0.1)):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                kept[key.fd] += chunk[: bound[key.fd] - len(kept[key.fd])]
            ended = process.poll() is not None
    return bytes(kept[verdict_fd]), bytes(kept[output_fd])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The guard and the program: they are one process group; a group that is gone is well."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _judge(
    said: bytes, sentinel: str, status: int, *, late: bool, bounds: Limits
) -> tuple[End, str, tuple[Guard, ...]]:
    """From what the program's process said and how it ended."""
    lines = [words for line in said.splitlines() if isinstance(words := _parsed(line), dict)]
    in_effect = tuple(Guard(name) for name in lines[0].get("guards", ())) if lines else ()
    last = lines[-1] if lines else {}
    if late:
        return End.TIMED_OUT, f"more than {bounds.seconds:g} s", in_effect
    if status == 128 + signal.SIGXCPU:
        return End.TIMED_OUT, f"more than {bounds.cpu_seconds or math.ceil(bounds.seconds)} s of processor", in_effect
    if any(secrets.compare_digest(str(words.get("sentinel", "")).encode(), sentinel.encode()) for words in lines):
        return End.PASSED, "", in_effect
    if last.get("end") == End.OUT_OF_MEMORY:
        return End.OUT_OF_MEMORY, f"more than {bounds.memory >> 20} MiB", in_effect
    if last.get("end") == End.FAILED:
        return End.FAILED, str(last.get("detail", "")), in_effect
    if status > 128:
        return End.KILLED, _signal_name(status - 128), in_effect
    return End.FAILED, f"left before the tests were through: status {status}", in_effect


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
