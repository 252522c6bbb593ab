"""The head's row limit follows from the time of its matmuls, not from other work on the machine."""

import random

import pytest
import torch
from space_model.heads import MOST_SECONDS, SMALL, TRIED, UNMEASURED, BaseSpec, head_rows
from torch import Tensor

SPEC = BaseSpec(4, torch.float32)
LARGE = SMALL + 1  # bytes of a head that is measured


@pytest.fixture(autouse=True)
def _no_caches_to_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """`head_rows` reads 64 MB between calls, to drop a head's weights from the caches. A fake head has no weights."""
    monkeypatch.setattr("space_model.heads.CACHED", 4)


class FakeHead:
    """A head whose product takes a fixed time and so much a row. `load`: other programs that take their turns, as a
    system gives them: while it is theirs a call waits 3 ms for each of them."""

    def __init__(self, fixed: float, per_row: float, load: int = 0, seed: int = 0) -> None:
        self.now, self._fixed, self._per_row, self._load = 0.0, fixed, per_row, load
        self._random = random.Random(seed)
        self._left = 0.003  # of this program's turn

    def __call__(self) -> float:
        return self.now

    def logits(self, rows: Tensor) -> Tensor:
        taken = self._fixed + self._per_row * len(rows)
        self.now += taken * self._random.uniform(1.0, 1.01)
        self._left -= taken
        if self._left <= 0:
            self.now += 0.003 * self._load * self._random.uniform(0.5, 1.5)
            self._left = 0.003 * self._random.uniform(0.5, 1.5)
        return rows

    def found(self) -> int:
        return head_rows(self.logits, SPEC, LARGE, self)


@pytest.mark.parametrize(("per_row", "expected"), [(3.0, 4), (0.1, 12), (0.055, 20), (0.01, 32)])
@pytest.mark.parametrize("fixed", [1e-4, 1e-3])
def test_rows_are_taken_up_to_twice_the_time_of_two(fixed: float, per_row: float, expected: int) -> None:
    assert FakeHead(fixed, fixed * per_row).found() == expected


@pytest.mark.parametrize("load", [1, 4, 8])
@pytest.mark.parametrize("fixed", [1e-4, 1e-3])
def test_beside_busy_programs_the_same_number_is_found(fixed: float, load: int) -> None:
    quiet = FakeHead(fixed, 0.07 * fixed).found()
    assert quiet == 16
    found = [FakeHead(fixed, 0.07 * fixed, load, seed).found() for seed in range(40)]
    assert found.count(quiet) >= 38


def test_a_head_that_takes_few_rows_alone_takes_none_at_once() -> None:
    steep = FakeHead(1e-6, 1e-3)

    def logits(rows: Tensor) -> Tensor:
        return steep.logits(rows if len(rows) < 4 else rows.repeat(3, 1))

    assert head_rows(logits, SPEC, LARGE, steep) == 0


def test_the_clock_is_this_process_s_own_time_whatever_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    head = FakeHead(1e-3, 0.07e-3)
    monkeypatch.setattr("time.process_time", head)
    for clock in ("time.perf_counter", "time.thread_time"):  # busy neighbours, one thread
        monkeypatch.setattr(clock, lambda: pytest.fail("another clock is read"))
    assert head_rows(head.logits, SPEC, LARGE) == 16


def test_one_hiccup_does_not_hide_the_rows_behind_it() -> None:
    head = FakeHead(1e-3, 1e-5)
    steady, hiccups = head.logits, iter([False, True, *[False] * 10_000])

    def logits(rows: Tensor) -> Tensor:
        if len(rows) == TRIED[0]:
            head.now += 0.5 * next(hiccups)
        return steady(rows)

    assert head_rows(logits, SPEC, LARGE, head) == 32


def test_measuring_ends_in_its_time_and_is_left_out_on_a_gpu() -> None:
    slow = FakeHead(0.05, 0.001)
    slow.found()
    assert slow.now <= MOST_SECONDS + 2 * len(TRIED) * 0.09
    restless = FakeHead(1e-3, 1e-5, load=8)
    restless.found()
    assert restless.now <= MOST_SECONDS + 2 * len(TRIED) * 0.04
    assert head_rows(lambda rows: pytest.fail("measured"), BaseSpec(4, torch.float32, "meta"), LARGE) == UNMEASURED


def test_a_head_that_stays_in_the_cache_is_not_measured() -> None:
    assert head_rows(lambda rows: pytest.fail("measured"), SPEC, SMALL) == max(TRIED)
