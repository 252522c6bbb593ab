"""An engine and its workers on one table: no sockets, no event loop, no clock but one that is turned by hand."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Protocol

from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.engine import MAX_LAG, Engine
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.request.sequence import WorkerSequence
from space_router.engine.scheduling.scheduler import Scheduler
from space_router.engine.workers.exit_cause import ExitCause
from space_router.engine.workers.worker_connection import WorkerConnection
from space_router.metrics import Metrics


class TableWorker(Protocol):
    """One incarnation of a worker that is stepped by calls."""

    def hello(self) -> worker_pb2.Hello: ...

    def apply(self, command: worker_pb2.Command) -> None: ...

    def step(self) -> worker_pb2.StepReport | None:
        """One step, or None where nothing is to be done or said. `report_no` is set by the caller."""


class OldestPreempted(AssertionError):
    """The one that everybody relies on to finish was taken."""


class TableSeat(WorkerConnection):
    """A seat whose worker hears at once, and is heard `delay` steps late."""

    def __init__(self, engine: Engine, new_worker: Callable[[], TableWorker], delay: int) -> None:
        self.scheduler: Scheduler | None = None
        self.num_incarnations = self.num_crashes = 0
        self.worker: TableWorker | None = None
        self._engine, self._new_worker, self._delay = engine, new_worker, delay
        self._inbox: list[worker_pb2.Command] = []
        self._mail: deque[worker_pb2.StepReport | None] = deque()
        self._num_reports = 0

    def flush(self) -> None:
        if self.scheduler is not None:
            self._inbox += self.scheduler.take_commands()

    def start(self) -> None:
        """A fresh worker sits down."""
        self.worker = self._new_worker()
        facts = WorkerModelFacts.from_hello(self.worker.hello())
        self._engine.check_compatible(facts)
        scheduler = self._engine.new_scheduler(facts)
        _watch(scheduler)
        self._inbox, self._mail, self._num_reports = [], deque(), 0
        start = worker_pb2.Start(
            protocol_major=1,
            max_prefill_rows=self._engine.config.max_prefill_rows,
            max_draft_length=scheduler.max_draft_length,
        )
        self.worker.apply(worker_pb2.Command(start=start))
        self.scheduler = scheduler
        self.num_incarnations += 1
        self._engine.worker_up(self)

    def die(self, cause: ExitCause) -> None:
        """The worker is gone with everything it has not said yet."""
        if self.scheduler is not None:
            lost, self.scheduler, self.worker = self.scheduler, None, None
            self._engine.worker_lost(self, lost, cause)

    def step(self) -> None:
        """The worker heeds what it was told, steps, and is heard."""
        if self.worker is None:
            return
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            self.worker.apply(command)
        report = self.worker.step()
        if report is not None:
            self._num_reports += 1
            report.report_no = self._num_reports
        self._mail.append(report)
        if len(self._mail) > self._delay and (heard := self._mail.popleft()) is not None:
            self._engine.worker_report(self, heard)


class Tabletop:
    """Turned tick by tick: time goes on, timers ring, every worker steps once.

    table = Tabletop(lambda: ScriptedTableWorker(script)); stream = table.engine.submit(request); table.tick()
    """

    def __init__(
        self,
        new_worker: Callable[[], TableWorker],
        *,
        num_workers: int = 1,
        delay: int = 0,
        config: ServeConfig | None = None,
        metrics: Metrics | None = None,
        max_lag: int = MAX_LAG,
    ) -> None:
        """`delay`: steps that a report takes to be heard; `metrics`: to be shared by many tables, for speed."""
        self.now = 0.0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._num_timers = 0
        self.engine = Engine(
            config or ServeConfig(),
            metrics or Metrics(),
            max_lag=max_lag,
            clock=lambda: self.now,
            call_later=self._call_later,
        )
        self.connections = [TableSeat(self.engine, new_worker, delay) for _ in range(num_workers)]
        self.engine.connections[:] = self.connections
        for connection in self.connections:
            connection.start()

    def tick(self, seconds: float = 0.001) -> None:
        """So many seconds pass, and every worker steps."""
        self.now += seconds
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[-1].ring()
        for connection in self.connections:
            connection.step()

    def _call_later(self, seconds: float, action: Callable[[], None]) -> _Timer:
        timer = _Timer(action)
        self._num_timers += 1
        heapq.heappush(self._timers, (self.now + seconds, self._num_timers, timer))
        return timer


class _Timer:
    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def ring(self) -> None:
        if self._action is not None:
            self._action()


def _watch(scheduler: Scheduler) -> None:
    """Raise where the oldest of those that can go on is preempted."""
    preempt = scheduler._preempt

    def watched(victim: WorkerSequence) -> None:
        going_on = [s for s in scheduler.running if not (s.out_of_slots and s.live.lagging)]
        if victim is min(going_on, key=lambda s: s.live.age, default=None):
            raise OldestPreempted(f"request {victim.live.request.request_id} is the oldest, and was preempted")
        preempt(victim)

    scheduler._preempt = watched  # type: ignore[assignment,method-assign]
