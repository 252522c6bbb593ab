"""One simulated run: clients, router and workers from the first arrival to the last token."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.errors import Refused
from space_router.engine.live_request import LiveRequest
from space_router.engine.stream import Stream
from space_server.measured_controller import MeasuredController
from space_server.step_cost import StepCost

from space_eval.bench_limits import Limits
from space_eval.simulate_figures import LATENCIES, Figures, Moment, Record, percentiles
from space_eval.simulate_load import Ask, Streams, Work
from space_eval.simulate_machine import Known, Machine, estimate
from space_eval.simulate_router import NOTHING, RouterCost
from space_eval.simulate_table import Table
from space_eval.simulate_text import Acceptance, Library
from space_eval.simulate_worker import SimulatedWorker, Speculation, WorkerSettings

NUM_MOMENTS = 120


@dataclass(frozen=True)
class Scenario:
    """Machines, texts and load: everything but the choice of drafts."""

    machine: Machine
    acceptance: Acceptance
    work: Work
    seconds: float  # of arrivals, or of streams
    num_workers: int = 1
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    cost_error: float | None = 0.0  # of what workers have measured at their start; None: they know the machine exactly
    jitter: float = 0.0  # standard deviation of a step's log seconds
    link: float = 0.0002  # seconds from router to worker, and back
    router: RouterCost = NOTHING  # beside what workers take; nothing: it is infinitely fast
    max_prefill_rows: int = 512
    max_queue: int = 256
    deaths: tuple[tuple[float, int, float], ...] = ()  # when, which worker, seconds until the next one is there
    limits: Limits | None = None
    seed: int = 1

    def arm(self, speculation: Speculation) -> Scenario:
        return replace(self, worker=replace(self.worker, speculation=speculation))

    def cost(self) -> StepCost:
        """What a worker knows of its machine at its start."""
        if self.cost_error is None:
            return Known(self.machine)
        return estimate(self.machine, self.cost_error, self.seed)


class Visit:
    """One answer and its reader."""

    __slots__ = ("ask", "begun", "first", "largest", "last", "num_finishes", "num_tokens", "outcome", "then")

    def __init__(self, ask: Ask, begun: float, then: Callable[[], None] | None) -> None:
        self.ask, self.begun = ask, begun
        self.first = self.last = math.nan  # seconds
        self.largest = 0.0  # gap
        self.num_tokens = 0
        self.num_finishes = 0
        self.outcome: str | None = None
        self.then = then  # done when it is over


class Simulation:
    """Runs a scenario once. `figures` tell; `check` raises where something is lost."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        cost: Callable[[], StepCost] | None = None,
        progress: Callable[[float], None] = lambda seconds: None,
        most_failed: float = math.inf,
    ) -> None:
        """`cost`: what a worker knows at its start, over the scenario's; `progress`: is told how far it is;
        `most_failed`: once more requests of the second half have broken a limit, the run is broken off.
        """
        self.scenario = scenario
        self.workers: list[SimulatedWorker] = []  # of all incarnations
        self.visits: dict[Stream, Visit] = {}
        self.ended: list[Visit] = []
        self.record = Record()
        self._cost = cost or scenario.cost
        self._progress = progress
        self._most_failed = most_failed
        self._library = Library(scenario.acceptance, scenario.seed)
        self._asks = scenario.work.asks()
        self._closing = self._cut = False
        self._num_coming = 0  # requests that the router has not got to yet
        self._router_seconds = 0.0  # that it worked in the time that counts
        self._wall = self._cpu = 0.0
        length = scenario.seconds / NUM_MOMENTS
        self._moment = Moment(length, length)
        self.table = Table(
            self._new_worker,
            self._heard,
            num_workers=scenario.num_workers,
            config=ServeConfig(max_queue=scenario.max_queue, max_prefill_rows=scenario.max_prefill_rows),
            link=scenario.link,
            router=scenario.router,
        )

    def _new_worker(self, number: int) -> SimulatedWorker:
        scenario = self.scenario
        worker = SimulatedWorker(
            scenario.worker,
            scenario.machine,
            self._library,
            self._cost(),
            jitter=scenario.jitter,
            seed=scenario.seed * 1000 + len(self.workers),
        )
        self.workers.append(worker)
        return worker

    def run(self) -> Figures:
        """To the last token of the last request."""
        started, cpu = time.perf_counter(), time.process_time()
        with _few_collections():
            self._begin()
            for number in range(1, NUM_MOMENTS + 1):
                end = self.scenario.seconds * number / NUM_MOMENTS
                self.table.run(end)
                self.table.now = max(self.table.now, end)
                self._look(end)
                self._progress(end)
                if broken_off := self._num_failed() > self._most_failed:
                    break
            self._closing = True
            self._router_seconds = self.table.router_seconds
            if broken_off or isinstance(self.scenario.work.arrivals, Streams):
                self._cut = True
                for stream in list(self.visits):
                    self._end(stream, "cut")
            self.table.run(math.inf)
        for stream, visit in list(self.visits.items()):
            if stream.error is not None:
                self._over(stream, visit, "error")
        self._wall, self._cpu = time.perf_counter() - started, time.process_time() - cpu
        return self.figures()

    def _begin(self) -> None:
        arrivals = self.scenario.work.arrivals
        for when, number, down in self.scenario.deaths:
            seat = self.table.seats[number]
            self.table.at(when, seat.die)
            self.table.at(when + down, seat.start)
        if not isinstance(arrivals, Streams):
            self._next_arrival()
        elif arrivals.low is None:
            for _ in range(arrivals.high):
                self._next_of_stream()
        else:
            self._swing(arrivals)

    # Clients.

    def _next_arrival(self) -> None:
        ask = next(self._asks)
        if ask.arrives < self.scenario.seconds and not self._closing:
            self.table.at(ask.arrives, lambda: self._arrive(ask))

    def _arrive(self, ask: Ask) -> None:
        if not self._closing:
            self._come(ask, None)
            self._next_arrival()

    def _num_failed(self) -> int:
        """Requests of the second half that have broken a limit, or are sure to."""
        limits = dict(self.scenario.limits.seconds) if self.scenario.limits else {}
        half, latest = self.scenario.seconds / 2, self.table.now - limits.get("ttft", math.inf)
        waiting = sum(half <= visit.begun < latest and not visit.num_tokens for visit in self.visits.values())
        return self.record.num_late - self.record.num_late_kept + waiting

    def _next_of_stream(self) -> None:
        arrivals = self.scenario.work.arrivals
        assert isinstance(arrivals, Streams)
        if not self._closing and len(self.visits) + self._num_coming < arrivals.wanted(self.table.now):
            self._come(next(self._asks), lambda: self.table.at(self.table.now, self._next_of_stream))

    def _swing(self, arrivals: Streams) -> None:
        """Another half begins."""
        if self._closing:
            return
        wanted = arrivals.wanted(self.table.now)
        for stream in list(self.visits)[wanted:]:
            self._end(stream, "cut")
        for _ in range(wanted - len(self.visits) - self._num_coming):
            self._next_of_stream()
        half = round(self.table.now / arrivals.period) + 1
        if half * arrivals.period < self.scenario.seconds:
            self.table.at(half * arrivals.period, lambda: self._swing(arrivals))

    def _come(self, ask: Ask, then: Callable[[], None] | None) -> None:
        """A request is at the router's door."""
        begun = self.table.now
        self._num_coming += 1
        self.table.do(self.scenario.router.per_request, lambda: self._submit(ask, begun, then))

    def _submit(self, ask: Ask, begun: float, then: Callable[[], None] | None) -> None:
        self._num_coming -= 1
        if self._cut:
            return
        first: Stream | None = None
        for choice in range(ask.num_choices):
            self._library.write(ask.number, choice, ask.num_output)
            visit = Visit(ask, begun, then if choice == ask.num_choices - 1 else None)
            try:
                leader = first if first in self.visits else None
                stream = self.table.engine.submit(ask.request(choice), leader=leader)
            except Refused:
                visit.outcome = "refused"
                self._count(visit)
                continue
            first = first or stream
            self.visits[stream] = visit

    # What the engine says.

    def _heard(self, report: worker_pb2.StepReport, lives: Sequence[LiveRequest]) -> None:
        now, visits, record, moment = self.table.now, self.visits, self.record, self._moment
        record.step(report, moment)
        counts = now <= self.scenario.seconds
        for live in lives:
            stream = live.stream
            if stream is None or (visit := visits.get(stream)) is None:
                continue
            while stream.num_ready:
                delta = stream.read()
                num_tokens = len(delta.tokens)
                if num_tokens:
                    if visit.num_tokens:
                        gap = now - visit.last
                        record.gap.append(gap)
                        if gap > visit.largest:
                            visit.largest = gap
                    else:
                        visit.first = now
                    visit.last = now
                    visit.num_tokens += num_tokens
                    moment.num_tokens += num_tokens
                    if counts:
                        record.num_tokens += num_tokens
                        record.num_pieces += 1
                    if delta.decoded:
                        record.num_decoded += 1
                        record.num_emitted += num_tokens
                        record.num_drafted += delta.drafted
                        record.num_accepted += delta.accepted
                if delta.finish is not None:
                    visit.num_finishes += 1
            leaves = visit.ask.leaves_after
            if visit.num_finishes:
                self._over(stream, visit, "finished")
            elif stream.error is not None:
                self._over(stream, visit, "error")
            elif leaves is not None and visit.num_tokens >= leaves:
                self._end(stream, "left")

    def _end(self, stream: Stream, outcome: str) -> None:
        """The reader goes away."""
        stream.leave()
        self._over(stream, self.visits[stream], outcome)

    def _over(self, stream: Stream, visit: Visit, outcome: str) -> None:
        del self.visits[stream]
        visit.outcome = outcome
        statistics, record = stream.statistics, self.record
        if statistics.queue_seconds is not None:
            record.queue.append(statistics.queue_seconds)
            record.num_prompt += statistics.num_prompt
            record.num_cached += statistics.num_cached
        self._count(visit)
        if visit.then is not None:
            visit.then()

    def _count(self, visit: Visit) -> None:
        record = self.record
        self.ended.append(visit)
        record.outcomes[visit.outcome or ""] += 1
        is_late = visit.begun >= self.scenario.seconds / 2 and (
            visit.outcome not in ("left", "cut") or self._is_off(visit)
        )
        record.num_late += is_late
        if not visit.num_tokens:
            return
        ttft, e2e = visit.first - visit.begun, visit.last - visit.begun
        itl = (visit.last - visit.first) / max(1, visit.num_tokens - 1)
        record.ttft.append(ttft)
        if visit.num_tokens > 1:
            record.itl.append(itl)
        if visit.outcome == "finished":
            record.e2e.append(e2e)
            limits = self.scenario.limits
            taken = {"ttft": ttft, "itl": itl, "gap": visit.largest, "e2e": e2e}
            is_kept = limits is None or all(taken[name] <= limit for name, limit in limits.seconds)
            record.num_kept += is_kept
            record.num_late_kept += is_kept and is_late

    def _is_off(self, visit: Visit) -> bool:
        """The run was broken off while it waited for its first token, too long: it counts as one that failed."""
        limits = dict(self.scenario.limits.seconds) if self.scenario.limits else {}
        late = self.table.now - visit.begun > limits.get("ttft", math.inf)
        return visit.outcome == "cut" and not visit.num_tokens and late

    def _look(self, now: float) -> None:
        """How things stand at the end of a moment, and the next one begins."""
        moment, load = self._moment, self.table.engine.load()
        moment.queued, moment.running = load.num_queued, load.num_running
        moment.blocks_free, moment.blocks_held, moment.blocks_cached = (
            load.blocks_free,
            load.blocks_held,
            load.blocks_cached,
        )
        self.record.moments.append(moment)
        self._moment = Moment(now + moment.seconds, moment.seconds)

    # What came of it.

    def figures(self) -> Figures:
        record, scenario = self.record, self.scenario
        moments = record.moments
        changes = sum(worker.controller.num_changes for worker in self.workers)
        turns = sum(worker.controller.num_turns for worker in self.workers)
        measured = all(isinstance(worker.controller.controller, MeasuredController) for worker in self.workers)
        finite = [seat.scheduler for seat in self.table.seats if seat.scheduler is not None]
        return Figures(
            arm=str(scenario.worker.speculation),
            seconds=scenario.seconds,
            num_workers=scenario.num_workers,
            num_requests=len(self.ended),
            outcomes=dict(record.outcomes),
            num_tokens=record.num_tokens,
            tokens_per_step=_share(record.num_emitted, record.num_decoded),
            draft_length=_share(record.num_drafted, record.num_decoded),
            accepted=_share(record.num_accepted, record.num_drafted),
            rows_per_step=_share(sum(rows * count for rows, count in record.rows.items()), record.num_steps),
            busy=sum(m.busy for m in moments) / (scenario.seconds * scenario.num_workers),
            router_busy=self._router_seconds / scenario.seconds,
            num_pieces=record.num_pieces,
            link_bytes_per_token=_share(self.table.link_bytes, sum(visit.num_tokens for visit in self.ended)),
            prompt_cached=_share(record.num_cached, record.num_prompt),
            num_preemptions=sum(scheduler.num_preemptions for scheduler in finite),
            changes_per_second=changes / scenario.seconds / scenario.num_workers if measured else math.nan,
            turns_per_second=turns / scenario.seconds / scenario.num_workers if measured else math.nan,
            num_kept=record.num_kept,
            kept_late=_share(record.num_late_kept, record.num_late),
            latencies={name: percentiles(getattr(record, name)) for name in LATENCIES},
            wall_seconds=self._wall,
            cpu_seconds=self._cpu,
            moments=moments,
        )

    def check(self) -> None:
        """Raise ValueError unless everybody was served once and every page is back."""
        self.table.engine.check()
        load = self.table.engine.load()
        if self.visits or load.num_queued or load.num_running or load.blocks_held:
            raise ValueError(
                f"{len(self.visits)} visits are open, {load.num_queued} requests queued, {load.num_running} running, "
                f"{load.blocks_held} blocks held, after all is over"
            )
        for visit in self.ended:
            if visit.outcome == "finished" and (visit.num_finishes, visit.num_tokens) != (1, visit.ask.num_output):
                raise ValueError(
                    f"request {visit.ask.number} ended {visit.num_finishes} times, with {visit.num_tokens} of "
                    f"{visit.ask.num_output} tokens"
                )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


@contextmanager
def _few_collections() -> Iterator[None]:
    """Most objects live as long as a request: looking for cycles among them costs a third of the time."""
    before = gc.get_threshold()
    gc.freeze()  # what is there already is not looked through
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
