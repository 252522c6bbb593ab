"""A few hundred hostile inputs of each kind, and that a target which fails is found: `make fuzz` tries many more."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from random import Random

import pytest
from space_eval import fuzz
from space_eval.fuzz_target import Finding, dice_of

FEW = {
    "http-bodies": 100,
    "http-bytes": 150,
    "grpc-messages": 40,
    "worker-reports": 150,
    "worker-commands": 60,
    "templates": 100,
    "grammars": 100,
    "checkpoints": 2,
}


@pytest.mark.parametrize("name", FEW)
def test_hostile_inputs_are_taken_or_refused_and_leave_nothing_behind(name: str) -> None:
    tally = asyncio.run(fuzz.try_all(name, 1, 0, FEW[name], lambda number: None))
    assert tally.findings == []
    assert tally.num_inputs == FEW[name]
    assert len(tally.outcomes) > 1 or FEW[name] < 10, "all came to the same end: they reach nothing"


class Moody:
    """A target that does what its dice say."""

    name = "moody"

    async def __aenter__(self) -> "Moody":
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def settle(self) -> None:
        raise Finding("something is left behind")

    async def try_one(self, dice: Random) -> str:
        if dice.random() < 0.1:
            raise KeyError("a surprise")
        return "fine"


def test_a_surprise_is_a_finding_that_names_the_one_input_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "TARGETS", {"moody": (1.0, Moody)})
    numbers: list[int] = []
    tally = asyncio.run(fuzz.try_all("moody", 5, 0, 60, numbers.append))
    assert numbers == list(range(60))
    assert 1 < tally.outcomes["FOUND"] < 20
    *surprises, left = tally.findings
    assert "after input 59: Finding: something is left behind" in left
    number = int(surprises[0].split("--from ")[1].split(" ")[0])
    assert dice_of(5, "moody", number).random() < 0.1, "the same dice again"


def test_a_process_that_crashes_or_hangs_is_a_finding_and_the_rest_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    double = tmp_path / "double.py"
    double.write_text(
        "import json, os, sys\n"
        "at = lambda flag: sys.argv[sys.argv.index(flag) + 1]\n"
        "first, count = int(at('--from')), int(at('--count'))\n"
        "for number in range(first, first + count):\n"
        "    open(at('--progress'), 'wb').write(number.to_bytes(8, 'little'))\n"
        "    if number == 3: os.kill(os.getpid(), 11)\n"
        "    if number == 6: os.kill(os.getpid(), 14)\n"
        "told = {'target': 'x', 'num_inputs': count, 'seconds': 1.0, 'outcomes': {'fine': count}, 'findings': []}\n"
        "open(at('--tally'), 'w').write(json.dumps(told))\n"
    )
    run = fuzz.subprocess.run
    monkeypatch.setattr(
        fuzz.subprocess, "run", lambda words, **rest: run([sys.executable, str(double), *words[4:]], **rest)
    )
    tally = fuzz.run_target("http-bytes", 0, 0, 10)
    assert tally.num_inputs == 10
    assert [f"--from {number}" in one for number, one in zip((3, 6), tally.findings, strict=True)] == [True, True]
    assert f"ended with {-signal.SIGSEGV}" in tally.findings[0]
    assert "hung" in tally.findings[1]


def test_the_command_tells_its_figures_and_fails_with_findings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(name: str, seed: int, first: int, count: int) -> fuzz.Tally:
        tally = fuzz.Tally(name, num_inputs=count)
        tally.findings += ["look here"] * (name == "templates")
        return tally

    monkeypatch.setattr(fuzz, "run_target", found)
    report = tmp_path / "report.json"
    assert fuzz.main(["--count", "100000", "--seed", "7", "--report", str(report)]) == 1
    said = capsys.readouterr().out
    assert "look here" in said
    assert "100000 inputs with seed 7: 1 findings" in said
    assert sum(one["num_inputs"] for one in json.loads(report.read_text())) == 100_000
    assert fuzz.main(["--count", "10", "--only", "grammars"]) == 0
