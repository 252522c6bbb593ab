"""A scheduler and a scripted batch in lockstep, and an engine with a scripted worker."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.engine import MAX_LAG, Engine
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request import worker_messages
from space_router.engine.request.request import SamplingOptions, Stream, ValidRequest
from space_router.engine.request.request_state import Phase, RequestState, WorkerSequence
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.scheduler import Scheduler
from space_router.engine.workers.supervisor import ExitCause
from space_router.engine.workers.worker_connection import WorkerConnection
from space_router.metrics import Metrics

from doubles.router import Script, ScriptedBatch, ScriptedWorker


def request_of(prompt: int | tuple[int, ...] = 6, max_tokens: int | None = 12, **fields: Any) -> ValidRequest:
    """A request with so many prompt ids (or these); `name` is its request_id, other fields as in ValidRequest."""
    ids = tuple(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
    name = fields.pop("name", "r")
    sampling = fields.pop("sampling", SamplingOptions(seed=0))
    return ValidRequest(request_id=name, prompt_ids=ids, sampling=sampling, max_tokens=max_tokens, **fields)


def answer(request: ValidRequest, script: Script) -> tuple[int, ...]:
    """What the scripted language says to a request, asked one id at a time."""
    ids, num_prompt = list(request.prompt_ids), len(request.prompt_ids)
    sampling, most = worker_messages.sampling(request.sampling), request.max_tokens or 1
    while len(ids) < min(num_prompt + most, script.window):
        ids.append(script.language.next_id(ids, num_prompt, sampling))
        if ids[-1] in request.eos_ids + request.stop_ids:
            break
    return tuple(ids[num_prompt:])


class Lockstep:
    """A router's schedule and a worker's batch without sockets: `step` is one step of the worker.

    `delay`: reports reach the router so many steps late.
    """

    def __init__(self, script: Script, *, max_prefill_rows: int = 64, delay: int = 0) -> None:
        self.script = script
        self.batch = ScriptedBatch(script)
        facts = WorkerModelFacts.from_hello(self.batch.hello())
        self.scheduler = Scheduler(facts, max_prefill_rows=max_prefill_rows, max_draft_length=None)
        start = worker_pb2.Start(protocol_major=1, max_prefill_rows=max_prefill_rows, max_draft_length=8)
        self.batch.apply(worker_pb2.Command(start=start))
        self.queue = RequestQueue(1000)
        self.lives: list[RequestState] = []
        self.messages: list[list[worker_pb2.Command]] = []  # what the router said, moment by moment
        self.num_drafted: Counter[RequestState] = Counter()  # drafts verified, by the reports that have come
        self._delay = delay
        self._mail: deque[worker_pb2.StepReport] = deque()

    def submit(self, request: ValidRequest) -> RequestState:
        live = RequestState(request, request.max_tokens or 1, age=len(self.lives), submitted=0.0)
        self.lives.append(live)
        self.queue.push(live)
        return live

    def cancel(self, live: RequestState) -> None:
        self.queue.remove(live)
        live.phase = Phase.ENDED
        self.scheduler.release(live)

    def step(self) -> None:
        while (live := self.queue.head()) is not None and (placement := self.scheduler.placement(live)):
            self.queue.admitted(live, 0.0)
            self.scheduler.admit(live, placement)
        self.scheduler.grant_pages()
        self.messages.append(self.scheduler.take_commands())
        for command in self.messages[-1]:
            self.batch.apply(command)
        self._mail.append(self.batch.step())
        if len(self._mail) > self._delay:
            outcome = self.scheduler.report(self._mail.popleft())
            for update in outcome.updates:
                self.num_drafted[update.live] += update.delta.drafted
            for live in outcome.readmit:
                self.queue.push(live)
        self.scheduler.check()

    def run(self, max_steps: int = 5000) -> None:
        """Until every request has ended and every page is back."""
        for _ in range(max_steps):
            if all(live.phase is Phase.ENDED for live in self.lives) and not self.scheduler.sequences:
                assert self.scheduler.pool.num_held == 0
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {[live.phase for live in self.lives]}")

    def text(self, live: RequestState) -> tuple[int, ...]:
        return tuple(live.ids[live.num_prompt :])


async def text_of(engine: Engine, request: ValidRequest, leader: Stream | None = None) -> tuple[int, ...]:
    async with engine.submit(request, leader=leader) as stream:
        return tuple([token async for delta in stream for token in delta.tokens])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  conditions of every kind, none of which is an event
            await asyncio.sleep(0)


class House:
    """An engine and its scripted worker, over a real socket."""

    def __init__(self, engine: Engine, worker: ScriptedWorker, metrics: Metrics) -> None:
        self.engine = engine
        self.worker = worker
        self.metrics = metrics

    async def text(self, request: ValidRequest, leader: Stream | None = None) -> tuple[int, ...]:
        """Everything the engine streams for a request."""
        return await text_of(self.engine, request, leader)

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    async def quiet(self) -> None:
        """Until every page is free or cached; the books must balance then and the worker have no complaint."""
        await self.until(lambda: self.engine.load().blocks_held == 0)
        self.engine.check()
        load = self.engine.load()
        assert load.blocks_free + load.blocks_cached == self.worker.script.num_blocks * load.num_workers_up
        assert load.num_running == load.num_queued == 0
        self.worker.check()


@asynccontextmanager
async def in_house(script: Script | None = None, **fields: Any) -> AsyncIterator[House]:
    """At the end every page is free or cached. `fields`: of ServeConfig, and `max_lag`, `tokenizer_hash` of Engine."""
    engine_fields = {name: fields.pop(name) for name in ("max_lag", "tokenizer_hash") if name in fields}
    async with asyncio.timeout(60), ScriptedWorker(script) as worker:
        metrics = Metrics()
        config = replace(ServeConfig(worker_address=(worker.address,)), **fields)
        async with Engine(config, metrics, **engine_fields) as engine:
            await engine.wait_ready()
            house = House(engine, worker, metrics)
            yield house
            await house.quiet()
        worker.check()


class TableWorker(Protocol):
    """One incarnation of a worker that is stepped by calls."""

    def hello(self) -> worker_pb2.Hello: ...

    def apply(self, command: worker_pb2.Command) -> None: ...

    def step(self) -> worker_pb2.StepReport | None:
        """One step, or None where nothing is to be done or said. `report_no` is set by the caller."""


class OldestPreempted(AssertionError):
    """The one that everybody relies on to finish was taken."""


class VirtualTime:
    """A clock, and what is due by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, _Timer]] = []
        self._num_timers = 0

    def at(self, seconds: float, action: Callable[[], None]) -> _Timer:
        """Call `action` at that time, unless the timer is cancelled."""
        self._num_timers += 1
        timer = _Timer(action)
        heapq.heappush(self._due, (seconds, self._num_timers, timer))
        return timer

    def call_later(self, seconds: float, action: Callable[[], None]) -> _Timer:
        return self.at(self.now + seconds, action)

    def skip(self, seconds: float) -> None:
        """So much time passes; what was due in it is done at its end."""
        self.now += seconds
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[-1].ring()

    def run(self, until: float) -> None:
        """Let time pass up to `until`, or until nothing is due any more; everything is done when it is due."""
        while self._due and self._due[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._due)
            timer.ring()
        if self._due:
            self.now = until


