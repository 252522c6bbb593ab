"""Timed steps of one worker for each arm: the parts of a step, and what a forward pass costs by its rows."""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from overhead_arms import PLAIN, Arm, plain
from space_common.worker_client import WorkerClient
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.heads.draft_head_weights import DraftHeadWeights
from space_model.model_facts import ModelFacts
from space_model.networks.paged_kv import PagedKV
from space_proto import worker_pb2 as pb
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.startup.calibration import calibrate
from space_server.step_cost import StepCost
from space_server.step_model import StepModel
from space_server.worker import Worker
from torch import Tensor

from perf.harness import PerfError

BLOCK_SIZE = 16
TAIL = 16
"""Tokens of each request beyond those that are timed: no step is cut short by the end of a sequence."""
MOST_MASKS = 6
MOST_ROWS = 512
"""Of a measured pass. Beyond it every row costs the same: the last two points are drawn on."""
NUM_PASSES = 5


class TimedModel:
    """Passes everything on, and adds up the seconds of the network and of the output head since `begin`."""

    def __init__(self, model: StepModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model, self._clock = model, clock
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.network = 0.0
        self.heads: list[float] = []  # by matmul with the output head

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        return self.model.draft_head_of(adapter)

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        return self.model.allocate_kv(num_blocks, block_size)

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        begun = self._clock()
        hidden = self.model.forward(batch, kv)
        self.network += self._clock() - begun
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        begun = self._clock()
        logits = self.model.logits(hidden)
        self.heads.append(self._clock() - begun)
        return logits

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.model.logits_of(hidden, ids)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed(ids)


@dataclass(frozen=True)
class Load:
    """What every arm decodes, greedily."""

    prompts: Sequence[Sequence[int]]  # batch b takes the first b
    max_tokens: int  # timed, of each sequence


@dataclass
class Turn:
    """What one arm did with one batch, once: sums over its steps."""

    num_sequences: int
    num_steps: int = 0
    num_tokens: int = 0
    num_chain_rows: int = 0
    num_mask_rows: int = 0
    parts: dict[str, float] = field(default_factory=lambda: {"network": 0.0, "head": 0.0, "drafting": 0.0, "host": 0.0})
    """Seconds. Head: the output head over chain rows and accepted groups; drafting: draft head and choice of drafts."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """E: of one sequence."""
        return self.num_tokens / (self.num_steps * self.num_sequences)


class Bench:
    """One model behind a worker for each arm, all on the same pages, which are free between turns.

    The worker of `auto` knows the cost of a step as in a server: from calibration, and from its own steps.
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
    ) -> None:
        self.model = TimedModel(model)
        self.load = load
        self._texts: dict[int, list[int]] = {}
        longest = max(map(len, load.prompts)) + load.max_tokens + TAIL + MOST_MASKS
        num_blocks = most_sequences * -(-longest // BLOCK_SIZE)
        kv = model.allocate_kv(num_blocks, BLOCK_SIZE)
        points = calibrate(model, kv, max_sequences=most_sequences, seconds=calibration_seconds).points

        def router(arm: Arm) -> WorkerClient:
            worker = Worker(
                self.model,
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                max_sequences=most_sequences,
                kv=kv,
                cost=StepCost.from_points(points) if points else None,
                controller=arm.controller(),
                synthetic=synthetic,
            )
            return WorkerClient(worker, max_prefill_rows=1 << 20)

        self._routers = {arm.name: router(arm) for arm in (*arms, plain())}

    def learn_texts(self, num_sequences: int) -> None:
        """Decode the first prompts plainly and to the end: synthetic drafts, and the check of every turn, need it."""
        missing = [n for n in range(num_sequences) if n not in self._texts]
        router = self._routers[PLAIN]
        numbers = [self._admit(router, n) for n in missing]
        if missing:
            router.run()
        for n, number in zip(missing, numbers, strict=True):
            if router.sequences[number].error:
                raise PerfError(f"Prompt {n + 1} cannot be decoded: {router.sequences[number].error}")
            self._texts[n] = router.sequences[number].tokens

    def turn(self, arm: Arm, num_sequences: int, *, most_steps: int) -> Turn:
        """Step the first `num_sequences` prompts until one of them has its tokens. Raises PerfError."""
        router = self._routers[arm.name]
        numbers = [self._admit(router, n) for n in range(num_sequences)]
        ran = [router.sequences[number] for number in numbers]
        while not all(one.tokens for one in ran):
            self._step(router)
        turn = Turn(num_sequences)
        while turn.num_steps < most_steps and max(len(one.tokens) for one in ran) < self.load.max_tokens:
            self.model.begin()
            begun = time.perf_counter()
            report = self._step(router)
            self._add(turn, report.stats, time.perf_counter() - begun)
            turn.num_tokens += sum(len(sequence.tokens) for sequence in report.sequences)
        for number in numbers:
            router.release(number)
        router.step()
        for n, one in enumerate(ran):
            if one.tokens != self._texts[n][: len(one.tokens)]:
                raise PerfError(f"{arm.name} at batch {num_sequences} changed the text of prompt {n + 1}.")
        return turn

    def _admit(self, router: WorkerClient, n: int) -> int:
        return router.admit(self.load.prompts[n], max_tokens=self.load.max_tokens + TAIL, sampling=pb.Sampling(seed=n))

    @staticmethod
    def _step(router: WorkerClient) -> pb.StepReport:
        report = router.step()
        failed = next((one.error for one in report.sequences if one.error), "") if report is not None else "no step"
        if report is None or failed:
            raise PerfError(f"The worker cannot go on: {failed}")
        return report

    def _add(self, turn: Turn, stats: pb.StepStats, seconds: float) -> None:
        model, parts = self.model, turn.parts
        head = sum(model.heads)
        drafting = max(0.0, stats.draft_seconds - sum(model.heads[1:]))
        turn.num_steps += 1
        turn.num_chain_rows += stats.chain_rows
        turn.num_mask_rows += stats.mask_rows
        parts["network"] += model.network
        parts["head"] += head
        parts["drafting"] += drafting
        parts["host"] += max(0.0, seconds - model.network - head - drafting)


@dataclass(frozen=True)
class RowCurve:
    """Seconds by number of rows: straight lines between measured points."""

    points: tuple[tuple[int, float], ...]  # ascending rows, two or more

    def seconds(self, num_rows: float) -> float:
        at = bisect.bisect_left([rows for rows, _ in self.points], num_rows)
        at = min(max(at, 1), len(self.points) - 1)
        (rows, low), (more, high) = self.points[at - 1 : at + 1]
        return max(low + (high - low) * (num_rows - rows) / (more - rows), 1e-9)


@dataclass(frozen=True)
class PassCost:
    """A forward pass by its rows, and the output head by those sampled."""

    network: RowCurve
    head: RowCurve

    def speed_up(self, *, tokens_per_step: float, num_sequences: int, num_rows: float, num_chain_rows: float) -> float:
        """E · t(B) / t(B·T) (SPACE §5); rows are those of a whole step.

        t is model computation alone, without host and context. Sampled are the chain rows, and the masks that give the
        next drafts.
        """
        plain = self.network.seconds(num_sequences) + self.head.seconds(num_sequences)
        num_sampled = 2 * num_chain_rows - num_sequences
        return tokens_per_step * plain / (self.network.seconds(num_rows) + self.head.seconds(num_sampled))


def measure_pass(model: StepModel, *, most_rows: int = MOST_ROWS) -> PassCost:
    """Rows of one sequence without cached ids; medians of a few passes."""
    facts = model.facts
    most_rows = max(4, min(most_rows, facts.window - 1))
    kv = model.allocate_kv(-(-most_rows // BLOCK_SIZE), BLOCK_SIZE)
    pages = list(range(kv.num_blocks))
    id_ = next(id_ for id_ in range(facts.vocab_size) if id_ not in set(facts.mask_ids))
    counts = [rows for exponent in range(16) if (rows := 1 << exponent) <= most_rows]
    passes: dict[int, list[float]] = {count: [] for count in counts}
    heads: dict[int, list[float]] = {count: [] for count in counts}
    timed = TimedModel(model)
    for number in range(NUM_PASSES + 1):  # all counts in turn, so that a machine that becomes slower slows all
        for count in counts:
            batch = ForwardBatch.build(
                [Segment([id_] * count, 0, pages)],
                block_size=BLOCK_SIZE,
                mask_ids=facts.mask_ids,
                adapter_masks=[adapter.num_masks for adapter in facts.adapters],
                device=facts.device,
            )
            timed.begin()
            timed.logits(timed.forward(batch, kv)[:count])
            if number:  # the first time warms up
                passes[count].append(timed.network)
                heads[count] += timed.heads
    return PassCost(_curve(passes), _curve(heads))


def _curve(seconds: Mapping[int, Sequence[float]]) -> RowCurve:
    return RowCurve(tuple((count, statistics.median(values)) for count, values in seconds.items()))
