"""A simulated machine, the workers on it, and the router's engine in front of them."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from doubles.router.tabletop import OfflineConnection, VirtualTime
from space_model.geometry.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from space_model.networks.network import USUAL_ROOM, PagedKV, StateRoom
from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.request.request_state import RequestState
from space_router.metrics import PHASES, Metrics
from space_server.host_runner import HostRunner
from space_server.model_runner import SequenceOutput, StepTimes
from space_server.scheduled_batch import ScheduledSequence, shape_of
from space_server.speculation.controller import Controller, DraftLimits, FixedLayout, SpeculationController, StepLoad
from space_server.step_cost import Point, StepCost, StepShape
from space_server.worker import Worker

from simulation.workload import EOS, VOCABULARY, TextLibrary

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sequences of the steps from which a simulated worker knows its machine

LAYOUTS = (DraftLayout.plain(), *(DraftLayout.full(k, k) for k in (1, 2, 3, 5)))
PREFILL = (32, 128, 512, 2048)
CONTEXT, LONG_CONTEXT = 64, 2048


class SimulatedMachine(Protocol):
    """Seconds of a step, by its shape."""

    def seconds(self, shape: StepShape) -> float: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class RidgeMachine:
    """A fixed time per step, and more for every row above the ridge; rows below it are free."""

    base: float  # seconds
    per_row: float  # seconds
    ridge: int = 0  # rows

    def seconds(self, shape: StepShape) -> float:
        return self.base + self.per_row * max(0, shape.num_rows - self.ridge)


@dataclass(frozen=True)
class RooflineMachine:
    """SPACE §5: t0 + max(bytes / bandwidth, operations / speed); keys and values are read once per sequence."""

    num_weights: float
    kv_bytes: float  # of one token, all layers
    pair_operations: float  # of a row and a token before it, all layers
    fixed: float  # seconds: host and launches
    bandwidth: float  # bytes per second, in practice
    speed: float  # operations per second, in practice
    weight_bytes: float = 2.0

    def seconds(self, shape: StepShape) -> float:
        read = self.num_weights * self.weight_bytes + self.kv_bytes * shape.num_context
        done = 2.0 * self.num_weights * shape.num_rows + self.pair_operations * shape.num_pairs
        return self.fixed + max(read / self.bandwidth, done / self.speed)


H200_8B = RooflineMachine(
    num_weights=8.03e9,
    kv_bytes=2 * 32 * 8 * 128 * 2.0,  # K and V, layers, heads of K and V, their width, bytes
    pair_operations=4 * 32 * 4096.0,  # q·k and p·v, layers, hidden
    fixed=0.5e-3,
    bandwidth=0.8 * 4.8e12,  # share of the data sheet's number that practice leaves
    speed=0.65 * 989e12,  # SPACE §5 has ×0.6–0.7 for the ridge
)
"""Llama-3.1-8B in bfloat16 on an H200: computed from the data sheet, not measured."""


class KnownCost(StepCost):
    """The cost model of a worker that knows the machine exactly, and so has nothing to learn."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__([])
        self._machine = machine

    def seconds(self, shape: StepShape) -> float:
        return self._machine.seconds(shape)

    def learn(self, shape: StepShape, seconds: float) -> None:
        pass


def estimate(machine: SimulatedMachine, error: float, seed: int) -> StepCost:
    """What a worker has measured at its start, each step wrong by up to the share `error`; it learns from there."""
    return copy.deepcopy(_estimate(machine, error, seed))


@lru_cache(maxsize=64)
def _estimate(machine: SimulatedMachine, error: float, seed: int) -> StepCost:
    source = random.Random(f"{machine} {seed}")
    points: list[Point] = []
    for shape in _shapes():
        points.append((shape, machine.seconds(shape) * (1.0 + source.uniform(-error, error))))
    return StepCost.from_points(points)


def _shapes() -> list[StepShape]:
    shapes = [
        StepShape(
            n, n * (1 + layout.num_drafts), n * layout.num_masks, n * (layout.num_masks > 0), num_context=n * context
        )
        for n in SIZES
        for layout in LAYOUTS
        for context in (CONTEXT, LONG_CONTEXT)
    ]
    shapes += [
        StepShape(n, n, num_prefill_rows=rows, num_prefill_pairs=rows * context, num_context=n * CONTEXT)
        for n in (1, 32)
        for rows in PREFILL
        for context in (0, LONG_CONTEXT)
    ]
    return shapes


