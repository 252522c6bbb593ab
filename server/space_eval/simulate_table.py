"""The real engine and real workers in virtual time: what happens next is the earliest of what is due."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.live_request import LiveRequest
from space_router.engine.model_facts import ModelFacts
from space_router.engine.scheduler import Scheduler
from space_router.engine.seat import Seat
from space_router.metrics import Metrics
from space_router.workers.cause import Cause
from space_server.introduction import PROTOCOL_MAJOR

from space_eval.simulate_router import NOTHING, RouterCost
from space_eval.simulate_worker import SimulatedWorker

Heard = Callable[[worker_pb2.StepReport, Sequence[LiveRequest]], None]
"""Called with a report and the requests that its parts are about, once the engine has taken it in."""


class Silence(Metrics):
    """Series that nobody scrapes."""

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


class TableSeat(Seat):
    """A worker that hears and is heard `link` seconds late, and steps without waiting for anybody."""

    def __init__(self, table: Table, new_worker: Callable[[], SimulatedWorker]) -> None:
        self.scheduler: Scheduler | None = None
        self.num_incarnations = self.num_crashes = 0
        self.worker: SimulatedWorker | None = None
        self._table, self._new_worker = table, new_worker
        self._inbox: deque[tuple[float, list[worker_pb2.Command]]] = deque()
        self._busy = False
        self._num_reports = 0

    def start(self) -> None:
        """A fresh worker sits down."""
        engine = self._table.engine
        self.worker = self._new_worker()
        self.num_incarnations += 1
        facts = ModelFacts.from_hello(self.worker.worker.hello(str(self.num_incarnations)))
        engine.expect(facts)
        self.scheduler = engine.new_scheduler(facts)
        self._inbox, self._busy, self._num_reports = deque(), False, 0
        start = worker_pb2.Start(
            protocol_major=PROTOCOL_MAJOR,
            max_prefill_rows=engine.config.max_prefill_rows,
            max_draft_length=self.scheduler.max_draft_length,
        )
        self.worker.worker.apply(worker_pb2.Command(start=start))
        engine.worker_up(self)

    def die(self) -> None:
        """The worker is gone with all it has not said yet."""
        if self.scheduler is not None:
            lost, self.scheduler, self.worker = self.scheduler, None, None
            self._table.engine.worker_lost(self, lost, Cause.OUTSIDE)

    def flush(self) -> None:
        if self.scheduler is not None and (commands := self.scheduler.take_commands()):
            self._table.link_bytes += sum(command.ByteSize() for command in commands)
            due = self._table.now + self._table.link
            self._inbox.append((due, commands))
            if not self._busy:
                self._table.at(due, self._step)

    def _step(self) -> None:
        if self._busy or self.worker is None:
            return
        now, worker, inbox = self._table.now, self.worker, self._inbox
        while inbox and inbox[0][0] <= now:
            for command in inbox.popleft()[1]:
                worker.worker.apply(command)
        worker.clock.now = now
        report = worker.worker.step()
        if report is not None:
            self._busy = True
            self._num_reports += 1
            report.report_no = self._num_reports
            self._table.at(worker.clock.now, lambda: self._stepped(worker, report))
        elif inbox:
            self._table.at(inbox[0][0], self._step)

    def _stepped(self, worker: SimulatedWorker, report: worker_pb2.StepReport) -> None:
        if worker is not self.worker:
            return
        self._busy = False
        table = self._table
        table.link_bytes += report.ByteSize()
        work = table.router.per_piece * sum(bool(part.tokens) for part in report.sequences)
        if table.link:
            table.at(table.now + table.link, lambda: table.do(work, lambda: self._hear(worker, report)))
        else:
            table.do(work, lambda: self._hear(worker, report))
        self._step()

    def _hear(self, worker: SimulatedWorker, report: worker_pb2.StepReport) -> None:
        if worker is not self.worker or self.scheduler is None:
            return
        running = self.scheduler.sequences
        lives = [running[part.seq_id].live for part in report.sequences]
        self._table.engine.worker_report(self, report)
        self._table.heard(report, lives)


class Table:
    """Time, and everything that is due."""

    def __init__(
        self,
        new_worker: Callable[[int], SimulatedWorker],
        heard: Heard,
        *,
        num_workers: int,
        config: ServeConfig,
        link: float,
        router: RouterCost = NOTHING,
    ) -> None:
        """`new_worker`: for a seat's number; `link`: seconds that a message takes between router and worker;
        `router`: what that takes for its own part.
        """
        self.now = 0.0
        self.link = link
        self.link_bytes = 0  # of all messages between router and workers, without the frames around them
        self.router = router
        self._router_seconds = self._router_free = 0.0  # that it has been given to do; when it has done it
        self.heard = heard
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_actions = 0
        self.engine = Engine(config, Silence(), clock=lambda: self.now, call_later=self._call_later)
        self.seats = [TableSeat(self, lambda number=number: new_worker(number)) for number in range(num_workers)]  # type: ignore[misc]
        self.engine.seats[:] = self.seats
        for seat in self.seats:
            seat.start()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then."""
        self._num_actions += 1
        heapq.heappush(self._due, (seconds, self._num_actions, action))

    def do(self, seconds: float, action: Callable[[], None]) -> None:
        """The router does something that takes it so long, after all that it was given before."""
        begin = max(self.now, self._router_free)
        self._router_free = begin + seconds
        self._router_seconds += seconds
        if self._router_free > self.now:
            self.at(self._router_free, action)
        else:
            action()

    @property
    def router_seconds(self) -> float:
        """That it has worked until now."""
        return self._router_seconds - max(0.0, self._router_free - self.now)

    def run(self, until: float) -> bool:
        """Let time pass up to `until` seconds; False if nothing is due any more."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, action = heapq.heappop(due)
            action()
        if due:
            self.now = until
        return bool(due)

    def _call_later(self, seconds: float, action: Callable[[], None]) -> Alarm:
        alarm = Alarm(action)
        self.at(self.now + seconds, alarm.ring)
        return alarm


class Alarm:
    """Something that is to be done, unless it is called off."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def ring(self) -> None:
        if self._action is not None:
            self._action()
