"""Energy accounting: workers on one machine report the same sensors, and each joule is counted once."""

from __future__ import annotations

from collections.abc import Iterable

from space_proto import worker_pb2


class EnergyShare:
    """Assigns each sensor to the first worker that reports it, until that worker is lost."""

    def __init__(self) -> None:
        self._reporter: dict[tuple[str, str], object] = {}  # machine and device -> worker

    def counted(self, worker: object, energies: Iterable[worker_pb2.Energy]) -> Iterable[tuple[str, float]]:
        """Yield device and joules of the sensors that are assigned to this worker."""
        for energy in energies:
            if self._reporter.setdefault((energy.machine, energy.device), worker) is worker:
                yield energy.device, max(0.0, energy.joules)

    def lost(self, worker: object) -> None:
        """Free the sensors of a lost worker."""
        self._reporter = {sensor: reporter for sensor, reporter in self._reporter.items() if reporter is not worker}
