"""Whether anything else computes on this machine while steps are measured: what a busy machine takes is not kept.

watch = LoadWatch(gpus=...)      before the first work on a GPU
watch.begin(); watch.look() ...  beside what is measured
watch.load().why_busy            None: nothing else was in the way
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
"""Share of the time in which this process could run and got no processor: half of what passes may differ by."""

MOST_COMPUTING = 0.05
"""Share of the time in which a GPU computed for others: a display takes less, a program that computes takes more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MachineLoad:
    """What else went on; None: this system does not say."""

    processors: int
    runnable: float | None = None  # tasks that could run at once, this process's among them: the middle look
    waiting: float | None = None  # share of its time in which this process waited for a processor
    gpu: float | None = None  # share of the time in which the GPU computed before this process used it
    num_gpu_processes: int | None = None  # others that computed on the GPU meanwhile

    @property
    def why_busy(self) -> str | None:
        """In what way the machine was busy; None: it was not."""
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
        """For the file of costs."""
        return {
            "processors": self.processors,
            "runnable_tasks": self.runnable,
            "share_waiting_for_a_processor": None if self.waiting is None else round(self.waiting, 4),
            "gpu_computing_before": self.gpu,
            "other_gpu_processes": self.num_gpu_processes,
        }


class GpuLoad:
    """Who computes on the GPUs of this worker, as far as the driver says."""

    def __init__(self, nvml: Nvml, gpus: Sequence[Gpu], pid: int | None = None) -> None:
        """To be made before this process computes there: what they do now is done for others."""
        self._nvml, self._gpus, self._pid = nvml, gpus, os.getpid() if pid is None else pid
        self.before = self._most_busy()

    @classmethod
    def of(cls, uuids: Sequence[str], nvml: Nvml | None) -> GpuLoad | None:
        """None where there is no GPU, or no driver that answers."""
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
        """Processes beside this one that have computed lately; None: the driver does not say, or names processes by
        numbers of another namespace, among which this one is not to be found.
        """
        try:
            computing = set().union(*(self._nvml.computing_pids(gpu) for gpu in self._gpus))
        except NvmlError:
            return None
        return len(computing - {self._pid}) if self._pid in computing else None


class LoadWatch:
    """Looks at the machine while steps are measured."""

    def __init__(
        self,
        gpu: GpuLoad | None = None,
        *,
        processors: int | None = None,
        stat: Path = Path("/proc/stat"),
        tasks: Path = Path("/proc/self/task"),
    ) -> None:
        self._gpu, self._stat, self._tasks = gpu, stat, tasks
        self._processors = processors or os.cpu_count() or 1
        self.begin()

    def begin(self) -> None:
        """What was seen until now does not count."""
        self._runnable: list[int] = []
        self._run, self._waited = self._scheduled()

    def look(self) -> None:
        """How many tasks could run just now: to be called while this process does nothing else, now and then."""
        with suppress(OSError, ValueError):
            for line in self._stat.read_text(encoding="ascii").splitlines():
                name, _, number = line.partition(" ")
                if name == "procs_running":
                    self._runnable.append(int(number))

    def load(self) -> MachineLoad:
        """What went on since the beginning."""
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
        """Nanoseconds that all threads of this process have run, and could have run but waited for a processor."""
        run = waited = 0
        with suppress(OSError, ValueError):
            for task in self._tasks.iterdir():
                with suppress(OSError, ValueError):  # a thread that has ended meanwhile
                    words = (task / "schedstat").read_text(encoding="ascii").split()
                    run, waited = run + int(words[0]), waited + int(words[1])
        return run, waited
