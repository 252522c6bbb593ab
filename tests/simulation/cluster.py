"""The real engine and real workers in virtual time: what happens next is the earliest of what is due."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from doubles.router.tabletop import OfflineConnection, VirtualTime
from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.request.request_state import RequestState
from space_router.metrics import Metrics

from simulation.worker import SimulatedWorker

ReportListener = Callable[[worker_pb2.StepReport, Sequence[RequestState]], None]
"""Called with a report and the requests that its parts are about, once the engine has processed it."""


class NoMetrics(Metrics):
    """Metrics that are never scraped: recording them costs next to nothing."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _SERIES


class _Series:
    def labels(self, **labels: str) -> _Series:
        return self

    def inc(self, amount: float = 1) -> None:
        pass

    def observe(self, value: float, times: int = 1) -> None:
        pass

    def set(self, value: float) -> None:
        pass


_SERIES = _Series()


class SimulatedConnection(OfflineConnection):
    """A worker whose messages take `cluster.link` seconds each way, and which steps whenever it has work."""

    def __init__(self, cluster: SimulatedCluster, new_worker: Callable[[], SimulatedWorker]) -> None:
        super().__init__(cluster.engine)
        self.worker: SimulatedWorker | None = None
        self._cluster, self._new_worker = cluster, new_worker
        self._inbox: deque[tuple[float, list[worker_pb2.Command]]] = deque()
        self._is_stepping = False

    def start(self) -> None:
        """Connect a fresh worker."""
        self.worker = self._new_worker()
        _, start = self.welcome(self.worker.worker.hello(str(self.num_incarnations + 1)))
        self._inbox, self._is_stepping = deque(), False
        self.worker.worker.apply(start)
        self._engine.worker_up(self)

    def flush(self) -> None:
        if self.scheduler is not None and (commands := self.scheduler.take_commands()):
            due = self._cluster.time.now + self._cluster.link
            self._inbox.append((due, commands))
            if not self._is_stepping:
                self._cluster.time.at(due, self._step)

    def _step(self) -> None:
        if self._is_stepping or self.worker is None:
            return
        now, worker, inbox = self._cluster.time.now, self.worker, self._inbox
        while inbox and inbox[0][0] <= now:
            for command in inbox.popleft()[1]:
                worker.worker.apply(command)
        worker.clock.now = now
        report = worker.worker.step()
        if report is not None:
            self._is_stepping = True
            self.numbered(report)
            self._cluster.time.at(worker.clock.now, lambda: self._stepped(worker, report))
        elif inbox:
            self._cluster.time.at(inbox[0][0], self._step)

    def _stepped(self, worker: SimulatedWorker, report: worker_pb2.StepReport) -> None:
        if worker is not self.worker:
            return
        self._is_stepping = False
        if self._cluster.link:
            self._cluster.time.call_later(self._cluster.link, lambda: self._receive(worker, report))
        else:
            self._receive(worker, report)
        self._step()

    def _receive(self, worker: SimulatedWorker, report: worker_pb2.StepReport) -> None:
        if worker is not self.worker or self.scheduler is None:
            return
        running = self.scheduler.sequences
        lives = [running[part.seq_id].live for part in report.sequences]
        self._engine.worker_report(self, report)
        self._cluster.on_report(report, lives)


class SimulatedCluster:
    """One router's engine, its workers, and time with everything that is due."""

    def __init__(
        self,
        new_worker: Callable[[], SimulatedWorker],
        on_report: ReportListener,
        *,
        num_workers: int,
        config: ServeConfig,
        link: float,
    ) -> None:
        """`link`: seconds that a message takes between router and worker."""
        self.time = VirtualTime()
        self.link = link
        self.on_report = on_report
        self.engine = Engine(config, NoMetrics(), clock=lambda: self.time.now, call_later=self.time.call_later)
        self.connections = [SimulatedConnection(self, new_worker) for _ in range(num_workers)]
        self.engine.connections[:] = self.connections
        for connection in self.connections:
            connection.start()
