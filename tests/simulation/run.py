"""Runs a simulated experiment, and what it shows: latencies, throughput, the state over time."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.errors import Refused
from space_router.engine.request.request import Stream
from space_router.engine.request.request_state import RequestState
from space_server.step_cost import StepCost

from simulation.cluster import (
    KnownCost,
    SimulatedCluster,
    SimulatedMachine,
    SimulatedWorker,
    Speculation,
    WorkerSetup,
    estimate,
)
from simulation.workload import ClientRequest, ClosedLoop, DepthAcceptance, TextLibrary, Workload

PERCENTILES = (50, 90, 95, 99)


@dataclass
class TimeSlice:
    """What happened in one stretch of time, and the state at its end."""

    end: float  # seconds
    num_tokens: int = 0  # that clients got
    busy: float = 0.0  # seconds of steps, over all workers
    num_decoded: int = 0  # sequences, once for each step in which they decoded
    num_drafted: int = 0
    num_running: int = 0

    @property
    def draft_length(self) -> float:
        """Drafts verified per sequence and step."""
        return share(self.num_drafted, self.num_decoded)


@dataclass(frozen=True)
class Summary:
    """One run."""

    seconds: float  # of arrivals; what comes after them does not count
    outcomes: Mapping[str, int]  # finished, left, refused, cut, error -> requests
    num_tokens: int
    tokens_per_step: float  # of a sequence
    draft_length: float  # drafts per sequence and step
    busy: float  # share of the workers' time
    prompt_cached: float  # share of prompt tokens that were not computed
    num_preemptions: int
    num_switches: int  # of the controllers, from plain decoding to drafts or back
    latencies: Mapping[str, Mapping[str, float]]  # ttft, itl, e2e -> percentile -> seconds
    intervals: Sequence[TimeSlice]

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, …, the mean and the largest; empty without values."""
    if not len(values):
        return {}
    ranks = np.percentile(np.asarray(values), PERCENTILES, method="inverted_cdf")
    return {
        "mean": float(np.mean(values)),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, ranks, strict=True)},
        "max": float(np.max(values)),
    }


NUM_INTERVALS = 120


@dataclass(frozen=True)
class Experiment:
    """Machines, texts and load."""

    machine: SimulatedMachine
    acceptance: DepthAcceptance
    workload: Workload
    seconds: float  # of arrivals, or of the closed loop
    num_workers: int = 1
    worker: WorkerSetup = field(default_factory=WorkerSetup)
    cost_error: float | None = 0.0  # of what workers have measured at their start; None: they know the machine exactly
    jitter: float = 0.0  # standard deviation of a step's log seconds
    link: float = 0.0002  # seconds from router to worker, and back
    max_prefill_rows: int = 512
    max_queue: int = 256
    max_queue_seconds: float | None = None
    deaths: tuple[tuple[float, int, float], ...] = ()  # when, which worker, seconds until the next one is there
    seed: int = 1

    def speculating(self, speculation: Speculation) -> Experiment:
        """The same with another way to speculate."""
        return replace(self, worker=replace(self.worker, speculation=speculation))

    def cost(self) -> StepCost:
        """What a worker knows of its machine at its start."""
        if self.cost_error is None:
            return KnownCost(self.machine)
        return estimate(self.machine, self.cost_error, self.seed)


class SimulatedAnswer:
    """What the client of one choice has seen."""

    __slots__ = (
        "begun",
        "first",
        "last",
        "longest_gap",
        "num_finishes",
        "num_tokens",
        "on_end",
        "outcome",
        "queue_seconds",
        "request",
    )

    def __init__(self, request: ClientRequest, begun: float, on_end: Callable[[], object] | None) -> None:
        self.request, self.begun, self.on_end = request, begun, on_end
        self.first = self.last = math.nan  # seconds
        self.longest_gap = 0.0  # seconds
        self.num_tokens = 0
        self.num_finishes = 0
        self.queue_seconds = 0.0
        self.outcome: str | None = None


