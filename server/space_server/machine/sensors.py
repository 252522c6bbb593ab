"""What this machine says of itself: GPUs by NVML, the energy that it draws, and other load while steps are measured.

Energy is read from RAPL counters of processors and NVML counters of GPUs, where they are readable. RAPL is the kernel's
powercap folder, in microjoules that wrap at `max_energy_range_uj`. Since 2020 only root may read them, and containers
do not see them; see docker/README.md.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from space_common.nvml import Gpu, Nvml, NvmlError
from space_common.worker.settings import POWERCAP
from space_proto import worker_pb2 as pb

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


class Sensor(Protocol):
    """The energy counter of one device."""

    @property
    def device(self) -> str: ...

    def joules(self) -> float:
        """Return joules since some fixed moment; never decreases. Raises OSError or NvmlError."""


class RaplSensor:
    """One RAPL zone. Its counter wraps, so read it every minute."""

    def __init__(self, zone: Path, device: str) -> None:
        self.device = device
        self._counter = zone / "energy_uj"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = int(self._counter.read_text())
        self._total = self._last

    def joules(self) -> float:
        now = int(self._counter.read_text())
        self._total += now - self._last if now >= self._last else now + self._range + 1 - self._last
        self._last = now
        return self._total / 1e6


@dataclass(frozen=True)
class GpuSensor:
    """One GPU's energy counter."""

    nvml: Nvml
    gpu: Gpu

    @property
    def device(self) -> str:
        return f"gpu-{self.gpu.index}"

    def joules(self) -> float:
        return self.nvml.joules(self.gpu)


class Meter:
    """Returns the joules of each sensor since the last call. A sensor that fails is dropped."""

    def __init__(self, sensors: Sequence[Sensor], machine: str | None = None) -> None:
        self._machine = this_machine() if machine is None else machine
        self._last = [(sensor, reading) for sensor in sensors if (reading := _read(sensor)) is not None]

    @property
    def devices(self) -> list[str]:
        return [sensor.device for sensor, _ in self._last]

    def drawn(self) -> list[pb.Energy]:
        found, readings = [], []
        for sensor, last in self._last:
            reading = _read(sensor)
            if reading is not None:
                readings.append((sensor, reading))
                found.append(pb.Energy(machine=self._machine, device=sensor.device, joules=reading - last))
        self._last = readings
        return found


def find_sensors(
    uuids: Sequence[str], *, powercap: Path = Path(POWERCAP), open_nvml: Callable[[], Nvml | None] = Nvml.open
) -> list[Sensor]:
    """Return the readable sensors: of every processor and its memory, and of the GPUs with these UUIDs."""
    sensors: list[Sensor] = list(_processors(powercap))
    if uuids and (nvml := open_nvml()) is not None:
        wanted = {uuid.removeprefix("GPU-") for uuid in uuids}
        try:
            sensors += [GpuSensor(nvml, gpu) for gpu in nvml.gpus if gpu.uuid.removeprefix("GPU-") in wanted]
        except NvmlError as error:
            _log.info("no energy of GPUs: %s", error)
    return sensors


def _processors(powercap: Path) -> list[RaplSensor]:
    """Yield packages and memory zones: a package includes its cores, and `psys` includes everything again."""
    found = []
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's processors are under this name too
        try:
            device = _device(zone)
            if device is not None:
                found.append(RaplSensor(zone, device))
        except (OSError, ValueError) as error:
            _log.info("no energy of %s: %s", zone.name, error)
    return found


def _device(zone: Path) -> str | None:
    """Return `package-0` or `package-0-dram`; None for a zone within another."""
    name = (zone / "name").read_text().strip()
    if re.fullmatch(r"intel-rapl:\d+", zone.name):
        return name if name.startswith("package") else None
    if name != "dram":
        return None
    package = (zone.parent / zone.name.rpartition(":")[0] / "name").read_text().strip()
    return f"{package}-dram"


def _read(sensor: Sensor) -> float | None:
    try:
        return sensor.joules()
    except (OSError, ValueError, NvmlError) as error:
        _log.warning("the energy of %s is no longer counted: %s", sensor.device, error)
        return None


def this_machine() -> str:
    """Return an id that is the same in every process and container of a machine."""
    try:
        return _BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return platform.node()


MOST_WAITING = 0.05
"""Largest share of time that this process may wait for a processor: half of what passes may differ by."""

MOST_COMPUTING = 0.05
"""Largest share of time that a GPU may compute for others: a display takes less, a computing program more."""


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
    """Samples the machine's load while steps are measured; costs measured on a busy machine are not kept.

    watch = LoadWatch(gpus)          before the first work on a GPU
    watch.begin(); watch.look() ...  during the measurement
    watch.load().why_busy            None: the machine was otherwise idle
    """

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