class _Timer:
    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def ring(self) -> None:
        if self._action is not None:
            self._action()


class OfflineConnection(WorkerConnection):
    """A connection without a stream: subclasses pass commands and reports on."""

    worker: Any = None

    def __init__(self, engine: Engine) -> None:
        self.scheduler: Scheduler | None = None
        self.num_incarnations = self.num_crashes = 0
        self._engine = engine
        self._num_reports = 0

    def welcome(self, hello: worker_pb2.Hello) -> tuple[Scheduler, worker_pb2.Command]:
        """The scheduler for a new worker, and the first command to it; `up` follows."""
        facts = WorkerModelFacts.from_hello(hello)
        self._engine.check_compatible(facts)
        rows, most = self._engine.config.max_prefill_rows, self._engine.config.max_draft_length
        self.scheduler = Scheduler(facts, max_prefill_rows=rows, max_draft_length=most)
        self.num_incarnations += 1
        self._num_reports = 0
        drafts = self.scheduler.max_draft_length
        start = worker_pb2.Start(protocol_major=1, max_prefill_rows=rows, max_draft_length=drafts, readmits=True)
        return self.scheduler, worker_pb2.Command(start=start)

    def numbered(self, report: worker_pb2.StepReport) -> worker_pb2.StepReport:
        """The report, as the next of this incarnation."""
        self._num_reports += 1
        report.report_no = self._num_reports
        return report

    def die(self, cause: ExitCause = ExitCause.EXTERNAL) -> None:
        """The worker is gone with everything it has not reported yet."""
        if self.scheduler is not None:
            lost, self.scheduler, self.worker = self.scheduler, None, None
            self._engine.worker_lost(self, lost, cause)