Speculation = Literal["auto", "off"] | int


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is started with."""

    speculation: Speculation = "auto"
    num_masks: int = 5
    num_blocks: int = 16384
    block_size: int = 16
    max_sequences: int = 64
    window: int = 131072
    prefill_budget: float | None = 0.1  # seconds


class VirtualClock:
    """Seconds on one worker's clock, which runs ahead of the cluster's during a step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class NoWeights:
    """What a worker asks a model before its first step."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.facts = ModelFacts(
            name="simulated", vocab_size=VOCABULARY, hidden_size=1, num_layers=0, num_heads=1, kv_heads=1, head_dim=1,
            window=setup.window, dtype=torch.float32, dtype_reason="simulated", device=torch.device("cpu"),
            eos_ids=(EOS,), mask_ids=(), num_masks=setup.num_masks, model_hash="simulated", tokenizer_hash="",
            has_draft_head=False, kv_bytes_per_token=0, attention="none", num_threads=1,
        )  # fmt: skip

    def allocate_kv(self, num_blocks: int, block_size: int, room: StateRoom = USUAL_ROOM) -> PagedKV:
        return PagedKV([], [], num_blocks, block_size)

    def sampled_step(self, kv: PagedKV, banned_ids: object) -> None:
        """Return None: it has no such call."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a simulated model has no {name}: it never runs")


class CostedStepper(HostRunner):
    """Continues each sequence by its text, and advances the clock by the machine's seconds."""

    def __init__(
        self,
        worker: Worker,
        model: NoWeights,
        machine: SimulatedMachine,
        library: TextLibrary,
        clock: VirtualClock,
        noise: Callable[[], float],
    ) -> None:
        """`noise`: factor on the seconds of a step."""
        controller = worker.engine.host.controller
        super().__init__(model, worker.kv, controller=controller, cost=worker.cost, clock=clock)
        self._machine, self._library, self._time, self._noise = machine, library, clock, noise
        self._next_drafts: dict[tuple[DraftLayout, int], tuple[int, int]] = {}  # -> first mask, drafts

    def run(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        seconds = self._machine.seconds(shape_of(plans)) * self._noise()
        self._time.now += seconds
        times.forward += seconds
        self.num_forwards += 1
        return [self._advance(plan) for plan in plans]

    def _advance(self, plan: ScheduledSequence) -> SequenceOutput:
        advance = SequenceOutput(plan)
        if not plan.closes:
            return advance
        sequence, layout = plan.sequence, plan.layout
        num_ids = len(sequence.ids)
        text = self._library.text(sequence.sampling_params.key)
        num_accepted = self._library.num_accepted(text, num_ids, sequence.draft_depth, layout.num_drafts)
        begin, num_left = num_ids - sequence.num_prompt, sequence.num_left
        ids = self._library.ids(text, begin, begin + num_accepted + 1)
        count, advance.end = sequence.limits.cut(ids, num_left)
        advance.tokens = ids[:count]
        advance.num_accepted = min(num_accepted, count)
        wanted = min(sequence.max_drafts, num_left - count - 1)
        if advance.end is None and wanted > 0:
            choice = self._next_drafts.get((layout, count))
            if choice is None:
                group = layout.next_drafts(count - 1)
                choice = (1, 0) if group is None else (group.first_mask, group.num_drafts)
                self._next_drafts[layout, count] = choice
            advance.draft_depth = choice[0]
            advance.drafts = [0] * min(choice[1], wanted)
        return advance


class CountingController:
    """A controller, and how often it switched between plain decoding and drafts."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.num_switches = 0
        self._drafts = False

    @property
    def row_price(self) -> float:
        return self.controller.row_price

    @property
    def is_paused(self) -> bool:
        return self.controller.is_paused

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        self.controller.stepped(num_tokens, seconds, pause)

    def layouts(self, rooms: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        chosen = self.controller.layouts(rooms, load)
        if isinstance(self.controller, SpeculationController):
            drafts = self.controller.rule is not None
            self.num_switches += drafts != self._drafts
            self._drafts = drafts
        return chosen


class SimulatedWorker:
    """One incarnation of a worker, and its time."""

    def __init__(
        self,
        setup: WorkerSetup,
        machine: SimulatedMachine,
        library: TextLibrary,
        cost: StepCost,
        *,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`cost`: what it knows of the machine at its start; `jitter`: standard deviation of a step's log seconds."""
        self.clock = VirtualClock()
        fixed = setup.speculation if isinstance(setup.speculation, int) else 0
        self.controller = CountingController(FixedLayout.full(fixed) if fixed else SpeculationController(cost))
        model = NoWeights(setup)
        self.worker = Worker(
            model, num_blocks=setup.num_blocks, block_size=setup.block_size, max_sequences=setup.max_sequences,
            max_draft_length=0 if setup.speculation == "off" else fixed or None, prefill_seconds=setup.prefill_budget,
            cost=cost, controller=self.controller, clock=self.clock,
        )  # fmt: skip
        source = random.Random(f"noise {seed}")
        noise = (lambda: source.lognormvariate(0.0, jitter)) if jitter else (lambda: 1.0)
        self.worker.engine.host = CostedStepper(self.worker, model, machine, library, self.clock, noise)


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

    def set_function(self, read: Callable[[], float]) -> None:
        pass

    def read_from(self, read: Callable[[], object]) -> None:
        pass

    @property
    def series(self) -> dict[str, _Series]:
        return dict.fromkeys(PHASES, self)


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
