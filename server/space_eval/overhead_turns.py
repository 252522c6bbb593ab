"""One turn: a batch of sequences, stepped by one arm while all of them run, and timed part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from space_model.networks.paged_kv import PagedKV
from space_proto import worker_pb2 as pb
from space_server.host_runner.host_runner import HostRunner, SequenceOutput, StepTimes
from space_server.scheduling.scheduled_batch import ScheduledSequence, shape_of
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.startup.calibration import calibrate
from space_server.step_costs.step_cost import StepCost
from space_server.step_model import StepModel
from space_server.testing import SmallRouter
from space_server.worker import Worker
from space_server.worker_messages.hello import PROTOCOL_MAJOR

from space_eval.overhead_arms import PLAIN, Arm, plain
from space_eval.overhead_model import TimedModel

BLOCK_SIZE = 16
TAIL = 16
"""Tokens of each request beyond those that are timed: no step is cut short by the end of a sequence."""

MOST_MASKS = 6
PROBE_EVERY = 4
"""Steps, one of which has its masks' cost told from its chain's."""


class OverheadError(Exception):
    """A measurement that cannot be used; the message says why."""


@dataclass(frozen=True)
class Load:
    """What is decoded, by every arm alike."""

    prompts: Sequence[Sequence[int]]  # batch b takes the first b
    max_tokens: int  # timed, of each sequence
    temperature: float = 0.0

    def sampling(self, number: int) -> pb.Sampling:
        """Of prompt `number`."""
        return pb.Sampling(seed=number, temperature=self.temperature)


@dataclass
class Parts:
    """Seconds of steps."""

    network: float = 0.0  # over all rows
    head: float = 0.0  # output head, chain rows and accepted groups
    drafting: float = 0.0  # draft head, and the choice of drafts
    host: float = 0.0  # all else: layout, packing, processors, noise, verdict, bookkeeping, report

    @property
    def total(self) -> float:
        """The whole."""
        return self.network + self.head + self.drafting + self.host


@dataclass
class Turn:
    """What one arm did with one batch, once: sums over its steps."""

    arm: str
    num_sequences: int
    num_steps: int = 0
    num_tokens: int = 0
    num_chain_rows: int = 0
    num_mask_rows: int = 0
    parts: Parts = field(default_factory=Parts)
    chain_shares: list[float] = field(default_factory=list)  # of the network's time, of a few steps
    verifications: list[tuple[int, int]] = field(default_factory=list)  # drafted and accepted, by sequence and step
    chosen: list[float] = field(default_factory=list)  # mean drafts per sequence, by step

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.num_tokens / self.parts.total

    @property
    def tokens_per_step(self) -> float:
        """E: of one sequence."""
        return self.num_tokens / (self.num_steps * self.num_sequences)


class CostClock:
    """Stands still but in steps: each takes what was measured at the start for as many rows and sequences."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CostedStepper(HostRunner):
    """Takes real steps; the clock goes on by their `cost`."""

    def __init__(
        self, model: StepModel, kv: PagedKV, cost: StepCost, clock: CostClock, synthetic: SyntheticAcceptance | None
    ) -> None:
        super().__init__(model, kv, synthetic=synthetic, clock=clock)
        self._cost, self._cost_clock = cost, clock

    def run(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        shape = shape_of(plans)
        advances = super().run(plans, times)
        self._cost_clock.now += self._cost.seconds(shape)
        return advances


class Bench:
    """One model behind a worker for each arm, all on the same pages: they take turns, and between two all are free.

    What the worker of `auto` knows of a step's cost it has as in a server: by the measurement at its start, and by its
    own steps.
    """

    def __init__(
        self,
        model: StepModel,
        load: Load,
        arms: Sequence[Arm],
        *,
        most_sequences: int,
        synthetic: SyntheticAcceptance | None = None,
        calibration_seconds: float = 3.0,
        by_cost: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`by_cost`: a step takes what calibration found for its size, whatever the clock says."""
        costed = CostClock() if by_cost else None
        measuring, clock = clock, costed or clock
        self.model = TimedModel(model, clock)
        self.load, self._clock = load, clock
        self._texts: dict[int, list[int]] = {}
        longest = max(map(len, load.prompts)) + load.max_tokens + TAIL + MOST_MASKS
        num_blocks = most_sequences * -(-longest // BLOCK_SIZE)
        kv = model.allocate_kv(num_blocks, BLOCK_SIZE)
        calibration = calibrate(model, kv, max_sequences=most_sequences, seconds=calibration_seconds, clock=measuring)
        points = calibration.points
        if costed is not None and not points:
            raise OverheadError("Nothing could be calibrated: --calibration-seconds or the pages do not suffice.")
        self._probes = costed is None

        def router(arm: Arm) -> SmallRouter:
            worker = Worker(
                self.model,
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_sequences=most_sequences,
                kv=kv,
                cost=StepCost.from_points(points) if points else None,
                controller=arm.controller(),
                synthetic=synthetic,
                clock=clock,
            )
            if costed is not None:
                worker.runner = CostedStepper(self.model, kv, StepCost.from_points(points), costed, synthetic)
            start = pb.Start(protocol_major=PROTOCOL_MAJOR, max_prefill_rows=1 << 20, max_draft_length=99)
            worker.apply(pb.Command(start=start))
            return SmallRouter(worker)

        self._routers = {arm.name: router(arm) for arm in (*arms, plain())}

    def learn_texts(self, num_sequences: int) -> None:
        """Decode the first prompts plainly and to the end: synthetic drafts, and the check of every turn, need it."""
        missing = [n for n in range(num_sequences) if n not in self._texts]
        if not missing:
            return
        router = self._routers[PLAIN]
        numbers = [self._admit(router, n) for n in missing]
        router.run()
        for n, number in zip(missing, numbers, strict=True):
            if router.ran[number].error:
                raise OverheadError(f"Prompt {n + 1} cannot be decoded: {router.ran[number].error}")
            self._texts[n] = router.ran[number].tokens

    def turn(self, arm: Arm, num_sequences: int, *, most_steps: int) -> Turn:
        """Step the first `num_sequences` prompts until one of them has its tokens. Raises OverheadError."""
        router = self._routers[arm.name]
        numbers = [self._admit(router, n) for n in range(num_sequences)]
        ran = [router.ran[number] for number in numbers]
        while not all(one.tokens for one in ran):
            self._step(router)
        turn = Turn(arm.name, num_sequences)
        while turn.num_steps < most_steps and max(len(one.tokens) for one in ran) < self.load.max_tokens:
            self.model.begin()
            begun = self._clock()
            report = self._step(router)
            self._add(turn, report.stats, self._clock() - begun)
            turn.num_tokens += sum(len(sequence.tokens) for sequence in report.sequences)
            turn.verifications += [(sequence.num_drafted, sequence.num_accepted) for sequence in report.sequences]
            turn.chosen.append(sum(s.num_drafted for s in report.sequences) / num_sequences)
            if self._probes and turn.num_steps % PROBE_EVERY == 1 and report.stats.mask_rows:
                turn.chain_shares.append(self.model.chain_share(masks_first=bool(turn.num_steps & PROBE_EVERY)))
                router.worker.interrupted()
        for number in numbers:
            router.release(number)
        router.step()
        for n, one in enumerate(ran):
            if one.tokens != self._texts[n][: len(one.tokens)]:
                raise OverheadError(f"{arm.name} at batch {num_sequences} changed the text of prompt {n + 1}.")
        return turn

    def _admit(self, router: SmallRouter, n: int) -> int:
        return router.admit(
            self.load.prompts[n],
            max_tokens=self.load.max_tokens + TAIL,
            sampling=self.load.sampling(n),
        )

    @staticmethod
    def _step(router: SmallRouter) -> pb.StepReport:
        report = router.step()
        failed = next((one.error for one in report.sequences if one.error), "") if report is not None else "no step"
        if report is None or failed:
            raise OverheadError(f"The worker cannot go on: {failed}")
        return report

    def _add(self, turn: Turn, stats: pb.StepStats, seconds: float) -> None:
        model, parts = self.model, turn.parts
        head = sum(model.heads)
        drafting = max(0.0, stats.draft_seconds - sum(model.heads[1:]))
        turn.num_steps += 1
        turn.num_chain_rows += stats.chain_rows
        turn.num_mask_rows += stats.mask_rows
        parts.network += model.network
        parts.head += head
        parts.drafting += drafting
        parts.host += max(0.0, seconds - model.network - head - drafting)
