"""Workers of one machine share its sensors: each joule is counted once."""

from __future__ import annotations

from collections.abc import Iterable

from space_proto import worker_pb2


class EnergyShare:
    """Who speaks for a sensor: the first worker that names it, until it is lost."""

    def __init__(self) -> None:
        self._speaker: dict[tuple[str, str], object] = {}  # machine and device -> worker

    def counted(self, worker: object, said: Iterable[worker_pb2.Energy]) -> Iterable[tuple[str, float]]:
        """Device and joules, of the sensors that this worker speaks for."""
        for energy in said:
            if self._speaker.setdefault((energy.machine, energy.device), worker) is worker:
                yield energy.device, max(0.0, energy.joules)

    def lost(self, worker: object) -> None:
        """Somebody else may speak for its sensors now."""
        self._speaker = {sensor: speaker for sensor, speaker in self._speaker.items() if speaker is not worker}
