"""Energy drawn by this machine, from RAPL counters of processors and NVML counters of GPUs, where they are readable.

RAPL: the kernel's powercap folder, in microjoules that wrap at `max_energy_range_uj`. Since 2020 only root may read
them, and containers do not see them; see docker/README.md.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from space_common.worker_settings import POWERCAP
from space_proto import worker_pb2 as pb

from space_server.machine.nvml import Gpu, Nvml, NvmlError

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
