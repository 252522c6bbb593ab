"""Faults are counted, and what was lost is found."""

import random
from collections import Counter
from pathlib import Path

import pytest
from processes import ProcessFigures

from chaos.faults import Recovered, report
from chaos.harness import StreamCounts
from chaos.injection import LOSSES, Fault, planned
from chaos.requests import StreamAnswer, bodies

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
    assert StreamAnswer(ids, text, "length").num_different(StreamAnswer((1, 2, 3), "abc", "length")) == number


@pytest.mark.parametrize("field", ["lost", "num_different", "leaked", ""])
def test_a_run_passes_only_where_nothing_was_lost(field: str) -> None:
    counts = StreamCounts(num_streams=3, pauses=[0.5])
    if field == "lost":
        counts.lost.append("broken")
    if field == "num_different":
        counts.num_different = 1
    recovered = [Recovered(Fault.KILL, 2.0), Recovered(Fault.HANG, 4.0), Recovered(Fault.GARBAGE, 0.1)]
    made = report(FACTS, counts, recovered, int(field == "leaked"), (ProcessFigures(), ProcessFigures()))
    assert (not made.failures) is (field == "")
    assert (made.record["num_kills_and_hangs"], made.record["num_faults"]) == (2, 3)
    assert made.record["recovery_seconds"]["all kills and hangs"]["median"] == 3.0
    assert "| killed | 1 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |" in made.markdown()
    assert ("WRONG: broken" in made.markdown()) is (field == "lost")


def test_a_process_has_memory_files_and_threads_and_one_that_is_gone_has_none(tmp_path: Path) -> None:
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "0").touch()
    (tmp_path / "7" / "status").write_text("Name:\ta: b\nVmRSS:\t  20 kB\nThreads:\t3\n")
    assert ProcessFigures.of(7, tmp_path) == ProcessFigures(20 * 1024, 1, 3)
    assert ProcessFigures.of(8, tmp_path) == ProcessFigures()
