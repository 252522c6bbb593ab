"""What steps cost here, measured with made-up sequences before the first router comes: seconds of work, once a machine.

The sequences go through whole steps of a worker, on the pages that nobody uses yet: of the kind that will be served,
those that keep their state on the device where they will. A few of the steps, the anchors, are measured three times: at
the beginning, in the middle and at the end. Where these passes differ, something else was going on.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from space_model.geometry.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from space_model.networks.paged_kv import PagedKV
from space_proto import worker_pb2 as pb

from space_server.config import StepsHere
from space_server.speculation.controller import FixedLayout
from space_server.step_costs.step_cost import Point, StepCost, StepShape
from space_server.step_model import StepModel
from space_server.worker import Worker
from space_server.worker_messages.hello import PROTOCOL_MAJOR

SECONDS = 3.0
"""Of measuring, unless told otherwise."""

CONTEXT, LONG_CONTEXT = 64, 512
"""Ids that the sequences have computed before; the keys are whatever lies in the pages."""

NEW_TOKENS = 160
"""That each sequence has slots for."""

NUM_IDLE, NUM_STEPS, MOST_STEPS = 2, 5, 20
"""First steps of a case, whose layouts have no drafts to follow yet and in which a device compiles and captures; then
timed ones, of which the middle counts: so many, and more while they are short."""

LONG = 0.03
"""Seconds of a case after which there are enough timed steps, if there are so many: the machine's unrest lasts longer
than a few short ones."""

ENOUGH = 0.1
"""Seconds of a case after which one timed step suffices: what takes so long is not lost in the clock."""

PROMPTS = ((128, 0), (32, LONG_CONTEXT), (32, 4096), (32, 0), (512, 0))
"""Rows of a prompt, and ids computed before them; three early, for whoever decodes beside the first prompt."""

NUM_PASSES, AGREE, FEWEST = 3, 0.1, 5
"""How often the anchors are measured; the share by which the passes may differ where the figures are to be kept; and
the different steps that must have been measured then."""

PASSES_SHARE = 1 / 3
"""Of the seconds, what all passes may take; where steps are slow there are fewer anchors, one at least."""


@dataclass
class Recorder(StepCost):
    """Takes the place of a cost that learns: keeps what was measured."""

    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(StepCost.typical("cpu").as_json())

    def learn(self, shape: StepShape, seconds: float) -> None:
        self.points.append((shape, seconds))


@dataclass(frozen=True)
class Timing:
    """How long steps of one shape took."""

    shape: StepShape
    times: tuple[float, ...]  # seconds of each

    @property
    def seconds(self) -> float:
        """The middle one's."""
        return sorted(self.times)[len(self.times) // 2]

    @property
    def noise(self) -> float:
        """Standard error of the middle one, as a share of it: by the median deviation, as a normal law would have it.

        Of fewer than five steps it cannot be told; they are taken for as restless as passes may be.
        """
        if len(self.times) < NUM_STEPS:
            return AGREE / 3
        deviation = 1.4826 * statistics.median(abs(taken - self.seconds) for taken in self.times)
        return math.sqrt(math.pi / 2 / len(self.times)) * deviation / self.seconds


@dataclass(frozen=True)
class Calibration:
    """What was measured."""

    points: list[Point]
    passes: dict[str, list[float]]  # by anchor: seconds of the same steps, pass by pass
    seconds: float  # that it took

    @property
    def spread(self) -> float | None:
        """The largest share by which the passes of an anchor differ; None where it was not measured three times."""
        if not self.passes or any(len(found) < NUM_PASSES for found in self.passes.values()):
            return None
        return max(max(found) / min(found) - 1.0 for found in self.passes.values())

    @property
    def why_unsure(self) -> str | None:
        """Why another start should not rely on this; None: it may."""
        num_shapes = len({shape for shape, _ in self.points})
        if self.spread is None:
            return f"steps are too slow to be measured {NUM_PASSES} times in --calibration-seconds"
        if self.spread > AGREE:
            return f"{NUM_PASSES} passes differ by {100 * self.spread:.0f} %; up to {100 * AGREE:.0f} % would do"
        if num_shapes < FEWEST:
            return f"{num_shapes} different steps were measured in {self.seconds:.1f} s; {FEWEST} would do"
        return None


def calibrate(
    model: StepModel,
    kv: PagedKV,
    *,
    max_sequences: int,
    seconds: float = SECONDS,
    steps: StepsHere = "host",
    clock: Callable[[], float] = time.perf_counter,
    between: Callable[[], None] = lambda: None,
) -> Calibration:
    """Points for `StepCost.from_points`: small steps first, as many as there are seconds for.

    `steps`: who keeps the sequences that decode, as they will be served. `between` is called between cases.
    """
    points: list[Point] = []
    passes: dict[str, list[float]] = {}
    anchors: list[CalibrationCase] = []
    candidates = _anchors(model.facts, max_sequences)
    if model.facts.device.type == "cuda":
        for case in candidates:  # what is compiled at the first step of all is no part of the seconds
            time_steps(model, kv, case, steps, clock)
    begun = clock()

    def timed(case: CalibrationCase) -> Timing | None:
        timing = time_steps(model, kv, case, steps, clock)
        between()
        return timing

    def keep(timing: Timing | None) -> None:
        if timing is not None:
            points.append((timing.shape, timing.seconds))

    def fits(case: CalibrationCase, reserve: float) -> bool:
        left = seconds - reserve - (clock() - begun)
        return not points or case.least_steps * _expected(points, case.num_rows) < left

    def measure_anchors(cases: Sequence[CalibrationCase]) -> None:
        for case in cases:
            timing = timed(case)
            if timing is not None and sum(timing.times) < ENOUGH:  # one hiccup could be all of it
                timing = min(timing, timed(case) or timing, key=lambda one: one.seconds)
            keep(timing)
            if timing is not None:
                passes.setdefault(str(case), []).append(timing.seconds)

    for case in candidates:
        if fits(case, (1.0 - PASSES_SHARE / NUM_PASSES) * seconds):
            anchors.append(case)
            measure_anchors([case])
    pass_seconds = clock() - begun
    left = NUM_PASSES - 1 if NUM_PASSES * pass_seconds < seconds else 0  # passes to come
    for case in _cases(model.facts, max_sequences):
        if left == NUM_PASSES - 1 and clock() - begun >= seconds / 2:
            measure_anchors(anchors)
            left -= 1
        if replace(case, turn=1) not in anchors and fits(case, left * pass_seconds):
            keep(timed(case))
    for _ in range(left):
        measure_anchors(anchors)
    return Calibration(points, passes, clock() - begun)


def time_plain_step(
    model: StepModel, kv: PagedKV, *, steps: StepsHere = "host", clock: Callable[[], float] = time.perf_counter
) -> Timing | None:
    """The first anchor alone: what costs that were kept are held against. None where pages do not suffice."""
    return time_steps(model, kv, PLAIN_STEP, steps, clock)


@dataclass(frozen=True)
class CalibrationCase:
    """Steps to measure: of sequences that decode with one layout, or of a prompt."""

    num_sequences: int
    layout: DraftLayout
    context: int = CONTEXT  # ids that each has computed before
    temperature: float = 0.0
    prompt_rows: int = 0  # ids to compute, of a single sequence; 0: it decodes
    turn: int = 1

    def __str__(self) -> str:
        who = f"{self.num_sequences} sequence" + "s" * (self.num_sequences > 1)
        masks = f"{self.layout.num_drafts} drafts, {self.layout.num_masks} masks" if self.layout.num_masks else "plain"
        return f"{who}, {self.prompt_rows} prompt rows" if self.prompt_rows else f"{who}, {masks}"

    @property
    def num_rows(self) -> int:
        """Of a step."""
        return self.prompt_rows or self.num_sequences * self.layout.num_rows

    @property
    def num_idle(self) -> int:
        """First steps that are not timed: of a prompt one, whose operations are compiled in it."""
        return 1 if self.prompt_rows else NUM_IDLE

    @property
    def least_steps(self) -> int:
        """That it takes to measure it, as `_expected` counts them: two of a prompt take less than one in proportion."""
        return 1 if self.prompt_rows else self.num_idle + 1


PLAIN_STEP = CalibrationCase(1, DraftLayout.plain())


def _anchors(facts: ModelFacts, max_sequences: int) -> list[CalibrationCase]:
    """What is measured in every pass: the steps that are compared most."""
    found = [PLAIN_STEP, CalibrationCase(1, DraftLayout.full(2, 2)), CalibrationCase(8, DraftLayout.plain())]
    few_masks = facts.most_masks < 2
    return [case for case in found if case.num_sequences <= max_sequences and not (few_masks and case.layout.num_masks)]


def _cases(facts: ModelFacts, max_sequences: int) -> Iterator[CalibrationCase]:
    """The most telling first: as many are measured as there is time for."""
    k = facts.most_masks
    plain = DraftLayout.plain()
    few, some, full = (DraftLayout.full(1, 1), DraftLayout.full(2, 2), DraftLayout.full(k, k)) if k > 1 else [plain] * 3
    more = DraftLayout.full(3, 3) if k > 3 else some
    prompts = [CalibrationCase(1, plain, context, prompt_rows=rows) for rows, context in PROMPTS]
    cases = [
        PLAIN_STEP,
        CalibrationCase(1, some),
        prompts[0],
        CalibrationCase(1, full),
        CalibrationCase(8, plain),
        CalibrationCase(8, some),
        *prompts[1:3],
    ]
    # Where drafts pay most the layouts to choose among lie closest: what lies between two of them is not guessed.
    cases += [
        CalibrationCase(num_sequences, layout) for num_sequences in (1, 2, 4) for layout in (plain, few, some, more)
    ]
    if k > 2:  # 5, 6, 7 and 8 rows: about there lie the bends
        between = [DraftLayout.of(1, masks) for masks in ((2, 1), (2, 2), (3, 2), (3, 3))]
        cases += [CalibrationCase(num_sequences, layout) for num_sequences in (1, 2) for layout in between]
    # And once more, of one sequence before the crowds: what is compared was not all measured in the same moment.
    again = [replace(case, turn=2) for case in cases if case.num_sequences <= 4 and not case.prompt_rows]
    cases += [case for case in again if case.num_sequences == 1]
    for num_sequences in (32, 64, 16, 128, 256):
        cases += [
            CalibrationCase(num_sequences, plain),
            CalibrationCase(num_sequences, some if num_sequences <= 16 else few),
        ]
    for num_sequences in (1, 8, 32):
        cases += [CalibrationCase(num_sequences, layout, temperature=1.0) for layout in (plain, few)]
        cases += [CalibrationCase(num_sequences, layout, LONG_CONTEXT) for layout in (plain, some)]
    cases += [CalibrationCase(8, full), CalibrationCase(32, some), CalibrationCase(64, some), *prompts[3:]]
    cases += again
    for case in dict.fromkeys(cases):
        if case.num_sequences <= max_sequences:
            yield case


def case_names(facts: ModelFacts, max_sequences: int) -> Sequence[str]:
    """All that would be measured with time enough: costs of other cases are not these."""
    return [repr(case) for case in _cases(facts, max_sequences)]


def _expected(points: list[Point], num_rows: int) -> float:
    """Seconds of a step with so many rows, at most in proportion to those measured."""
    return max((seconds * max(1.0, num_rows / shape.num_rows) for shape, seconds in points[-1:]), default=0.0)


def time_steps(
    model: StepModel,
    kv: PagedKV,
    case: CalibrationCase,
    steps: StepsHere = "host",
    clock: Callable[[], float] = time.perf_counter,
) -> Timing | None:
    """Take the case's steps, and how long those took that are timed; None where pages do not suffice.

    First steps are left out: on a device those of a kind are compiled and captured, and where the host reads prompts
    there its operations are compiled at their first call.
    """
    num_slots = case.context + (case.prompt_rows + 2 if case.prompt_rows else NEW_TOKENS)
    pages_each = -(-num_slots // kv.block_size)
    if pages_each > kv.num_blocks or num_slots > model.facts.window:
        return None
    if case.prompt_rows:
        steps = "host"  # who reads a prompt, whoever decodes
    recorder, rng = Recorder(), random.Random(0)
    worker = _worker(model, kv, recorder, FixedLayout(lambda room: case.layout), case.num_sequences, steps, clock)

    def admit(number: int) -> None:
        # shared where there are few: K and V mean nothing
        first = number * pages_each % max(1, kv.num_blocks - pages_each + 1)
        _admit(worker, number, case, range(first, first + pages_each), rng)

    def is_over(begun: float) -> bool:
        num_timed, taken = len(recorder.points) - case.num_idle, clock() - begun
        return (num_timed > 0 and taken > ENOUGH) or (num_timed >= NUM_STEPS and taken > LONG)

    begun = clock()
    if case.prompt_rows:
        for number in range(case.num_idle + NUM_STEPS):  # one behind the other
            admit(number)
            worker.step()
            worker.apply(pb.Command(release=pb.Release(seq_id=number + 1)))
            if is_over(begun):
                break
    else:
        for number in range(case.num_sequences):
            admit(number)
        while len(recorder.points) < NUM_IDLE + MOST_STEPS and worker.has_work:
            worker.step()
            if steps != "host" and len(recorder.points) <= NUM_IDLE:
                begun = clock()  # what is done once is not the case's time
            if is_over(begun):
                break
    timed = sorted(recorder.points[case.num_idle :], key=lambda point: point[1])
    return Timing(timed[len(timed) // 2][0], tuple(seconds for _, seconds in timed)) if timed else None


def _worker(
    model: StepModel,
    kv: PagedKV,
    cost: StepCost,
    controller: FixedLayout,
    max_sequences: int,
    steps: StepsHere,
    clock: Callable[[], float],
) -> Worker:
    worker = Worker(
        model,
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_sequences=max_sequences,
        kv=kv,
        cost=cost,
        controller=controller,
        device_steps=steps != "host",
        eager=steps == "eager",
        clock=clock,
    )
    start = pb.Start(protocol_major=PROTOCOL_MAJOR, max_draft_length=worker.max_draft_length, max_prefill_rows=1 << 20)
    worker.apply(pb.Command(start=start))
    return worker


def _admit(worker: Worker, number: int, case: CalibrationCase, pages: range, rng: random.Random) -> None:
    facts = worker.facts
    allowed = [id_ for id_ in range(min(facts.vocab_size, 4096)) if id_ not in set(facts.mask_ids)]
    ids = rng.choices(allowed, k=case.context + (case.prompt_rows or 1))
    admit = pb.Admit(
        seq_id=number + 1,
        ids=ids,
        num_prompt=len(ids),
        num_cached=case.context,
        pages=pages,
        sampling=pb.Sampling(seed=number, temperature=case.temperature),
        limits=pb.Limits(max_tokens=NEW_TOKENS),
        max_draft_length=worker.max_draft_length,
    )
    worker.apply(pb.Command(admit=admit))
