"""Other work on the machine is seen while steps are measured, and nothing is made up where a system does not say."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from space_common.nvml import Nvml
from space_server.machine.sensors import MOST_WAITING, GpuLoad, LoadWatch

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
    from space_common.nvml import _ProcessUtilization

    assert ctypes.sizeof(_ProcessUtilization) == 32
    assert _ProcessUtilization.multiprocessors.offset == 16


pytestmark = pytest.mark.slow

NUM_THREADS, NUM_BUSY = 2, 4
FAIR = NUM_THREADS / (NUM_THREADS + NUM_BUSY)
"""What two of six runnable threads get of the machine, each of the two processors having three."""
LEAST = 0.8 * FAIR


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.timeout(280)
def test_a_worker_among_four_busy_processes_keeps_its_fair_share(tmp_path: Path, batch: int) -> None:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < NUM_THREADS:
        pytest.skip(f"needs {NUM_THREADS} processors whose load is known")
    command = [sys.executable, "-P", __file__, str(tmp_path / "model"), str(batch)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # with the folders that pytest adds
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["compiled"]:
        pytest.skip("the compiled operations are not to be had here")
    assert found["texts"] == 1, "texts differ"
    assert median(found["busy"]) >= LEAST * median(found["quiet"]), found


def _measure(folder: Path, batch: int) -> dict[str, Any]:
    """Tokens per second, by turns quiet and busy, and how many different texts there were."""
    from space_kernels.build.cpu_library import cpu_library
    from space_model.loading.load import load_model
    from space_server.machine.threads import run_in_thread
    from tiny_checkpoints import tiny_checkpoint

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_THREADS])  # all that is started from here on
    tiny_checkpoint(
        folder, vocab_size=8192, hidden_size=576, num_layers=16, num_heads=9, kv_heads=3, head_dim=64, num_masks=0,
        dtype="bfloat16", words=True,
    )  # fmt: skip
    model = run_in_thread(lambda: load_model(folder, dtype="bfloat16", num_threads=NUM_THREADS))
    found: dict[str, list[float]] = {"quiet": [], "busy": []}
    texts = set()
    for _ in range(3):
        for name, num_busy in (("quiet", 0), ("busy", NUM_BUSY)):
            with ExitStack() as stack:
                for _ in range(num_busy):
                    stack.callback(_end, subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                rate, text = _run(model, batch)
            found[name].append(rate)
            texts.add(text)
    return {**found, "texts": len(texts), "compiled": cpu_library() is not None}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _run(model: Any, batch: int, num_steps: int = 120) -> tuple[float, str]:
    """Tokens per second of this many decode steps, and all ids."""
    from space_proto import worker_pb2 as pb
    from space_server.speculation.controller import FixedLayout
    from space_server.worker import Worker
    from space_server.worker_messages import PROTOCOL_MAJOR

    length, pages = 32, 16
    worker = Worker(
        model, num_blocks=batch * pages, block_size=16, max_sequences=batch, max_prefill_rows=batch * length,
        controller=FixedLayout.full(0),
    )  # fmt: skip
    worker.apply(pb.Command(start=pb.Start(protocol_major=PROTOCOL_MAJOR)))
    for number in range(batch):
        ids = [(7 * number + 11 * place) % 8000 + 100 for place in range(length)]
        admit = pb.Admit(
            seq_id=number + 1, ids=ids, num_prompt=length, pages=range(number * pages, (number + 1) * pages),
            limits=pb.Limits(max_tokens=num_steps + 20),
        )  # fmt: skip
        worker.apply(pb.Command(admit=admit))
    reported: list[list[int]] = []
    for step in range(num_steps + 10):
        if step == 10:
            begun = time.perf_counter()
        report = worker.step()
        assert report is not None
        reported.append([token for sequence in report.sequences for token in sequence.tokens])
    return batch * num_steps / (time.perf_counter() - begun), json.dumps(reported)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]))) + "\n")
