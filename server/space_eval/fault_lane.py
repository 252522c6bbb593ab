"""One of a server's workers, process after process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from space_eval.bench_server import ServerProcess

_CONNECTED = "03"  # state of a socket in /proc/net/unix


@dataclass(frozen=True)
class Lane:
    """The workers that one supervisor starts, each on the next socket of the same folder."""

    server: ServerProcess
    folder: Path

    async def worker(self) -> int:
        """The newest process; waits for one where there is none."""
        async with asyncio.timeout(60):
            while not (pids := self._pids()):  # noqa: ASYNC110  a process is no event
                await asyncio.sleep(0.01)
        return pids[-1]

    def is_connected(self) -> bool:
        """Somebody talks to the newest process."""
        pids = self._pids()
        return bool(pids) and socket_of(pids[-1]) in _connected()

    def _pids(self) -> list[int]:
        return [pid for pid in self.server.worker_pids() if Path(socket_of(pid)).parent == self.folder]


def lanes_of(server: ServerProcess) -> list[Lane]:
    """One for each worker that runs."""
    return [Lane(server, Path(socket_of(pid)).parent) for pid in server.worker_pids()]


def socket_of(worker: int) -> str:
    """The path of the Unix socket that a worker listens on; "" where the process is gone, or just begins."""
    try:
        words = Path(f"/proc/{worker}/cmdline").read_bytes().decode().split("\0")
        return words[words.index("--listen") + 1].removeprefix("unix:")
    except (OSError, ValueError):
        return ""


def _connected() -> set[str]:
    """Paths of the Unix sockets on which somebody has been let in."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    return {words[7] for words in lines if len(words) > 7 and words[5] == _CONNECTED}
