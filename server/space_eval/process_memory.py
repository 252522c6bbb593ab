"""What processes hold in memory: pages of their own, and pages of files, which several may share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Held:
    """Bytes of one moment."""

    own: int = 0  # of no file: what a machine must have
    files: int = 0  # of files, which can go and come again; counted for each who has them

    @property
    def total(self) -> int:
        return self.own + self.files

    def __add__(self, other: Held) -> Held:
        return Held(self.own + other.own, self.files + other.files)

    @classmethod
    def by(cls, pid: int, processes: Path = Path("/proc")) -> Held:
        """Of a process (Linux; nothing elsewhere, and for one that is gone)."""
        try:
            lines = (processes / str(pid) / "smaps_rollup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return cls()
        fields = {line.partition(":")[0]: line.split() for line in lines}
        own, whole = (int(fields[name][1]) * 1024 if name in fields else 0 for name in ("Anonymous", "Rss"))
        return cls(own, whole - own)


class MemoryWatch:
    """Looks again and again at some processes for as long as the block lasts; the most they held together."""

    def __init__(self, processes: Callable[[], Iterable[int]], period: float = 0.05) -> None:
        self.most = Held()  # together, at the moment of the greatest sum
        self.each: dict[int, Held] = {}  # by process, its own greatest moment
        self.num_looks = 0
        self._processes, self._period = processes, period
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            begun = time.monotonic()
            now = {pid: Held.by(pid) for pid in self._processes()}
            together = sum(now.values(), Held())
            self.most = max(self.most, together, key=lambda held: held.total)
            for pid, held in now.items():
                self.each[pid] = max(self.each.get(pid, Held()), held, key=lambda one: one.total)
            self.num_looks += 1
            if self._over.wait(max(0.0, self._period - (time.monotonic() - begun))):
                return
