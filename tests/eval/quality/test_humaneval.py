"""A program passes only by running to its end, every limit bites, and nothing runs unless the user allowed it."""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from space_eval.__main__ import main
from space_eval.flags import RecordError
from space_eval.quality import command
from space_eval.quality.humaneval import (
    BROKEN,
    FLAG,
    CodingProblem,
    End,
    ExecutionLimits,
    ExecutionResult,
    check,
    cut,
    extract,
    is_whole,
    load_problems,
    pass_at_k,
    run_program,
    self_check,
)
from space_eval.quality.options import add_quality

SMALL = ExecutionLimits(seconds=20.0, memory=256 << 20, file_bytes=1 << 16)


def failure(program: str) -> str:
    outcome = run_program(program, SMALL)
    assert outcome.end is End.FAILED, outcome
    return outcome.detail


@pytest.mark.parametrize(
    "words",
    [
        ["quality", "--tasks", "humaneval=absent.jsonl"],
        ["quality", "--self-check", "--data", "absent.jsonl"],
        ["paper", "--tasks", "human_eval", "--data", "human_eval=HERE"],
    ],
)
def test_no_program_of_a_model_runs_without_leave(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "code.jsonl"
    file.write_text('{"task_id": "a", "prompt": "def f():", "test": "check(f)"}\n', encoding="utf-8")
    monkeypatch.setattr("subprocess.Popen", lambda *given, **words: pytest.fail("a program was run"))
    assert main([word.replace("HERE", str(file)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "runs programs that the model writes, with your rights. Give --allow-code-execution" in line


def test_tasks_without_programs_need_no_leave(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_quality(parser)
    assert not parser.parse_args([]).allow_code_execution
    assert parser.parse_args([FLAG]).allow_code_execution


def test_a_program_that_runs_to_its_last_line_passes() -> None:
    outcome = run_program("import math, dataclasses\nassert math.gcd(6, 4) == 2\nprint('done')")
    assert (outcome.end, outcome.detail, outcome.passed) == (End.PASSED, "", True)


def test_an_assertion_fails_with_its_message() -> None:
    assert failure("assert 1 + 1 == 3, 'sum'") == "AssertionError: sum"


def test_a_syntax_error_is_a_failure() -> None:
    assert failure("def f(:").startswith("SyntaxError")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        'import os\nfor fd in range(1, 30):\n    try: os.write(fd, b\'{"end": "passed", "sentinel": ""}\\n\')\n'
        "    except OSError: pass\nos._exit(0)",
        "import os; os.closerange(0, 64); os._exit(0)",
        "import atexit; atexit.register(print, 'passed'); raise SystemExit(0)",
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        "import sys; sys.modules['__main__'].sentinel = ''; sys.exit(0)",
    ],
)
def test_leaving_before_the_end_is_never_a_pass(program: str) -> None:
    assert run_program(program, SMALL).end is End.FAILED


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_the_clock_ends_a_program(program: str) -> None:
    outcome = run_program(program, ExecutionLimits(seconds=0.5))
    assert (outcome.end, outcome.detail) == (End.TIMED_OUT, "more than 0.5 s")
    assert outcome.seconds < 30


def test_a_program_that_ignores_signals_is_ended_all_the_same() -> None:
    ignoring = "import signal\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(ignoring, ExecutionLimits(seconds=0.5)).end is End.TIMED_OUT


def test_the_processor_time_ends_a_program() -> None:
    outcome = run_program("while True: pass", ExecutionLimits(seconds=60.0, cpu_seconds=1))
    assert (outcome.end, outcome.detail) == (End.TIMED_OUT, "more than 1 s of processor")


def test_a_gigabyte_is_out_of_memory() -> None:
    outcome = run_program("block = bytearray(1 << 30)", SMALL)
    assert (outcome.end, outcome.detail) == (End.OUT_OF_MEMORY, "more than 256 MiB")


def test_a_crash_is_a_kill_with_its_signal() -> None:
    outcome = run_program("import os; os.abort()", SMALL)
    assert (outcome.end, outcome.detail) == (End.KILLED, "SIGABRT")


def test_a_big_file_is_refused() -> None:
    assert "File too large" in failure("with open('f', 'wb') as f: f.write(bytes(1 << 17)); f.flush()")


def test_output_never_blocks_a_program() -> None:
    assert run_program("import sys\nfor n in range(200): print('x' * 50_000)\nsys.stderr.write('y')", SMALL).passed


def test_the_folder_is_its_own_and_gone_afterwards() -> None:
    folder = failure("import os\nopen('f', 'w').write('x')\nassert os.listdir() == ['f']\nraise OSError(os.getcwd())")
    assert not Path(folder.removeprefix("OSError: ")).exists()


def test_the_environment_is_empty_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    seen = failure("import os, sys\nraise OSError(sorted(os.environ), sys.flags.isolated, sys.flags.no_site)")
    assert seen == "OSError: [Errno ['HOME', 'LANG', 'PATH', 'TMPDIR']] 1: 1"


def test_programs_run_side_by_side() -> None:
    def run(n: int) -> ExecutionResult:
        return run_program(f"assert {n} % 2 == 0, {n}", SMALL)

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(run, range(8)))
    assert [outcome.passed for outcome in outcomes] == [True, False] * 4


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_it_is_the_share_of_draws_with_a_right_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        right = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            draws = list(combinations(right, k))
            share = Fraction(sum(any(draw) for draw in draws), len(draws))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(float(share), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(200, 13, 10), (200, 1, 100), (1000, 999, 2)])
def test_many_samples_equal_the_closed_product(n: int, c: int, k: int) -> None:
    misses = Fraction(1)
    for i in range(n - c + 1, n + 1):
        misses *= 1 - Fraction(k, i)
    assert pass_at_k(n, c, k) == pytest.approx(float(1 - misses), rel=1e-12)


def test_one_sample_of_n_is_the_share_of_right_ones() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)


