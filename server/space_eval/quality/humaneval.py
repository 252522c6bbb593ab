"""HumanEval and HumanEval-X (Python): a problem's tests check the function that a model wrote.

A record has a `prompt` (imports, the head of a function, its docstring) and a `test`; a completion is what follows the
prompt, or, of a chat model, an answer with the whole function in a code block.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from space_eval.data import load_records
from space_eval.flags import RecordError
from space_eval.quality.code_execution import ExecutionLimits, ExecutionResult, run_program

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
