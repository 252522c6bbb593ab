"""Threads are as many as the cores that affinity and a container's quota leave."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from space_common.process import sleep_soon
from space_common.worker.settings import parse_cores
from space_server.config import parse
from space_server.machine.threads import keep_off_last, num_cores, num_threads, run_in_thread


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    """Four cores of two hardware threads each; no control groups."""
    for number in range(8):
        folder = tmp_path / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:cpu,cpuacct:/a/b\n0::/a/b\n")
    return {"processors": tmp_path / "cpu", "cgroup": tmp_path / "groups", "process": tmp_path / "self"}


def test_hardware_threads_of_one_core_count_once(machine: dict[str, Path]) -> None:
    assert num_cores(**machine, allowed=set(range(8))) == 4
    assert num_cores(**machine, allowed={0, 4}) == 1
    assert num_cores(**machine, allowed={0, 1, 5}) == 2


def test_where_the_system_says_nothing_of_cores_processors_are(tmp_path: Path) -> None:
    assert num_cores(processors=tmp_path, cgroup=tmp_path, process=tmp_path, allowed={0, 1, 2}) == 3


@pytest.mark.parametrize(("words", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
@pytest.mark.parametrize("of", [".", "a", "a/b"], ids=["container", "parent", "own"])
def test_a_quota_of_version_2_bounds_them(machine: dict[str, Path], words: str, cores: int, of: str) -> None:
    folder = machine["cgroup"] / of
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text(words + "\n")
    assert num_cores(**machine, allowed=set(range(8))) == cores


@pytest.mark.parametrize(("quota", "cores"), [("150000", 1), ("300000", 3), ("-1", 4)])
def test_a_quota_of_version_1_bounds_them(machine: dict[str, Path], quota: str, cores: int) -> None:
    folder = machine["cgroup"] / "cpu" / "a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert num_cores(**machine, allowed=set(range(8))) == cores


@pytest.mark.parametrize(
    ("cores", "beside_router", "workers", "threads"),
    [(1, True, 1, 1), (2, True, 1, 2), (4, True, 1, 3), (4, False, 1, 4), (9, True, 2, 4), (2, True, 4, 1)],
)
def test_a_core_is_left_to_the_router_where_there_are_enough(
    cores: int, beside_router: bool, workers: int, threads: int
) -> None:
    assert num_threads(cores, beside_router=beside_router, num_workers=workers, environment={}) == threads


def test_who_sets_omp_num_threads_is_obeyed() -> None:
    assert num_threads(8, beside_router=True, environment={"OMP_NUM_THREADS": "5"}) == 5
    assert num_threads(8, beside_router=False, environment={"OMP_NUM_THREADS": "many"}) == 8


def test_lists_of_processors() -> None:
    assert parse_cores("0-2,5") == {0, 1, 2, 5}
    for text in ("", "a", "3-1", "1-", "-1"):
        with pytest.raises(ValueError, match="must be numbers of processors"):
            parse_cores(text)


def test_processors_that_this_process_may_not_use_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--listen", "h:1", "--cores", "100000"])
    assert "may not run on 100000" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to processors")
@pytest.mark.parametrize(("num_workers", "left"), [(1, 5), (2, 5), (3, None)])
def test_every_thread_keeps_off_the_last_processor_where_workers_leave_one(
    num_workers: int, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: dict[int, list[int]] = {}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5, 2, 3})
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, processors: bound.update({pid: list(processors)}))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert keep_off_last(num_workers) == left
    finally:
        done.set()
        other.join()
    threads = {threading.get_native_id(), other.native_id}
    assert (threads <= bound.keys()) is (left is not None)
    assert all(processors == [2, 3] for processors in bound.values())


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, {"GOMP_SPINCOUNT": "20000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_sleep_soon_unless_the_environment_says_otherwise(said: dict[str, str], wanted: dict[str, str]) -> None:
    environment = dict(said)
    sleep_soon(environment)
    assert environment == wanted


def test_it_returns_what_the_work_returns_and_is_gone() -> None:
    before = set(threading.enumerate())
    names = []

    def work() -> int:
        names.append(threading.current_thread().name)
        return int(torch.ones(3).sum())

    assert run_in_thread(work) == 3
    assert names == ["passing"]
    assert set(threading.enumerate()) <= before


def test_it_raises_what_the_work_raises() -> None:
    def work() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run_in_thread(work)


@pytest.mark.parametrize("module", ["space_train", "space_eval"])
def test_training_and_evaluations_leave_the_processors_to_others_too(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the server's worker does."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(Path(importlib.import_module(module).__path__[0]) / "__main__.py"), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.environ["GOMP_SPINCOUNT"] == "20000"
    assert "usage: " in capsys.readouterr().out
