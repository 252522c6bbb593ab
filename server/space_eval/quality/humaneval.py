"""HumanEval: programs from completions, run with their tests in processes of their own with limits."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from space_eval.data import load_records
from space_eval.flags import RecordError

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


FIELDS = (("task_id", "prompt", "test"),)

STOPS = ("\nclass ", "\ndef ", "\nasync def ", "\nif ", "\nprint", "\n#", "\n@", "\n```")
"""A new unindented statement ends a base model's function body (arXiv 2107.03374, §2.2; decorators and the end of a
code block are added)."""

CHAT_REQUEST = """\
Complete the following python code. Answer with the whole function in one code block.

```python
{prompt}
```"""


@dataclass(frozen=True)
class CodingProblem:
    """One function to write."""

    task_id: str
    prompt: str
    test: str  # defines check(candidate), and may call it
    entry_point: str  # the function's name
    canonical_solution: str | None  # a correct body

    @property
    def preamble(self) -> str:
        """Return the prompt before the function's head: imports, and functions it may call."""
        head = re.search(rf"^(async )?def {re.escape(self.entry_point)}\b", self.prompt, re.MULTILINE)
        return self.prompt if head is None else self.prompt[: head.start()]

    def program(self, body: str) -> str:
        """Return the program to run: the prompt with this body (or the preamble and `body`, if it defines the function
        itself), then the tests."""
        begun = self.preamble if _defines(body, self.entry_point) else self.prompt
        call = "" if re.search(r"^check\(", self.test, re.MULTILINE) else f"\ncheck({self.entry_point})\n"
        return f"{begun}{body}\n{self.test}\n{call}"


def load_problems(source: str, limit: int | None = None) -> list[CodingProblem]:
    """Load the problems of a JSONL file or a hub data set. Raises RecordError."""
    problems = []
    for record in load_records(source, needs=FIELDS)[:limit]:
        entry_point = record.get("entry_point")
        if not isinstance(entry_point, str):
            called = re.findall(r"^check\((\w+)\)", record["test"], re.MULTILINE)
            defined = re.findall(r"^(?:async )?def (\w+)", record["prompt"], re.MULTILINE)
            names = called or defined
            if not names:
                raise RecordError(
                    f"{record['task_id']} of {source} names no function: neither prompt nor test has one."
                )
            entry_point = names[-1]
        solution = record.get("canonical_solution")
        known = solution if isinstance(solution, str) else None
        problems.append(CodingProblem(record["task_id"], record["prompt"], record["test"], entry_point, known))
    repeated = {problem.task_id for problem in problems if sum(p.task_id == problem.task_id for p in problems) > 1}
    if repeated:
        raise RecordError(f"{source} has the task_id {min(repeated)} twice; each must be its own.")
    return problems


def cut(completion: str, stops: Sequence[str] = STOPS) -> str:
    """Return a base model's completion up to the first stop."""
    found = [at for stop in stops if (at := completion.find(stop)) >= 0]
    return completion[: min(found)] if found else completion


def is_whole(completion: str) -> bool:
    """Return whether the completion contains a stop, so that later text is irrelevant."""
    return any(stop in completion for stop in STOPS)


def extract(answer: str, entry_point: str) -> str:
    """Return the code of a chat answer: the first code block that defines the function, else the first block, else the
    whole answer. An unclosed block (length limit) extends to the end."""
    blocks = re.findall(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", answer, re.MULTILINE | re.DOTALL)
    defining = [block for block in blocks if _defines(block, entry_point)]
    code: str = (defining or blocks or [answer])[0]
    return code


def check(
    problem: CodingProblem, completion: str, *, seconds: float = 10.0, memory: int = 1 << 30, chat: bool = False
) -> ExecutionResult:
    """Run the problem's tests on this completion, cut at the first stop or (`chat`) extracted from its code block.

    `seconds` of clock and processor and `memory` bytes bound it. The program runs with the user's rights."""
    body = extract(completion, problem.entry_point) if chat else cut(completion)
    return run_program(problem.program(body), ExecutionLimits(seconds=seconds, memory=memory))


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^(async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None


BROKEN: dict[str, Callable[[CodingProblem], str]] = {
    "nothing": lambda problem: "",
    "return None": lambda problem: "    return None\n",
    "raise": lambda problem: "    raise NotImplementedError\n",
    "sys.exit(0)": lambda problem: "    import sys\n    sys.exit(0)\n",
    "os._exit(0)": lambda problem: "    import os\n    os._exit(0)\n",
    "exit on definition": lambda problem: "    pass\nraise SystemExit(0)\n",
    "right, behind an early return": lambda problem: f"    return object()\n{problem.canonical_solution}",
}
"""Completions that must fail on every problem."""


@dataclass(frozen=True)
class SelfCheck:
    """The outcomes of one kind of completion on all problems."""

    kind: str
    num_problems: int
    passed: tuple[str, ...]  # task ids
    ends: dict[str, int]  # how many ended how

    @property
    def holds(self) -> bool:
        """Whether all right solutions pass and all broken ones fail."""
        return len(self.passed) == (self.num_problems if self.kind == "canonical" else 0)


def self_check(
    problems: Sequence[CodingProblem],
    *,
    seconds: float = 10.0,
    memory: int = 1 << 30,
    checked: Callable[[str, CodingProblem, ExecutionResult], object] = lambda kind, problem, outcome: None,
) -> list[SelfCheck]:
    """Check completions whose result is known: canonical solutions, then each kind of broken one.

    `checked` is called with each outcome. RecordError if a record has no canonical solution.
    """
    missing = [problem.task_id for problem in problems if problem.canonical_solution is None]
    if missing:
        raise RecordError(
            f"{missing[0]} has no canonical_solution ({len(missing)} records lack it); the self-check needs it."
        )
    kinds = {"canonical": lambda problem: problem.canonical_solution or "", **BROKEN}
    checks = []
    for kind, complete in kinds.items():
        outcomes: dict[str, ExecutionResult] = {}
        for problem in problems:
            outcome = outcomes[problem.task_id] = check(problem, complete(problem), seconds=seconds, memory=memory)
            checked(kind, problem, outcome)
        passed = tuple(task_id for task_id, outcome in outcomes.items() if outcome.passed)
        ends = dict(Counter(str(outcome.end) for outcome in outcomes.values()))
        checks.append(SelfCheck(kind, len(problems), passed, ends))
    return checks


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement, is right (arXiv 2107.03374, equation 1).

    pass@k = 1 - C(n-c, k) / C(n, k)
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must lie in 0..{num_samples}, the number of samples; got {num_correct}.")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must lie in 1..{num_samples}, the number of samples; got {k}. Take more samples.")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
