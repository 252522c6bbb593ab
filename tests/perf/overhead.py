"""What mask rows cost: the step by its parts, tokens per second against plain decoding, and where layouts stop paying.

The worker is stepped in this process, without a server. Plain decoding, fixed layouts and the server's own choice take
turns on the same weights, pages and prompts, and every text must be plain decoding's. With synthetic acceptance each
draft is the text's own continuation, replaced by a wrong id often enough that the given rate results: every table is
labelled with it, and the embedded model with its own drafts is measured beside it.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from overhead_arms import PLAIN, PRUNED, Arm, arms, plain
from space_common.worker.choices import WEIGHTS
from space_common.worker.client import WorkerClient
from space_common.worker.settings import parse_chances
from space_eval.data import built_in
from space_eval.flags import whole_from
from space_eval.report import Ratio
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV
from space_model.networks.sampled_step import SampledStep
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.__main__ import choose_threads
from space_server.model_runner import StepModel
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance, label
from space_server.startup.calibration import SECONDS, calibrate
from space_server.step_cost import StepCost
from space_server.worker import Worker
from tokenizers import Tokenizer
from torch import Tensor

from perf.harness import PerfError, Report, log, numbers, table, take_turns

BLOCK_SIZE = 16
TAIL = 16  # tokens of each request beyond those that are timed: no step is cut short by the end of a sequence
MOST_MASKS = 6
MOST_ROWS = 512  # of a measured pass. Beyond it every row costs the same: the last two points are drawn on.
NUM_PASSES = 5


class TimedModel:
    """Passes everything on, and adds up the seconds of steps in one call, and else of the network and of the output
    head, since `begin`."""

    def __init__(self, model: StepModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model, self._clock = model, clock
        self.begin()

    def begin(self) -> None:
        self.calls = 0.0  # seconds of steps in one call
        self.network = 0.0
        self.heads: list[float] = []  # by matmul with the output head

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

    def sampled_step(self, kv: PagedKV, banned_ids: Tensor) -> TimedStep | None:
        step = self.model.sampled_step(kv, banned_ids)
        return None if step is None else TimedStep(step, self)

    def ran(self, seconds: float) -> None:
        """Add a step in one call."""
        self.calls += seconds

    def now(self) -> float:
        return self._clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class TimedStep:
    """Steps in one call, whose seconds the model adds up."""

    def __init__(self, step: SampledStep, model: TimedModel) -> None:
        self._step, self._model = step, model

    def run(self) -> list[int] | None:
        begun = self._model.now()
        ids = self._step.run()
        self._model.ran(self._model.now() - begun)
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


@dataclass(frozen=True)
class Load:
    """What every arm decodes, greedily."""

    prompts: Sequence[Sequence[int]]  # batch b takes the first b
    max_tokens: int  # timed, of each sequence


PARTS = ("call", "network", "head", "drafting", "host")


@dataclass
class Turn:
    """What one arm did with one batch, once: sums over its steps."""

    num_sequences: int
    num_steps: int = 0
    num_tokens: int = 0
    num_chain_rows: int = 0
    num_mask_rows: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds. Call: of steps that compute the next three in one; head: the output head over chain rows and accepted
    groups; drafting: draft head and choice of drafts."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
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
        self.model: Any = TimedModel(model)
        self.load = load
        self._texts: dict[int, list[int]] = {}
        longest = max(map(len, load.prompts)) + load.max_tokens + TAIL + MOST_MASKS
        num_blocks = most_sequences * -(-longest // BLOCK_SIZE)
        kv = model.allocate_kv(num_blocks, BLOCK_SIZE)
        points = calibrate(model, kv, max_sequences=most_sequences, seconds=calibration_seconds).points

        def router(arm: Arm) -> WorkerClient:
            worker = Worker(
                self.model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_sequences=most_sequences, kv=kv,
                cost=StepCost.from_points(points) if points else None, controller=arm.controller(),
                synthetic=synthetic,
            )  # fmt: skip
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
        parts["call"] += model.calls
        parts["network"] += model.network
        parts["head"] += head
        parts["drafting"] += drafting
        parts["host"] += max(0.0, seconds - model.calls - model.network - head - drafting)


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
                [Segment([id_] * count, 0, pages)], block_size=BLOCK_SIZE, mask_ids=facts.mask_ids,
                adapter_masks=[adapter.num_masks for adapter in facts.adapters], device=facts.device,
            )  # fmt: skip
            timed.begin()
            timed.logits(timed.forward(batch, kv)[:count])
            if number:  # the first time warms up
                passes[count].append(timed.network)
                heads[count] += timed.heads
    return PassCost(_curve(passes), _curve(heads))


def _curve(seconds: Mapping[int, Sequence[float]]) -> RowCurve:
    return RowCurve(tuple((count, statistics.median(values)) for count, values in seconds.items()))


NOTES = """\
Rows and milliseconds: of one step of the whole batch. E: tokens of one sequence per step, after the prompt. EOS is
ignored; every text was plain decoding's, token for token. Head: the output head, over chain rows and accepted groups.
Drafting: draft head and choice of drafts. Host: the rest of the step.

