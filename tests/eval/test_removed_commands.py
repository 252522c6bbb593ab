"""A command that was removed answers with one line that says what to use instead."""

import pytest
from space_eval.__main__ import COMMANDS, MOVED, main
from space_eval.bench import command as bench


@pytest.mark.parametrize("name", MOVED)
def test_a_removed_evaluation_says_what_to_use_instead(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name not in COMMANDS
    assert main([name, "--model", "demo"]) == 2
    assert capsys.readouterr() == ("", f"spaceserve eval {name} was removed; {MOVED[name]}\n")


@pytest.mark.parametrize("name", bench.MOVED)
def test_a_removed_benchmark_says_what_to_use_instead(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name not in bench.COMMANDS
    assert bench.main([name]) == 2
    assert capsys.readouterr() == ("", f"spaceserve bench {name} was removed; {bench.MOVED[name]}\n")
