"""A server on one core with little memory: its limits hold, and what is reported is what was seen."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perf.edge import ROUTERS_SHARE, Held, MemoryWatch, Visit, confined, installed, problems, report
from perf.harness import main, parser

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux holds processes to a core and says what they hold"
)

MIB = 1024**2
VISIT = Visit(
    "5", 3.0, Held(60 * MIB, MIB), Held(400 * MIB, MIB), Held(500 * MIB, 90 * MIB), 99, 2.0, 512, 300, 90, 4, 4
)


def test_what_is_started_inside_the_block_is_confined_and_nothing_else() -> None:
    cores, limit = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)
    core = max(cores)
    script = "import os, resource; print(os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)[0])"
    with confined(core, 512 * MIB):
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{{{core}}} {512 * MIB}"
    assert (os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)) == (cores, limit)


def test_data_beyond_the_limit_is_refused_by_the_system() -> None:
    with confined(min(os.sched_getaffinity(0)), 256 * MIB):
        run = subprocess.run([sys.executable, "-c", "bytearray(300 << 20)"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "MemoryError" in run.stderr


def test_the_watch_keeps_the_greatest_moment() -> None:
    script = "import sys; a = bytearray(64 << 20); print('full', flush=True); sys.stdin.readline(); del a; input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        with MemoryWatch(lambda: [process.pid], period=0.001) as watch:
            while not watch.num_looks:
                pass
        process.stdin.write("\n\n")
        process.stdin.flush()
    assert 64 * MIB <= watch.most.own < 100 * MIB
    assert Held.by(process.pid) == Held()


def test_pages_of_its_own_and_of_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text("0-1 ---p [rollup]\nRss: 100 kB\nPss: 50 kB\nAnonymous: 30 kB\n")
    assert Held.by(7, tmp_path) == Held(30 * 1024, 70 * 1024)


def test_a_text_that_differs_a_limit_that_was_passed_and_no_drafts_are_wrong() -> None:
    assert problems([VISIT], 1024 * MIB) == []
    assert "1 of 4 texts" in problems([replace(VISIT, num_equal=3)], 1024 * MIB)[0]
    assert "590 MiB were in memory at once; the limit is 512 MiB" in problems([VISIT], 512 * MIB)[0]
    assert "prove nothing" in problems([replace(VISIT, drafted=0)], 1024 * MIB)[0]


def test_the_report_has_every_figure_and_how_the_limit_was_kept() -> None:
    options = parser(["edge"]).parse_args(["edge"])
    text = report(options, [replace(VISIT, num_equal=3)], {"torch": 700 * MIB, "spaceserve": 20 * MIB}).markdown()
    assert "worker at most 768 MiB, of the router 256 MiB (RLIMIT_DATA)" in text
    assert "| 5 | 3.0 s | 61 MiB | 401 MiB | 590 MiB | 90 MiB | 256 | 300 | 90 | 3 of 4 |" in text
    assert "no extras: 720 MiB (torch 700 MiB" in text
    assert "WRONG: 1 of 4 texts are not those of plain decoding alone." in text


def test_what_is_needed_is_counted_and_what_lies_beside_is_not() -> None:
    sizes = installed()
    assert {"spaceserve", "torch", "transformers", "fastapi"} <= sizes.keys()
    assert "pytest" not in sizes
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)


def test_a_core_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edge", "--core", "99999"]) == 2
    assert "may not run on --core 99999" in capsys.readouterr().err


@pytest.mark.slow
def test_the_embedded_model_serves_four_exact_streams_on_one_core_in_one_gib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["edge", "--out", str(tmp_path), "--tokens", "48"]) == 0
    text = capsys.readouterr().out
    assert text.count("4 of 4") == 2
    assert (tmp_path / "edge.md").read_text(encoding="utf-8") == text
    assert ROUTERS_SHARE == 0.25
