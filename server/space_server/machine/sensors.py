"""What this machine says of itself: GPUs by NVML, the energy that it draws, and other load while steps are measured.

Energy is read from RAPL counters of processors and NVML counters of GPUs, where they are readable. RAPL is the kernel's
powercap folder, in microjoules that wrap at `max_energy_range_uj`. Since 2020 only root may read them, and containers
do not see them; see docker/README.md.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from space_common.worker_settings import POWERCAP
from space_proto import worker_pb2 as pb

LIBRARY = "libnvidia-ml.so.1"


_NOT_FOUND = 6
"""NVML's status for a query without entries."""

_MOST_SAMPLES = 512


class NvmlError(RuntimeError):
    """NVML returned an error; the message is its own."""

    def __init__(self, message: str, status: int = 0) -> None:
        """`status`: NVML's return code; 0 if it was not called."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, usable by this process or not."""

    index: int
    name: str
    uuid: str  # GPU-…
    memory: int  # bytes
    handle: ctypes.c_void_p


class Nvml:
    """The initialized library. Every method raises NvmlError if the driver refuses."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._ask("nvmlInit_v2")

    @classmethod
    def open(cls, load: Callable[[str], Any] = ctypes.CDLL) -> Nvml | None:
        """Load the library; None without a driver that answers."""
        try:
            return cls(load(LIBRARY))
        except (OSError, NvmlError):
            return None

    @property
    def driver(self) -> str:
        """The driver's version, such as 580.65.06."""
        return self._text("nvmlSystemGetDriverVersion")

    @property
    def cuda(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports."""
        number = ctypes.c_int()
        self._ask("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    @property
    def gpus(self) -> list[Gpu]:
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def joules(self, gpu: Gpu) -> float:
        """Return joules drawn since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu.handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def share_computing(self, gpu: Gpu) -> float:
        """Return the share of the last moments (up to a second) in which the GPU computed for any process."""
        rates = _Utilization()
        self._ask("nvmlDeviceGetUtilizationRates", gpu.handle, ctypes.byref(rates))
        return int(rates.gpu) / 100

    def computing_pids(self, gpu: Gpu) -> set[int]:
        """Return the processes that computed in the last seconds, by the driver's PIDs."""
        count, never = ctypes.c_uint(_MOST_SAMPLES), ctypes.c_ulonglong(0)
        samples = (_ProcessUtilization * _MOST_SAMPLES)()
        try:
            self._ask("nvmlDeviceGetProcessUtilization", gpu.handle, samples, ctypes.byref(count), never)
        except NvmlError as error:
            if error.status == _NOT_FOUND:
                return set()
            raise
        return {sample.pid for sample in samples[: count.value] if sample.multiprocessors}

    def _gpu(self, index: int) -> Gpu:
        handle, memory = ctypes.c_void_p(), _Memory()
        self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        name, uuid = self._text("nvmlDeviceGetName", handle), self._text("nvmlDeviceGetUUID", handle)
        return Gpu(index, name, uuid, memory.total, handle)

    def _text(self, function: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._ask(function, *arguments, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def _ask(self, function: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise NvmlError(f"this driver has no {function}") from None
        if status:
            raise NvmlError(f"{function} gave status {status}", status)


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _ProcessUtilization(ctypes.Structure):
    """nvmlProcessUtilizationSample_t: microseconds since 1970, per cent."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("when", ctypes.c_ulonglong),
        ("multiprocessors", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


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