class TableConnection(OfflineConnection):
    """A worker hears at once, and is heard `delay` steps late."""

    def __init__(self, engine: Engine, new_worker: Callable[[], TableWorker], delay: int) -> None:
        super().__init__(engine)
        self.worker: TableWorker | None = None
        self._new_worker, self._delay = new_worker, delay
        self._inbox: list[worker_pb2.Command] = []
        self._mail: deque[worker_pb2.StepReport | None] = deque()

    def flush(self) -> None:
        if self.scheduler is not None:
            self._inbox += self.scheduler.take_commands()

    def start(self) -> None:
        self.worker = self._new_worker()
        scheduler, start = self.welcome(self.worker.hello())
        _watch(scheduler)
        self._inbox, self._mail = [], deque()
        self.worker.apply(start)
        self._engine.worker_up(self)

    def step(self) -> None:
        if self.worker is None:
            return
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            self.worker.apply(command)
        report = self.worker.step()
        self._mail.append(None if report is None else self.numbered(report))
        if len(self._mail) > self._delay and (heard := self._mail.popleft()) is not None:
            self._engine.worker_report(self, heard)


class Tabletop:
    """Turned tick by tick: time goes on, timers ring, every worker steps once.

    table = Tabletop(lambda: ScriptedBatch(script)); stream = table.engine.submit(request); table.tick()
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
        self._time = VirtualTime()
        self.engine = Engine(
            config or ServeConfig(), metrics or Metrics(), max_lag=max_lag, clock=lambda: self._time.now,
            call_later=self._time.call_later,
        )  # fmt: skip
        self.connections = [TableConnection(self.engine, new_worker, delay) for _ in range(num_workers)]
        self.engine.connections[:] = self.connections
        for connection in self.connections:
            connection.start()

    @property
    def now(self) -> float:
        return self._time.now

    def tick(self, seconds: float = 0.001) -> None:
        """So many seconds pass, and every worker steps."""
        self._time.skip(seconds)
        for connection in self.connections:
            connection.step()


def _watch(scheduler: Scheduler) -> None:
    """Raise where the oldest of those that can go on is preempted."""
    preempt = scheduler._preempt

    def watched(victim: WorkerSequence) -> None:
        going_on = [s for s in scheduler.running if not (s.out_of_slots and s.live.lagging)]
        if victim is min(going_on, key=lambda s: s.live.age, default=None):
            raise OldestPreempted(f"request {victim.live.request.request_id} is the oldest, and was preempted")
        preempt(victim)

    scheduler._preempt = watched  # type: ignore[assignment,method-assign]
