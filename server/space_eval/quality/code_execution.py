"""Runs a model-written program in a separate process with bounded time and memory.

This is no sandbox: the program can read, write and send whatever the user can. It runs only with
`--allow-code-execution`.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

FLAG = "--allow-code-execution"

REFUSAL = (
    f"pass@k runs programs that the model writes, with your rights. Give {FLAG} if you accept that: best on a machine "
    "or in a container that holds nothing else."
)


class End(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    FAILED = "failed"  # an assertion, an exception, an early exit
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"  # by a signal: a crash or the system


@dataclass(frozen=True)
class ExecutionLimits:
    """Resource limits of one program."""

    seconds: float = 10.0  # wall clock: HumanEval tests take milliseconds, more on a busy machine
    cpu_seconds: int | None = None  # CPU time; None: `seconds`, rounded up
    memory: int = 1 << 30  # bytes of address space: the interpreter itself takes about 30 MB
    file_bytes: int = 1 << 20  # size limit of one file


@dataclass(frozen=True)
class ExecutionResult:
    """How a program ended, and why."""

    end: End
    detail: str  # the exception, the signal or the limit; "" for a pass
    seconds: float  # wall clock, including the interpreter's start

    @property
    def passed(self) -> bool:
        return self.end is End.PASSED


# A program passes only if it runs to its last line: its process then returns a secret, which an early exit or text on
# stdout cannot. The program's own output is discarded.
_CHILD = """
import json, os, resource, sys, types
order = json.load(sys.stdin)
secret, program, report = order.pop("secret"), order.pop("program"), os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(nowhere, fd)
for name, limit in order["limits"].items():
    try:
        resource.setrlimit(getattr(resource, name), (limit, limit + 1 if name == "RLIMIT_CPU" else limit))
    except (ValueError, OSError):
        pass  # lower already, or not to be had on this system
def say(**words):
    os.write(report, json.dumps(words).encode() + b"\\n")
out_of_memory = b'{"end": "out of memory"}\\n'
try:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "program.py", "exec"), module.__dict__)
except MemoryError:
    os.write(report, out_of_memory)
except SystemExit as left:
    say(end="failed", detail=f"left before the tests were through: exit({left.code!r})"[:500])
except BaseException as error:
    try:
        say(end="failed", detail=f"{type(error).__name__}: {error}".rstrip(": ")[:500])
    except BaseException:
        pass  # an error whose own text raises is still a failure
else:
    say(end="passed", secret=secret)
os._exit(0)
"""


def run_program(program: str, limits: ExecutionLimits | None = None) -> ExecutionResult:
    """Run `program` in an empty folder and environment. It passes if it runs to its last line."""
    bounds = limits or ExecutionLimits()
    cpu_seconds = math.ceil(bounds.seconds) if bounds.cpu_seconds is None else bounds.cpu_seconds
    secret = secrets.token_hex(16)
    order = {
        "program": program,
        "secret": secret,
        "limits": {
            "RLIMIT_CPU": cpu_seconds,
            "RLIMIT_AS": bounds.memory,
            "RLIMIT_FSIZE": bounds.file_bytes,
            "RLIMIT_CORE": 0,
        },
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spaceserve-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        late = False
        try:
            reported, _ = process.communicate(json.dumps(order).encode(), timeout=bounds.seconds)
        except subprocess.TimeoutExpired:
            late, reported = True, b""
        finally:
            _kill(process)
    seconds = time.monotonic() - started
    if late:
        return ExecutionResult(End.TIMED_OUT, f"more than {bounds.seconds:g} s", seconds)
    return ExecutionResult(*_end_of(reported, secret, process.returncode, cpu_seconds, bounds.memory), seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and its children, which are one process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _end_of(reported: bytes, secret: str, status: int, cpu_seconds: int, memory: int) -> tuple[End, str]:
    """Return the outcome and its detail from the process's report and exit status."""
    lines = [words for line in reported.splitlines() if isinstance(words := _parsed(line), dict)]
    last = lines[-1] if lines else {}
    if status == -signal.SIGXCPU:
        return End.TIMED_OUT, f"more than {cpu_seconds} s of processor"
    if any(words.get("secret") == secret for words in lines):
        return End.PASSED, ""
    if last.get("end") == End.OUT_OF_MEMORY:
        return End.OUT_OF_MEMORY, f"more than {memory >> 20} MiB"
    if last.get("end") == End.FAILED:
        return End.FAILED, str(last.get("detail", ""))
    if status < 0:
        return End.KILLED, signal.Signals(-status).name
    return End.FAILED, f"left before the tests were through: status {status}"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
