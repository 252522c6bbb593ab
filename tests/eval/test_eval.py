"""Plots of evaluations, and the commands that were removed."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from space_eval.__main__ import COMMANDS, MOVED, main
from space_eval.bench import command as bench
from space_eval.plots import Bar, PlotError, bar_plot, line_plot
from space_router.commands.programs import PROGRAMS


def size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_lines_are_drawn_into_a_folder_that_did_not_exist(tmp_path: Path) -> None:
    series = {"plain": [(1.0, 2.0), (2.0, 3.0)], "SPACE": [(1.0, 4.0), (2.0, float("nan"))]}
    band = {"plain": [(1.5, 2.5), (2.5, 3.5)]}
    drawn = line_plot(
        tmp_path / "new" / "a.png", series, title="t", x="steps", y="loss", ranges=band, note="small print"
    )
    assert drawn == tmp_path / "new" / "a.png"
    assert size(drawn) > (400, 300)


def test_another_height_is_another_picture_and_a_range_too(tmp_path: Path) -> None:
    pictures = []
    for number, bar in enumerate((2.0, 2.5, Bar(2.5, 2.0, 3.0))):
        drawn = bar_plot(
            tmp_path / f"{number}.png", {"ours": {"XSum": bar, "CIP": 1.0}}, title="t", y="tokens per step"
        )
        pictures.append(drawn.read_bytes())
    assert len(set(pictures)) == 3


def test_a_group_that_one_series_lacks_is_drawn_without_a_bar(tmp_path: Path) -> None:
    series = {"ours": {"XSum": Bar(2.0), "CIP": Bar(float("nan"), 1.0, 2.0)}, "published": {"HumanEval-X": 3.0}}
    assert size(bar_plot(tmp_path / "b.png", series, title="t", y="y", level=1.0)) > (400, 300)


def test_more_groups_make_a_wider_figure(tmp_path: Path) -> None:
    narrow = bar_plot(tmp_path / "n.png", {"a": {"1": 1.0}}, title="t", y="y")
    wide = bar_plot(tmp_path / "w.png", {"a": {str(n): 1.0 for n in range(20)}}, title="t", y="y")
    assert size(wide)[0] > size(narrow)[0]


def test_a_missing_matplotlib_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"pip install 'spaceserve\[train\]'"):
        line_plot(tmp_path / "a.png", {"a": [(1.0, 1.0)]}, title="t", x="x", y="y")


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


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", "/no/model", "--prompts", "/no/prompts", "--out", f"{__file__}/out"]
    assert main(["acceptance", *given]) == 2
    assert "test_eval.py/out cannot be written: Not a directory" in capsys.readouterr().err


HELP = """
import sys
from importlib import import_module
module, *arguments = sys.argv[1:]
program = import_module(f"{module}.__main__" if module == "space_eval" else module)
try:
    program.main(arguments)
except SystemExit as exit:
    assert exit.code in (0, 2), exit.code
heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
COMMAND_LINES = [
    *(["space_eval", name, "--help"] for name in COMMANDS),
    ["space_eval", "paper", "--k", "many"],
    [PROGRAMS["convert"].module, "--help"],
    [PROGRAMS["convert"].module, "from", "to", "--num-masks", "0"],
]


def test_help_and_wrong_flags_wait_for_no_import_of_torch() -> None:
    for words in COMMAND_LINES:
        found = subprocess.run([sys.executable, "-c", HELP, *words], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert "usage: spaceserve" in found.stdout + found.stderr
