"""Faults are counted, and what was lost is found."""

import random
from collections import Counter
from pathlib import Path

import pytest
from space_eval.fault_kinds import LOSSES, Fault, planned
from space_eval.fault_report import Mended, markdown, record
from space_eval.fault_requests import Answer, bodies
from space_eval.faults import Streams
from space_eval.process_figures import ProcessFigures

FACTS = {"id": "m", "dtype": "float32", "device_type": "cpu", "machine": "here", "commit": "c"}


def test_a_plan_has_as_many_kills_and_hangs_as_were_asked_for_and_others_besides() -> None:
    plan = planned(200, random.Random(1))
    counts = Counter(plan)
    assert sum(counts[fault] for fault in LOSSES) == 200
    assert counts[Fault.HANG] == 60
    assert counts[Fault.LOADING] == counts[Fault.CRASH] == 20
    assert counts[Fault.GARBAGE] == counts[Fault.INTRUDER] == 13


def test_requests_are_unlike_each_other() -> None:
    made = bodies(32, 384)
    assert len({str(body) for body in made}) == 32
    assert {body["temperature"] for body in made} == {0.0, 0.8, 1.0}
    assert sum("prediction" in body for body in made) == sum("structured_outputs" in body for body in made) == 4


@pytest.mark.parametrize(
    ("ids", "text", "number"), [((1, 2, 3), "abc", 0), ((1, 9, 3), "axc", 1), ((1, 2), "ab", 1), ((1, 2, 3), "ab", 1)]
)
def test_tokens_that_differ_or_lack_are_counted(ids: tuple[int, ...], text: str, number: int) -> None:
    assert Answer(ids, text, "length").num_different(Answer((1, 2, 3), "abc", "length")) == number


@pytest.mark.parametrize("field", ["lost", "num_different", "leaked", ""])
def test_a_run_passes_only_where_nothing_was_lost(field: str) -> None:
    streams = Streams(num_begun=3, num_whole=3, pauses=[0.5])
    if field == "lost":
        streams.lost.append("broken")
    if field == "num_different":
        streams.num_different = 1
    mended = [Mended(Fault.KILL, 1.0, 2.0), Mended(Fault.HANG, 3.0, 4.0), Mended(Fault.GARBAGE, 0.0, 0.1)]
    made = record(
        facts=FACTS, streams=streams, num_streams=2, num_workers=1, mended=mended, leaked=int(field == "leaked"),
        seconds=9.0, router=(ProcessFigures(), ProcessFigures()),
    )  # fmt: skip
    assert made["passed"] is (field == "")
    assert (made["num_kills_and_hangs"], made["num_faults"]) == (2, 3)
    assert made["recovery_seconds"]["all kills and hangs"]["median"] == 3.0
    assert "| killed | 1 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |" in markdown(made)


def test_a_process_has_memory_files_and_threads_and_one_that_is_gone_has_none(tmp_path: Path) -> None:
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "0").touch()
    (tmp_path / "7" / "status").write_text("Name:\ta: b\nVmRSS:\t  20 kB\nThreads:\t3\n")
    assert ProcessFigures.of(7, tmp_path) == ProcessFigures(20 * 1024, 1, 3)
    assert ProcessFigures.of(8, tmp_path) == ProcessFigures()
