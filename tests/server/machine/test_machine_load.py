"""Other work on the machine is seen while steps are measured, and nothing is made up where a system does not say."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest
from space_server.machine.machine_load import MOST_WAITING, GpuLoad, LoadWatch
from space_server.machine.nvml import Nvml

OWN = 42


@pytest.fixture
def stat(tmp_path: Path) -> Path:
    (tmp_path / "task" / "7").mkdir(parents=True)
    (tmp_path / "task" / "8").mkdir()
    return tmp_path / "stat"


def scheduled(stat: Path, *threads: tuple[int, int]) -> None:
    """Nanoseconds that each thread ran and waited."""
    for name, (run, waited) in zip(("7", "8"), threads, strict=True):
        (stat.parent / "task" / name / "schedstat").write_text(f"{run} {waited} 5\n")


def watch(stat: Path, gpu: GpuLoad | None = None) -> LoadWatch:
    return LoadWatch(gpu, processors=2, stat=stat, tasks=stat.parent / "task")


@pytest.mark.parametrize(("seen", "why"), [((1, 2, 9), None), ((2, 2, 2), None), ((1, 3, 4), "3 tasks could run")])
def test_the_middle_of_the_run_queue_may_be_as_long_as_there_are_processors(
    stat: Path, seen: tuple[int, ...], why: str | None
) -> None:
    """Every machine has a moment in which more want to run."""
    watching = watch(stat)
    for number in seen[:-1]:
        stat.write_text(f"cpu 1\nprocs_running {number}\n")
        watching.look()
    stat.write_text(f"procs_running {seen[-1]}\n")
    found = watching.load().why_busy
    assert found is None if why is None else why in str(found)


def test_a_process_that_waits_for_a_processor_is_not_alone(stat: Path) -> None:
    """Of its own processors, say: a container's, or those it is bound to."""
    scheduled(stat, (1000, 1000), (0, 0))
    watching = watch(stat)
    scheduled(stat, (2000, 1000), (0, 0))
    assert watching.load().why_busy is None
    scheduled(stat, (1500, 1020), (500, 20))
    assert watching.load().waiting == pytest.approx(0.04 / 1.04)
    assert watching.load().why_busy is None
    scheduled(stat, (1500, 1100), (500, 100))
    assert watching.load().waiting == pytest.approx(0.2 / 1.2)
    assert "waited for a processor in 17 % of its time" in str(watching.load().why_busy)
    watching.begin()
    assert watching.load().why_busy is None
    assert MOST_WAITING < 0.1


def test_a_system_that_says_nothing_is_not_called_busy(tmp_path: Path) -> None:
    watching = watch(tmp_path / "stat")
    watching.look()
    load = watching.load()
    assert (load.runnable, load.waiting, load.gpu, load.num_gpu_processes) == (None, None, None, None)
    assert load.why_busy is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no /proc/self/schedstat here")
def test_this_machine_says_something() -> None:
    watching, begun = LoadWatch(), time.process_time()
    while time.process_time() - begun < 0.05:
        pass
    load = watching.load()
    assert load.processors == os.cpu_count()
    assert load.runnable is not None
    assert load.runnable >= 1
    assert load.waiting is not None
    assert 0 <= load.waiting <= 1


class FakeDriver:
    """libnvidia-ml with one GPU. `status`: what questions about utilisation are answered with."""

    def __init__(self, per_cent: int, computing: dict[int, int], status: int = 0) -> None:
        self.per_cent, self.computing, self.status = per_cent, computing, status

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 7
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        buffer.value = b"NVIDIA H100"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        buffer.value = b"GPU-1"
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu = self.per_cent
        return self.status

    def nvmlDeviceGetProcessUtilization(self, handle: Any, samples: Any, count: Any, since: Any) -> int:
        if not self.computing:
            return 6  # not found
        for sample, (pid, per_cent) in zip(samples, self.computing.items(), strict=False):
            sample.pid, sample.multiprocessors = pid, per_cent
        count._obj.value = len(self.computing)
        return self.status


def gpu_load(driver: FakeDriver) -> GpuLoad:
    nvml = Nvml(driver)
    return GpuLoad(nvml, nvml.gpus, OWN)


def test_a_gpu_that_computed_before_this_process_did_is_busy(stat: Path) -> None:
    assert "the GPU computed in 97 %" in str(watch(stat, gpu_load(FakeDriver(97, {}))).load().why_busy)
    assert watch(stat, gpu_load(FakeDriver(0, {}))).load().why_busy is None


def test_a_process_that_computes_on_the_gpu_meanwhile_makes_it_busy(stat: Path) -> None:
    driver = FakeDriver(0, {OWN: 90, 77: 20, 78: 0})
    assert watch(stat, gpu_load(driver)).load().why_busy == "1 other processes computed on the GPU"
    driver.computing = {OWN: 90, 78: 0}
    assert watch(stat, gpu_load(driver)).load().why_busy is None


def test_processes_of_another_namespace_are_not_counted() -> None:
    """This one is among them, by a number that it does not know."""
    assert gpu_load(FakeDriver(0, {9001: 90})).num_others() is None
    assert gpu_load(FakeDriver(0, {})).num_others() is None


def test_a_part_of_a_gpu_of_which_the_driver_says_nothing_is_not_called_busy(stat: Path) -> None:
    load = watch(stat, gpu_load(FakeDriver(97, {OWN: 3, 77: 9}, status=3))).load()
    assert (load.gpu, load.num_gpu_processes, load.why_busy) == (None, None, None)


def test_the_gpu_is_found_by_its_number_for_life() -> None:
    nvml = Nvml(FakeDriver(5, {}))
    assert GpuLoad.of(["GPU-1"], nvml) is not None
    assert GpuLoad.of(["1"], nvml) is not None
    assert GpuLoad.of(["2"], nvml) is None
    assert GpuLoad.of([], nvml) is None
    assert GpuLoad.of(["1"], None) is None


def test_a_sample_of_a_process_has_the_driver_s_own_layout() -> None:
    from space_server.machine.nvml import _ProcessUtilization

    assert ctypes.sizeof(_ProcessUtilization) == 32
    assert _ProcessUtilization.multiprocessors.offset == 16
