"""The compiled operations' thread pool: each unit is done once, also after a fork and with concurrent callers."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from space_kernels.build.cpu_library import CpuLibrary
from space_kernels.linear.cpu_linear import CompiledLinear

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compiled operations are built on Linux alone")


def mark(library: CpuLibrary, marks: torch.Tensor, num_threads: int) -> None:
    library.mark(marks.data_ptr(), len(marks), num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 1001])
def test_each_unit_is_done_once(library: CpuLibrary, num_threads: int, count: int) -> None:
    marks = torch.zeros(count, dtype=torch.int32)
    for _ in range(100):
        mark(library, marks, num_threads)
    assert marks.eq(100).all()


def test_any_number_of_threads_may_follow_any_other(library: CpuLibrary) -> None:
    marks, draws = torch.zeros(97, dtype=torch.int32), torch.Generator().manual_seed(0)
    for num_threads in torch.randint(1, 9, (500,), generator=draws).tolist():
        mark(library, marks, num_threads)
    assert marks.eq(500).all()


def test_callers_at_the_same_time_each_get_their_own_work_done(library: CpuLibrary) -> None:
    marks = [torch.zeros(300, dtype=torch.int32) for _ in range(4)]

    def call(mine: torch.Tensor) -> None:
        for _ in range(300):
            mark(library, mine, 3)

    threads = [threading.Thread(target=call, args=[mine]) for mine in marks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine.eq(300).all() for mine in marks)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_fork_has_threads_of_its_own(library: CpuLibrary) -> None:
    marks = torch.zeros(1000, dtype=torch.int32)
    mark(library, marks, 3)
    child = os.fork()
    if not child:
        try:
            for _ in range(50):
                mark(library, marks, 3)
            os._exit(0 if marks.eq(51).all() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mark(library, marks, 3)
    assert marks.eq(2).all()


def test_helpers_leave_signals_to_the_program(library: CpuLibrary) -> None:
    mark(library, torch.zeros(64, dtype=torch.int32), 2)
    helpers = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "space-helper\n"]
    assert helpers
    for helper in helpers:
        blocked = next(line for line in (helper / "status").read_text().splitlines() if line.startswith("SigBlk"))
        assert int(blocked.split()[1], 16) >> 14 & 1, "SIGTERM"


@pytest.mark.parametrize("rows", [1, 5, 13, 70])
@pytest.mark.parametrize("int8", [False, True])
def test_a_product_has_the_same_bits_however_its_panels_fall_to_threads(
    library: CpuLibrary, rows: int, int8: bool
) -> None:
    draws = torch.Generator().manual_seed(rows)
    weight = (torch.randn(1200, 172, generator=draws) / 13).bfloat16()
    linear = CompiledLinear(library, weight, None, weights="int8" if int8 else "plain")
    x, before = torch.randn(rows, 172, generator=draws).bfloat16(), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3, 5, 8):
            torch.set_num_threads(number)
            found += [linear(x) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)