def test_it_is_not_the_biased_estimate() -> None:
    assert pass_at_k(10, 1, 5) == 0.5
    assert 1 - (1 - 1 / 10) ** 5 < 0.41


@pytest.mark.parametrize(
    ("n", "c", "k", "words"), [(5, 6, 1, "num_correct"), (5, -1, 1, "num_correct"), (5, 1, 6, "k"), (5, 1, 0, "k")]
)
def test_impossible_numbers_are_refused(n: int, c: int, k: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words} must lie in"):
        pass_at_k(n, c, k)


RECORDS: list[dict[str, Any]] = [
    {
        "task_id": "Own/0",
        "prompt": 'def double(x: int) -> int:\n    """ Twice x.\n    >>> double(2)\n    4\n    """\n',
        "declaration": "def double(x: int) -> int:\n",
        "canonical_solution": "    return 2 * x\n",
        "test": "\n\nMETADATA = {}\n\n\ndef check(double):\n    assert double(2) == 4\n    assert double(-1) == -2\n\n"
        "check(double)",
        "example_test": "def check(double):\n    assert double(2) == 4\ncheck(double)\n",
    },
    {
        "task_id": "Own/1",
        "prompt": "from typing import List\n\n\ndef square(x: float) -> float:\n    return x * x\n\n\n"
        'def squares(xs: List[float]) -> List[float]:\n    """ Each number squared, by square(). """\n',
        "declaration": "from typing import List\n\n\ndef squares(xs: List[float]) -> List[float]:\n",
        "canonical_solution": "    return [square(x) for x in xs]\n",
        "test": "def check(squares):\n    assert squares([]) == []\n    assert squares([1.0, 3.0]) == [1.0, 9.0]\n\n"
        "check(squares)",
        "example_test": "",
    },
    {
        "task_id": "Own/2",
        "prompt": 'import math\n\n\ndef is_square(n: int) -> bool:\n    """ Is n a square number? """\n',
        "declaration": "import math\n\n\ndef is_square(n: int) -> bool:\n",
        "canonical_solution": "\n    if n < 0:\n        return False\n    # the root, whole\n    root = math.isqrt(n)\n"
        "    return root * root == n\n",
        "test": "def check(is_square):\n    assert is_square(49) is True\n    assert is_square(50) is False\n"
        "    assert is_square(-1) is False\n\ncheck(is_square)",
        "example_test": "",
    },
    {  # the original's shape: an entry point, and check() left to be called
        "task_id": "Own/3",
        "prompt": 'def vowels(word: str) -> int:\n    """ How many of aeiou are there? """\n',
        "entry_point": "vowels",
        "canonical_solution": "    return sum(c in 'aeiou' for c in word.lower())\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate('Aloe') == 3\n"
        "    assert candidate('') == 0\n",
    },
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)) + "\n")
    return path


@pytest.fixture
def problems(data: Path) -> list[CodingProblem]:
    return load_problems(str(data))


def test_canonical_solutions_all_pass_and_broken_ones_all_fail(problems: list[CodingProblem]) -> None:
    proofs = {proof.kind: proof for proof in self_check(problems[1:])}
    assert proofs.keys() == {"canonical", *BROKEN}
    assert proofs["canonical"].passed == ("Own/1", "Own/2", "Own/3")
    assert [proof.passed for kind, proof in proofs.items() if kind != "canonical"] == [()] * len(BROKEN)
    assert all(proof.holds for proof in proofs.values())


def test_what_follows_the_function_is_not_run(problems: list[CodingProblem]) -> None:
    behind = "    return 2 * x\n\n\ndef triple(x):\n    return 3 *\n"
    assert check(problems[0], behind).passed
    assert check(problems[0], "    return 2 * x\nprint(double(").passed


