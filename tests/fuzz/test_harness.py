"""What the fuzzer does with an input that fails, hangs or crashes, and with inputs that reach nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fuzz import harness
from fuzz.harness import Finding, Fuzzer


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    return tmp_path / "input.txt"


def test_a_surprise_is_raised_with_the_smallest_input_that_causes_it(input_file: Path) -> None:
    def attempt(number: int) -> str:
        if number > 7:
            raise KeyError("a surprise")
        return f"fine {number % 2}"

    with pytest.raises(KeyError, match="a surprise") as caught:
        Fuzzer(1, input_file).run(st.integers(), attempt, few=60)
    assert "hostile=8," in "\n".join(caught.value.__notes__)


def test_what_inputs_leave_behind_is_raised(input_file: Path) -> None:
    def settle() -> None:
        raise Finding("something is left behind")

    with pytest.raises(Finding, match="left behind"):
        Fuzzer(1, input_file).run(st.booleans(), str, few=4, settle=settle)


def test_inputs_that_all_end_alike_prove_nothing(input_file: Path) -> None:
    with pytest.raises(AssertionError, match="reach nothing"):
        Fuzzer(1, input_file).run(st.integers(), lambda number: "fine", few=20)


def test_times_multiplies_the_number_of_inputs(input_file: Path) -> None:
    fuzzer = Fuzzer(3, input_file)
    fuzzer.run(st.integers(), lambda number: str(number % 2), few=20)
    assert fuzzer.outcomes.total() == 60


def test_a_coroutine_that_hangs_is_a_finding(input_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SECONDS", 0.05)
    fuzzer = Fuzzer(1, input_file)
    with pytest.raises(TimeoutError):
        fuzzer.wait(asyncio.sleep(60))
    fuzzer.close()


@pytest.mark.parametrize("deed", ["os._exit(7)", "time.sleep(60)"])
def test_a_process_that_crashes_or_hangs_leaves_the_input_behind(input_file: Path, deed: str) -> None:
    code = f"""
import os, time
from pathlib import Path
from hypothesis import strategies as st
from fuzz import harness
harness.SECONDS = 0.5
def attempt(number):
    if number > 100:
        {deed}
    return str(number % 2)
harness.Fuzzer(1, Path({str(input_file)!r})).run(st.integers(), attempt, few=500)
"""
    tests = Path(harness.__file__).parents[1]
    run = subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": f"{tests}:{tests / 'support'}"},
                         capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert run.returncode == (7 if "exit" in deed else 1), run.stderr
    assert int(input_file.read_text()) > 100
    assert "exit" in deed or "most recent call first" in run.stderr
