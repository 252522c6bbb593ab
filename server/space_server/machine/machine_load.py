"""Detects other load on this machine while steps are measured: costs measured on a busy machine are not kept.

watch = LoadWatch(gpus=...)      before the first work on a GPU
watch.begin(); watch.look() ...  during the measurement
watch.load().why_busy            None: the machine was otherwise idle
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from space_server.machine.nvml import Gpu, Nvml, NvmlError

MOST_WAITING = 0.05
"""Largest share of time that this process may wait for a processor: half of what passes may differ by."""

MOST_COMPUTING = 0.05
"""Largest share of time that a GPU may compute for others: a display takes less, a computing program more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MachineLoad:
    """Other load; None where the system does not say."""

    processors: int
    runnable: float | None = None  # runnable tasks, including this process's: the median look
    waiting: float | None = None  # share of the time this process waited for a processor
    gpu: float | None = None  # share of the time the GPU computed before this process used it
    num_gpu_processes: int | None = None  # other processes that computed on the GPU

    @property
    def why_busy(self) -> str | None:
        """Say how the machine was busy; None: it was not."""
        if self.runnable is not None and self.runnable > self.processors:
            return f"{self.runnable:g} tasks could run at once on {self.processors} processors"
        if self.waiting is not None and self.waiting > MOST_WAITING:
            return f"this process waited for a processor in {100 * self.waiting:.0f} % of its time"
        if self.gpu is not None and self.gpu > MOST_COMPUTING:
            return f"the GPU computed in {100 * self.gpu:.0f} % of the time before this process used it"
        if self.num_gpu_processes:
            return f"{self.num_gpu_processes} other processes computed on the GPU"
        return None

    def as_json(self) -> dict[str, float | None]:
        """Return the fields for the cost file."""
        return {
            "processors": self.processors,
            "runnable_tasks": self.runnable,
            "share_waiting_for_a_processor": None if self.waiting is None else round(self.waiting, 4),
            "gpu_computing_before": self.gpu,
            "other_gpu_processes": self.num_gpu_processes,
        }


class GpuLoad:
    """Other processes' load on this worker's GPUs, as far as the driver says."""

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu], pid: int | None = None) -> None:
        """Create before this process uses the GPUs: their load at that time is other processes'."""
        self._nvml, self._gpus, self._pid = nvml, gpus, os.getpid() if pid is None else pid
        self.before = self._most_busy()

    @classmethod
    def of(cls, uuids: Sequence[str], nvml: Nvml | None) -> GpuLoad | None:
        """Return None without a GPU or a driver that answers."""
        if nvml is None or not uuids:
            return None
        wanted = {uuid.removeprefix("GPU-") for uuid in uuids}
        try:
            found = [gpu for gpu in nvml.gpus if gpu.uuid.removeprefix("GPU-") in wanted]
        except NvmlError as error:
            _log.info("what else computes on the GPU is not known: %s", error)
            return None
        return cls(nvml, found) if found else None

    def _most_busy(self) -> float | None:
        try:
            return max(self._nvml.share_computing(gpu) for gpu in self._gpus)
        except NvmlError as error:  # such as for a part of a GPU (MIG)
            _log.info("what else computes on the GPU is not known: %s", error)
            return None

    def num_others(self) -> int | None:
        """Other processes that computed recently; None if the driver does not say, or names processes in another PID
        namespace, where this one cannot be found."""
        try:
            computing = set().union(*(self._nvml.computing_pids(gpu) for gpu in self._gpus))
        except NvmlError:
            return None
        return len(computing - {self._pid}) if self._pid in computing else None


class LoadWatch:
    """Samples the machine's load while steps are measured."""

    def __init__(
        self, gpu: GpuLoad | None = None, *, processors: int | None = None, stat: Path = Path("/proc/stat"),
        tasks: Path = Path("/proc/self/task"),
    ) -> None:  # fmt: skip
        self._gpu, self._stat, self._tasks = gpu, stat, tasks
        self._processors = processors or os.cpu_count() or 1
        self.begin()

    def begin(self) -> None:
        """Discard what was sampled so far."""
        self._runnable: list[int] = []
        self._run, self._waited = self._scheduled()

    def look(self) -> None:
        """Sample the number of runnable tasks. Call now and then, while this process does nothing else."""
        with suppress(OSError, ValueError):
            for line in self._stat.read_text(encoding="ascii").splitlines():
                name, _, number = line.partition(" ")
                if name == "procs_running":
                    self._runnable.append(int(number))

    def load(self) -> MachineLoad:
        """Return the load since `begin`."""
        self.look()
        run, waited = self._scheduled()
        run, waited = run - self._run, waited - self._waited
        return MachineLoad(
            self._processors,
            float(statistics.median(self._runnable)) if self._runnable else None,
            waited / (run + waited) if run > 0 and waited >= 0 else None,
            None if self._gpu is None else self._gpu.before,
            None if self._gpu is None else self._gpu.num_others(),
        )

    def _scheduled(self) -> tuple[int, int]:
        """Return the nanoseconds that this process's threads have run, and have waited for a processor."""
        run = waited = 0
        with suppress(OSError, ValueError):
            for task in self._tasks.iterdir():
                with suppress(OSError, ValueError):  # a thread that has ended meanwhile
                    words = (task / "schedstat").read_text(encoding="ascii").split()
                    run, waited = run + int(words[0]), waited + int(words[1])
        return run, waited