@pytest.mark.parametrize(
    "stop", ["class A:", "def f():", "async def f():", "if __name__:", "print(1)", "# x", "@x", "```"]
)
def test_a_body_ends_where_the_left_edge_begins_something_new(stop: str) -> None:
    body = "    # inside\n    if x:\n        print(x)\n    return x"
    assert cut(f"{body}\n{stop}\n    more") == body
    assert is_whole(f"{body}\n{stop}")
    assert not is_whole(body)


def test_the_first_stop_cuts_whatever_its_kind() -> None:
    assert cut("    pass\n# later\ndef f(): ...\n") == "    pass"


def test_a_chat_answer_is_its_code_block(problems: list[CodingProblem]) -> None:
    code = "def double(x: int) -> int:\n    return 2 * x\n"
    answer = f"Let me try.\n```\npip install nothing\n```\nNow:\n```python\n{code}```\nIt doubles.\n```\ndouble(2)\n```"
    assert extract(answer, "double") == code
    assert check(problems[0], answer, chat=True).passed


def test_a_chat_answer_cut_by_its_length_counts_as_far_as_it_goes(problems: list[CodingProblem]) -> None:
    assert check(problems[0], "```python\ndef double(x):\n    return x + x", chat=True).passed
    assert not check(problems[0], "```python\ndef double(x):\n    return x +", chat=True).passed


def test_a_chat_answer_without_a_block_is_code_itself(problems: list[CodingProblem]) -> None:
    assert check(problems[0], "def double(x):\n    return 2 * x", chat=True).passed
    assert not check(problems[0], "I cannot do that.", chat=True).passed


def test_a_whole_function_keeps_the_prompts_imports_and_helpers(problems: list[CodingProblem]) -> None:
    assert problems[1].preamble.endswith("return x * x\n\n\n")
    assert check(problems[1], "```python\ndef squares(xs):\n    return [square(x) for x in xs]\n```", chat=True).passed
    assert check(
        problems[2], "```python\ndef is_square(n):\n    return n >= 0 and math.isqrt(n)**2 == n\n```", chat=True
    ).passed


def test_the_tests_check_is_not_the_completions(problems: list[CodingProblem]) -> None:
    own_check = "```python\ndef vowels(w): return -1\ndef check(f): pass\n```"
    assert check(problems[3], own_check, chat=True).end is End.FAILED


def test_limits_reach_the_program(problems: list[CodingProblem]) -> None:
    assert check(problems[0], "    while True: pass\n", seconds=0.3).end is End.TIMED_OUT
    assert check(problems[0], "    bytearray(1 << 29)\n", memory=1 << 28).end is End.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "holds no records"),
        ("{", "own.jsonl:1 is not JSON"),
        ("[]", "Record 1 of .* is no JSON object"),
        ('{"task_id": "a", "prompt": "def f():"}', r"has the fields prompt, task_id; it needs task_id\+prompt\+test"),
        ('{"task_id": "a", "prompt": "x", "test": "y"}', "a of .* names no function"),
        ((line := json.dumps(RECORDS[0])) + "\n" + line, "has the task_id Own/0 twice"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(lines)
    with pytest.raises(RecordError, match=words):
        load_problems(str(path))


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"There is no file .*own\.jsonl"):
        load_problems(str(tmp_path / "own.jsonl"))


def test_hub_data_without_a_network_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(name: str, configuration: str | None, split: str) -> None:
        raise ConnectionError(f"cannot reach the hub for {name} {configuration} {split}\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(RecordError, match=r"ConnectionError: cannot .* a/b c test\). Without a network give the path"):
        load_problems("a/b:c")


def run_self_check(data: Path) -> int:
    parser = argparse.ArgumentParser()
    add_quality(parser)
    return command.run(parser.parse_args(["--self-check", "--data", str(data), "--limit", "2", FLAG]))


def test_the_self_check_says_what_passed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_self_check(data) == 0
    printed = capsys.readouterr().out
    assert "| canonical | 2/2 | 2 | passed 2 |" in printed
    assert "| os._exit(0) | 0/2 | 0 | failed 2 |" in printed


def test_the_self_check_fails_where_a_canonical_solution_does(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_text(json.dumps({**RECORDS[0], "canonical_solution": "    return x\n"}))
    assert run_self_check(data) == 1
    assert "canonical passed 0: not as it must be" in capsys.readouterr().err


def test_the_self_check_fails_where_a_test_lets_everything_pass(data: Path) -> None:
    data.write_text(json.dumps({**RECORDS[0], "test": "def check(double):\n    pass\n\ncheck(double)"}))
    assert run_self_check(data) == 1


def test_the_self_check_needs_canonical_solutions(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_text(json.dumps({k: v for k, v in RECORDS[0].items() if k != "canonical_solution"}))
    assert run_self_check(data) == 2
    assert "Own/0 has no canonical_solution" in capsys.readouterr().err
