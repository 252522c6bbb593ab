"""What a step costs the router depends neither on the queue nor on the pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import scheduler
from perf.harness import main
from perf.scheduler import Cost, measure


@pytest.mark.parametrize(
    ("few", "many"), [((10, 10_000), (2_000, 10_000)), ((100, 1_000), (100, 300_000))], ids=["queued", "pages"]
)
def test_the_cost_of_a_step_is_flat(few: tuple[int, int], many: tuple[int, int]) -> None:
    measured = {point: [measure(*point, num_steps=15).median_us for _ in range(2)] for point in (few, many)}
    assert min(measured[many]) < 2 * min(measured[few])


def test_a_cost_that_grows_with_the_queue_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from space_router.engine.queueing.queue import RequestQueue

    head = RequestQueue.head

    def slow(self: RequestQueue, now: float | None = None) -> object:
        for _ in range(20):
            sum(live.age for live in self._waiting)
        return head(self, now)

    monkeypatch.setattr(RequestQueue, "head", slow)
    few, many = (min(measure(n, 10_000, num_steps=15).median_us for _ in range(2)) for n in (10, 2_000))
    assert many > 2 * few


def test_the_measurement_is_written_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quick(num_queued: int, num_blocks: int, *, num_steps: int, seed: int = 0) -> Cost:
        return Cost(num_queued, num_blocks, 2.0 + seed, 4.0, 1.0, 7)

    monkeypatch.setattr(scheduler, "measure", quick)
    assert main(["scheduler", "--out", str(tmp_path), "--rounds", "3", "--steps", "9"]) == 0
    record = json.loads((tmp_path / "scheduler.json").read_text())
    assert [(p["num_queued"], p["num_blocks"]) for p in record["points"][::3]] == [
        (10, 10_000), (100, 10_000), (1_000, 10_000), (10_000, 10_000),
        (100, 1_000), (100, 100_000), (100, 1_000_000),
    ]  # fmt: skip
    assert "cores" in record["facts"]["machine"]
    assert "| 10,000 | 10,000 | 3 (2–4) |" in capsys.readouterr().out


def test_flags_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["scheduler", "--steps", "0"])
    assert "of at least 1" in capsys.readouterr().err
