"""Completions become programs, and right ones pass, on small problems in the shape of HumanEval's records."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from space_eval.flags import RecordError
from space_eval.quality import command
from space_eval.quality.code_execution import FLAG, End
from space_eval.quality.humaneval import BROKEN, CodingProblem, check, cut, extract, is_whole, load_problems, self_check

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
    command.add_arguments(parser)
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