Against plain: each ratio is of one round, in which plain decoding and all layouts took turns in the same process on
the same pages; median, 95 % bootstrap bounds. Predicted: SPACE §5, E·t(B)/t(B·T), with E from this table and t
measured as one pass of so many plain rows plus the head over those sampled, without host, drafting and context. E/T:
its limit where rows are no longer free. Where a layout falls below plain decoding: the batch, between measured ones."""


@dataclass(frozen=True)
class Subject:
    """A model, and where its drafts come from."""

    model: str  # as given
    chances: tuple[float, ...] | None  # of synthetic acceptance; None: its own masks

    @property
    def title(self) -> str:
        return f"{Path(self.model).name}, {'its own drafts' if self.chances is None else label(self.chances)}"


@dataclass(frozen=True)
class Row:
    """One layout at one batch: medians over the rounds."""

    num_sequences: int
    arm: str
    chain_rows: float  # per step, over all sequences
    mask_rows: float
    tokens_per_step: float  # E, of one sequence
    step_ms: float
    parts_ms: dict[str, float]
    tokens_per_second: float
    ratio: Ratio  # to plain decoding
    predicted: float
    limit: float  # E/T


def row(arm: str, turns: Sequence[Turn], plains: Sequence[Turn], cost: PassCost) -> Row:
    """From the rounds of one arm and one batch, and those of plain decoding beside them."""
    num_sequences, steps = turns[0].num_sequences, sum(turn.num_steps for turn in turns)
    chain = sum(turn.num_chain_rows for turn in turns) / steps
    masks = sum(turn.num_mask_rows for turn in turns) / steps
    tokens = sum(turn.num_tokens for turn in turns) / (steps * num_sequences)
    parts = {
        part: statistics.median(1000 * turn.parts[part] / turn.num_steps for turn in turns) for part in turns[0].parts
    }
    return Row(
        num_sequences,
        arm,
        chain,
        masks,
        tokens,
        step_ms=statistics.median(1000 * turn.seconds / turn.num_steps for turn in turns),
        parts_ms=parts,
        tokens_per_second=statistics.median(turn.tokens_per_second for turn in turns),
        ratio=Ratio.of([t.tokens_per_second / plain.tokens_per_second for t, plain in zip(turns, plains, strict=True)]),
        predicted=cost.speed_up(
            tokens_per_step=tokens, num_sequences=num_sequences, num_rows=chain + masks, num_chain_rows=chain
        ),
        limit=tokens * num_sequences / (chain + masks),
    )


def crossing(ratios: Sequence[tuple[int, float]]) -> str:
    """The batch at which the ratio falls below 1, on a straight line over log(batch): `5.7`, `< 1` or `> 64`."""
    if not ratios:
        return "–"
    if ratios[0][1] < 1.0:
        return f"< {ratios[0][0]}"
    for (batch, ratio), (next_batch, next_ratio) in pairwise(ratios):
        if next_ratio < 1.0:
            share = (ratio - 1.0) / (ratio - next_ratio)
            return f"{batch * (next_batch / batch) ** share:.1f}"
    return f"> {ratios[-1][0]}"


def tables(subject: Subject, rows: Sequence[Row]) -> list[str]:
    parts = list(rows[0].parts_ms)
    head = ("batch", "layout", "rows: chain + masks", "E", "step ms", *parts, "tokens/s", "against plain", "predicted")
    cells = [
        (
            r.num_sequences, r.arm, f"{r.chain_rows:.1f} + {r.mask_rows:.1f}", f"{r.tokens_per_step:.2f}",
            f"{r.step_ms:.2f}", *(f"{milliseconds:.2f}" for milliseconds in r.parts_ms.values()),
            f"{r.tokens_per_second:.0f}", "1" if r.arm == PLAIN else r.ratio.shown(), f"{r.predicted:.2f}",
            f"{r.limit:.2f}",
        )
        for r in rows
    ]  # fmt: skip
    layouts = []
    for arm in dict.fromkeys(r.arm for r in rows if r.arm != PLAIN):
        of_arm = [r for r in rows if r.arm == arm]
        measured = crossing([(r.num_sequences, r.ratio.median) for r in of_arm])
        layouts.append((arm, measured, crossing([(r.num_sequences, r.predicted) for r in of_arm])))
    falls = table(("layout", "measured", "predicted"), layouts)
    return [
        f"Steps of {subject.title}\n\n{table((*head, 'E/T'), cells)}",
        f"Batch at which {subject.title} falls below plain decoding\n\n{falls}",
    ]


def measure(
    model: SpaceModel, subject: Subject, options: argparse.Namespace, chosen: Sequence[Arm], prompts: list[list[int]]
) -> list[Row]:
    facts = model.facts
    synthetic = None
    if subject.chances is not None:
        synthetic = SyntheticAcceptance(subject.chances, vocab_size=facts.vocab_size, mask_ids=facts.mask_ids)
    most = max(options.batch)
    cost = measure_pass(model, most_rows=min(MOST_ROWS, 36 * most))
    bench = Bench(
        model, Load(prompts, options.max_tokens), chosen, most_sequences=most, synthetic=synthetic,
        calibration_seconds=options.calibration_seconds,
    )  # fmt: skip
    rows = []
    for batch in options.batch:
        log(f"{subject.title}: batch {batch}")
        bench.learn_texts(batch)
        turns: dict[str, list[Turn]] = {arm.name: [] for arm in chosen}

        def turn(arm: Arm, number: int, batch: int = batch, turns: dict[str, list[Turn]] = turns) -> None:
            gc.collect()
            # The first round warms up, lets auto find its layout, and is not counted.
            steps = 3 if number == 0 and arm.rule is not None else options.steps
            done = bench.turn(arm, batch, most_steps=steps)
            if number:
                turns[arm.name].append(done)

        take_turns(chosen, options.rounds + 1, turn)
        rows += [row(arm.name, turns[arm.name], turns[PLAIN], cost) for arm in chosen]
    return rows


def prompts_of(model: SpaceModel, name: str, options: argparse.Namespace) -> list[list[int]]:
    """One for each sequence, all different, all equally long: function heads, each the end of a text of several."""
    longest = model.facts.window - options.max_tokens - TAIL
    if options.prompt_tokens > longest:
        raise PerfError(f"--prompt-tokens is {options.prompt_tokens}; with --max-tokens it is at most {longest}.")
    file = Checkpoint.open(name).folder / "tokenizer.json"
    if not file.is_file():
        raise PerfError(f"{file} does not exist. Save the tokenizer in its fast form, or run spaceserve convert.")
    tokenizer = Tokenizer.from_file(str(file))
    heads = [tokenizer.encode(prompt).ids for prompt in built_in()]
    prompts = []
    for n in range(max(options.batch)):
        ids = list(heads[n % len(heads)])
        mark = tokenizer.encode(f"# {n}\n").ids
        while len(ids) < options.prompt_tokens:
            ids = [*heads[(n + len(ids)) % len(heads)], *mark, *ids]
        prompts.append([*mark, *ids[-options.prompt_tokens :]][-options.prompt_tokens :])
    return prompts


def run(options: argparse.Namespace) -> Report:
    """The model with its own drafts; or with synthetic acceptance, beside the embedded model with its own."""
    subjects = [Subject(options.model, None)]
    if options.synthetic_acceptance:
        subjects = [Subject("demo", None), *(Subject(options.model, given) for given in options.synthetic_acceptance)]
    most_threads = torch.get_num_threads()  # before a model for which one is enough
    found, facts = [], {}
    for subject in subjects:
        threads = options.num_threads if subject.model == options.model else None
        threads = threads or choose_threads(subject.model) or most_threads
        model = load_model(subject.model, weights=options.weights, num_threads=threads)
        most_masks = model.facts.most_masks
        if not most_masks:
            raise PerfError(
                f"{subject.model} has no masks: there is nothing to lay out. Give it some with spaceserve train, or "
                "make a model that has: spaceserve bench make-model."
            )
        chosen = arms(options.k, [(k, kept) for k, kept in PRUNED if k in options.k], most_masks=most_masks)
        found.append(measure(model, subject, options, chosen, prompts_of(model, subject.model, options)))
        facts[subject.title] = (
            f"{model.facts.weights}, {str(model.facts.dtype).removeprefix('torch.')} on {model.facts.device}, "
            f"{model.facts.num_threads} threads, {most_masks} masks, "
            f"{'a' if model.facts.has_draft_head else 'no'} draft head"
        )
    facts["load"] = (
        f"prompts of {options.prompt_tokens} tokens, {options.max_tokens} more each, greedy, {options.rounds} rounds "
        f"of up to {options.steps} steps"
    )
    return report(subjects, found, facts)


def report(subjects: Sequence[Subject], found: Sequence[Sequence[Row]], facts: dict[str, str]) -> Report:
    shown = [part for subject, rows in zip(subjects, found, strict=True) for part in tables(subject, rows)]
    record = [
        {"title": subject.title, "synthetic_acceptance": subject.chances, "rows": [asdict(r) for r in rows]}
        for subject, rows in zip(subjects, found, strict=True)
    ]
    return Report("What masks cost", NOTES, shown, {"subjects": record}, facts)


def _chances(text: str) -> tuple[float, ...]:
    try:
        return parse_chances(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="folder of a checkpoint, hub id, or demo [demo]")
    add("--weights", choices=WEIGHTS, default="auto", help="as of spaceserve serve [auto]")
    add("--synthetic-acceptance", type=_chances, action="append", metavar="P",
        help=".78, .57, or five chances by mask depth; repeatable [the model's own drafts]")  # fmt: skip
    add("--batch", type=numbers(1), default=[1, 2, 4, 8, 16, 32, 64], metavar="B,…", help="[1,2,4,8,16,32,64]")
    add("--k", type=numbers(1), default=[1, 2, 3, 5], metavar="K,…", help="drafts of fixed layouts [1,2,3,5]")
    add("--rounds", type=whole_from(1), default=9, help="in which all layouts take turns [9]")
    add("--max-tokens", type=whole_from(1), default=64, help="timed, of each sequence [64]")
    add("--steps", type=whole_from(1), default=24, help="most steps of a turn [24]")
    add("--prompt-tokens", type=whole_from(1), default=64, help="of each sequence [64]")
    add("--calibration-seconds", type=float, default=SECONDS, help="for auto, as at a server's start [as there]")
    add("--num-threads", type=whole_from(1), help="of a matmul [as the server chooses]")
