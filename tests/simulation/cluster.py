"""The real engine and real workers in virtual time: what happens next is the earliest of what is due."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.request.request_state import RequestState
from space_router.engine.scheduling.scheduler import Scheduler
from space_router.engine.workers.exit_cause import ExitCause
from space_router.engine.workers.worker_connection import WorkerConnection
from space_router.metrics import Metrics
from space_server.worker_messages.hello import PROTOCOL_MAJOR

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


class SimulatedConnection(WorkerConnection):
    """A worker whose messages take `cluster.link` seconds each way, and which steps whenever it has work."""

    def __init__(self, cluster: SimulatedCluster, new_worker: Callable[[], SimulatedWorker]) -> None:
        self.scheduler: Scheduler | None = None
        self.num_incarnations = self.num_crashes = 0
        self.worker: SimulatedWorker | None = None
        self._cluster, self._new_worker = cluster, new_worker
        self._inbox: deque[tuple[float, list[worker_pb2.Command]]] = deque()
        self._is_stepping = False
        self._num_reports = 0

    def start(self) -> None:
        """Connect a fresh worker."""
        engine = self._cluster.engine
        self.worker = self._new_worker()
        self.num_incarnations += 1
        facts = WorkerModelFacts.from_hello(self.worker.worker.hello(str(self.num_incarnations)))
        engine.check_compatible(facts)
        self.scheduler = engine.new_scheduler(facts)
        self._inbox, self._is_stepping, self._num_reports = deque(), False, 0
        start = worker_pb2.Start(
            protocol_major=PROTOCOL_MAJOR,
            max_prefill_rows=engine.config.max_prefill_rows,
            max_draft_length=self.scheduler.max_draft_length,
        )
        self.worker.worker.apply(worker_pb2.Command(start=start))
        engine.worker_up(self)

    def die(self) -> None:
        """Lose the worker with everything that it has not reported yet."""
        if self.scheduler is not None:
            lost, self.scheduler, self.worker = self.scheduler, None, None
            self._cluster.engine.worker_lost(self, lost, ExitCause.EXTERNAL)

    def flush(self) -> None:
        if self.scheduler is not None and (commands := self.scheduler.take_commands()):
            due = self._cluster.now + self._cluster.link
            self._inbox.append((due, commands))
            if not self._is_stepping:
                self._cluster.at(due, self._step)

    def _step(self) -> None:
        if self._is_stepping or self.worker is None:
            return
        now, worker, inbox = self._cluster.now, self.worker, self._inbox
        while inbox and inbox[0][0] <= now:
            for command in inbox.popleft()[1]:
                worker.worker.apply(command)
        worker.clock.now = now
        report = worker.worker.step()
        if report is not None:
            self._is_stepping = True
            self._num_reports += 1
            report.report_no = self._num_reports
            self._cluster.at(worker.clock.now, lambda: self._stepped(worker, report))
        elif inbox:
            self._cluster.at(inbox[0][0], self._step)

    def _stepped(self, worker: SimulatedWorker, report: worker_pb2.StepReport) -> None:
        if worker is not self.worker:
            return
        self._is_stepping = False
        if self._cluster.link:
            self._cluster.at(self._cluster.now + self._cluster.link, lambda: self._receive(worker, report))
        else:
            self._receive(worker, report)
        self._step()

    def _receive(self, worker: SimulatedWorker, report: worker_pb2.StepReport) -> None:
        if worker is not self.worker or self.scheduler is None:
            return
        running = self.scheduler.sequences
        lives = [running[part.seq_id].live for part in report.sequences]
        self._cluster.engine.worker_report(self, report)
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
        self.now = 0.0
        self.link = link
        self.on_report = on_report
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_actions = 0
        self.engine = Engine(config, NoMetrics(), clock=lambda: self.now, call_later=self._call_later)
        self.connections = [SimulatedConnection(self, new_worker) for _ in range(num_workers)]
        self.engine.connections[:] = self.connections
        for connection in self.connections:
            connection.start()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` at that time."""
        self._num_actions += 1
        heapq.heappush(self._due, (seconds, self._num_actions, action))

    def run(self, until: float) -> None:
        """Let time pass up to `until` seconds, or until nothing is due any more."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, action = heapq.heappop(due)
            action()
        if due:
            self.now = until

    def _call_later(self, seconds: float, action: Callable[[], None]) -> SimulatedTimer:
        timer = SimulatedTimer(action)
        self.at(self.now + seconds, timer.fire)
        return timer


class SimulatedTimer:
    """An action that is due, unless it is cancelled."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def fire(self) -> None:
        if self._action is not None:
            self._action()