class Simulation:
    """Runs a experiment once: `run` returns what it shows, `check` raises if anything was lost."""

    def __init__(self, experiment: Experiment, *, cost: Callable[[], StepCost] | None = None) -> None:
        """`cost`: what a worker knows at its start, instead of the experiment's."""
        self.experiment = experiment
        self.workers: list[SimulatedWorker] = []  # of all incarnations
        self.open: dict[Stream, SimulatedAnswer] = {}
        self.ended: list[SimulatedAnswer] = []
        self._intervals: list[TimeSlice] = []
        self._totals: Counter[str] = Counter()  # of decode steps and of prompts
        self._cost = cost or experiment.cost
        self._library = TextLibrary(experiment.acceptance, experiment.seed)
        self._requests = experiment.workload.requests()
        self._is_closing = False
        self._interval = TimeSlice(experiment.seconds / NUM_INTERVALS)
        self.cluster = SimulatedCluster(
            self._new_worker,
            self._on_report,
            num_workers=experiment.num_workers,
            config=ServeConfig(
                max_queue=experiment.max_queue,
                max_queue_seconds=experiment.max_queue_seconds,
                max_prefill_rows=experiment.max_prefill_rows,
            ),
            link=experiment.link,
        )

    def run(self) -> Summary:
        with _few_collections():
            self._begin()
            for number in range(1, NUM_INTERVALS + 1):
                end = self.experiment.seconds * number / NUM_INTERVALS
                self.cluster.time.run(end)
                self.cluster.time.now = max(self.cluster.time.now, end)
                self._end_interval(end)
            self._is_closing = True
            if isinstance(self.experiment.workload.arrivals, ClosedLoop):
                for stream in list(self.open):
                    self._disconnect(stream, "cut")
            self.cluster.time.run(math.inf)
        for stream, answer in list(self.open.items()):
            if stream.error is not None:
                self._end(stream, answer, "error")
        return self._summary()

    def check(self) -> None:
        """Raises ValueError unless every request was answered once, in full, and every page is free again."""
        self.cluster.engine.check()
        load = self.cluster.engine.load()
        if self.open or load.num_queued or load.num_running or load.blocks_held:
            raise ValueError(
                f"{len(self.open)} answers are open, {load.num_queued} requests queued, {load.num_running} running, "
                f"{load.blocks_held} blocks held, after all is over"
            )
        for answer in self.ended:
            expected = (1, answer.request.num_output)
            if answer.outcome == "finished" and (answer.num_finishes, answer.num_tokens) != expected:
                raise ValueError(
                    f"request {answer.request.number} ended {answer.num_finishes} times, with {answer.num_tokens} of "
                    f"{answer.request.num_output} tokens"
                )

    def _new_worker(self) -> SimulatedWorker:
        experiment = self.experiment
        worker = SimulatedWorker(
            experiment.worker, experiment.machine, self._library, self._cost(), jitter=experiment.jitter,
            seed=experiment.seed * 1000 + len(self.workers),
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    # Clients.

    def _begin(self) -> None:
        for when, number, down in self.experiment.deaths:
            connection = self.cluster.connections[number]
            self.cluster.time.at(when, connection.die)
            self.cluster.time.at(when + down, connection.start)
        arrivals = self.experiment.workload.arrivals
        if isinstance(arrivals, ClosedLoop):
            self._adjust_concurrency(arrivals)
        else:
            self._schedule_arrival()

    def _schedule_arrival(self) -> None:
        request = next(self._requests)
        if request.arrives < self.experiment.seconds:
            self.cluster.time.at(request.arrives, lambda: self._arrive(request))

    def _arrive(self, request: ClientRequest) -> None:
        self._submit(request, None)
        self._schedule_arrival()

    def _send_next(self) -> None:
        arrivals = self.experiment.workload.arrivals
        assert isinstance(arrivals, ClosedLoop)
        if not self._is_closing and len(self.open) < arrivals.concurrency(self.cluster.time.now):
            self._submit(next(self._requests), lambda: self.cluster.time.at(self.cluster.time.now, self._send_next))

    def _adjust_concurrency(self, arrivals: ClosedLoop) -> None:
        """At the begin of each period."""
        if self._is_closing:
            return
        wanted = arrivals.concurrency(self.cluster.time.now)
        for stream in list(self.open)[wanted:]:
            self._disconnect(stream, "cut")
        for _ in range(wanted - len(self.open)):
            self._send_next()
        period = round(self.cluster.time.now / arrivals.period) + 1
        if arrivals.low is not None and period * arrivals.period < self.experiment.seconds:
            self.cluster.time.at(period * arrivals.period, lambda: self._adjust_concurrency(arrivals))

    def _submit(self, request: ClientRequest, on_end: Callable[[], object] | None) -> None:
        first: Stream | None = None
        streams = []
        for choice in range(request.num_choices):
            self._library.write(request.number, choice, request.num_output)
            answer = SimulatedAnswer(
                request, self.cluster.time.now, on_end if choice == request.num_choices - 1 else None
            )
            try:
                leader = first if first in self.open else None
                stream = self.cluster.engine.submit(request.valid(choice), leader=leader)
            except Refused:
                answer.outcome = "refused"
                self.ended.append(answer)
                continue
            first = first or stream
            streams.append(stream)
            self.open[stream] = answer
        self.cluster.engine.bound_wait(streams)

    # What the engine delivers.

    def _on_report(self, report: worker_pb2.StepReport, lives: Sequence[RequestState]) -> None:
        interval = self._interval
        if report.stepped:
            interval.busy += report.stats.forward_seconds
            for drafts, count in enumerate(report.stats.draft_length_counts):
                interval.num_decoded += count
                interval.num_drafted += count * drafts
        for live in lives:
            stream = live.stream
            if stream is None or (answer := self.open.get(stream)) is None:
                continue
            self._read(stream, answer)
            leaves = answer.request.leaves_after
            if answer.num_finishes:
                self._end(stream, answer, "finished")
            elif stream.error is not None:
                self._end(stream, answer, "error")
            elif leaves is not None and answer.num_tokens >= leaves:
                self._disconnect(stream, "left")

    def _read(self, stream: Stream, answer: SimulatedAnswer) -> None:
        now = self.cluster.time.now
        while stream.num_ready:
            delta = stream.read()
            num_tokens = len(delta.tokens)
            if num_tokens:
                if answer.num_tokens:
                    answer.longest_gap = max(answer.longest_gap, now - answer.last)
                else:
                    answer.first = now
                answer.last = now
                answer.num_tokens += num_tokens
                self._interval.num_tokens += num_tokens
                if delta.decoded:
                    self._totals.update(decoded=1, emitted=num_tokens, drafted=delta.drafted)
            answer.num_finishes += delta.finish is not None

    def _disconnect(self, stream: Stream, outcome: str) -> None:
        stream.leave()
        self._end(stream, self.open[stream], outcome)

    def _end(self, stream: Stream, answer: SimulatedAnswer, outcome: str) -> None:
        del self.open[stream]
        answer.outcome = outcome
        statistics = stream.statistics
        if statistics.queue_seconds is not None:
            answer.queue_seconds = statistics.queue_seconds
            self._totals.update(prompt=statistics.num_prompt, cached=statistics.num_cached)
        self.ended.append(answer)
        if answer.on_end is not None:
            answer.on_end()

    def _end_interval(self, now: float) -> None:
        self._interval.num_running = self.cluster.engine.load().num_running
        self._intervals.append(self._interval)
        self._interval = TimeSlice(now + self.experiment.seconds / NUM_INTERVALS)

    def _summary(self) -> Summary:
        experiment, totals, intervals = self.experiment, self._totals, self._intervals
        schedulers = [one.scheduler for one in self.cluster.connections if one.scheduler is not None]
        begun = [answer for answer in self.ended if answer.num_tokens]
        seconds = {
            "ttft": [one.first - one.begun for one in begun],
            "itl": [(one.last - one.first) / (one.num_tokens - 1) for one in begun if one.num_tokens > 1],
            "e2e": [one.last - one.begun for one in begun if one.outcome == "finished"],
        }
        return Summary(
            seconds=experiment.seconds,
            outcomes=dict(Counter(answer.outcome or "" for answer in self.ended)),
            num_tokens=sum(one.num_tokens for one in intervals),
            tokens_per_step=share(totals["emitted"], totals["decoded"]),
            draft_length=share(totals["drafted"], totals["decoded"]),
            busy=sum(one.busy for one in intervals) / (experiment.seconds * experiment.num_workers),
            prompt_cached=share(totals["cached"], totals["prompt"]),
            num_preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
            num_switches=sum(worker.controller.num_switches for worker in self.workers),
            latencies={name: percentiles(values) for name, values in seconds.items()},
            intervals=intervals,
        )


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect cycles rarely: most objects live as long as a request, and the search costs a third of the time."""
    before = gc.get_threshold()
    gc.freeze()  # what exists already is not searched
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
