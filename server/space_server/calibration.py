"""What steps cost here, measured with made-up sequences before the first router comes: seconds of work, once a machine.

The sequences go through whole steps of a worker, on the pages that nobody uses yet: of the kind that will be served,
those that keep their state on the device where they will.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from space_kernels.attention_backends import installed_version
from space_kernels.cpu_library import cpu_fact, cpu_library
from space_model.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from space_model.paged_kv import PagedKV
from space_proto import worker_pb2 as pb

from space_server.config import StepsHere
from space_server.controller import FixedLayout
from space_server.introduction import PROTOCOL_MAJOR
from space_server.step_cost import Point, StepCost, StepShape, read_points, write_points
from space_server.step_model import StepModel
from space_server.worker import Worker

SECONDS = 3.0
"""Of measuring, unless told otherwise."""

CONTEXT, LONG_CONTEXT = 64, 512
"""Ids that the sequences have computed before; the keys are whatever lies in the pages."""

NEW_TOKENS = 160
"""That each sequence has slots for."""

NUM_IDLE, NUM_STEPS, MOST_STEPS = 2, 5, 20
"""First steps of a case, whose layouts have no drafts to follow yet; then timed ones, of which the middle counts: so
many, and more while they are short."""

LONG = 0.03
"""Seconds of a case after which there are enough timed steps, if there are so many: the machine's unrest lasts longer
than a few short ones."""

ENOUGH = 0.1
"""Seconds of a case after which one timed step suffices: what takes so long is not lost in the clock."""

PROMPTS = ((128, 0), (32, LONG_CONTEXT), (32, 4096), (32, 0), (512, 0))
"""Rows of a prompt, and ids computed before them; three early, for whoever decodes beside the first prompt."""

MAKE = 3
"""Raised whenever steps come to cost something else: what was kept before is measured again."""

_log = logging.getLogger(__name__)


@dataclass
class Recorder(StepCost):
    """Takes the place of a cost that learns: keeps what was measured."""

    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(StepCost.typical("cpu").as_json())

    def learn(self, shape: StepShape, seconds: float) -> None:
        self.points.append((shape, seconds))


def calibrate(
    model: StepModel,
    kv: PagedKV,
    *,
    max_sequences: int,
    seconds: float = SECONDS,
    steps: StepsHere = "host",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Point]:
    """Points for `StepCost.from_points`; small ones first, as many as there are seconds for.

    `steps`: who keeps the sequences that decode, as they will be served.
    """
    points: list[Point] = []
    begun = clock()
    for case in _cases(model.facts, max_sequences):
        left = seconds - (clock() - begun)
        if not points or case.least_steps * _expected(points, case.num_rows) < left:
            points += _measure(model, kv, case, steps, clock)
    return points


@dataclass(frozen=True)
class Case:
    """Steps to measure: of sequences that decode with one layout, or of a prompt."""

    num_sequences: int
    layout: DraftLayout
    context: int = CONTEXT  # ids that each has computed before
    temperature: float = 0.0
    prompt_rows: int = 0  # ids to compute, of a single sequence; 0: it decodes
    turn: int = 1

    @property
    def num_rows(self) -> int:
        """Of a step."""
        return self.prompt_rows or self.num_sequences * self.layout.num_rows

    @property
    def least_steps(self) -> int:
        """That it takes to measure it."""
        return 1 if self.prompt_rows else NUM_IDLE + 1


def _cases(facts: ModelFacts, max_sequences: int) -> Iterator[Case]:
    """The most telling first: as many are measured as there is time for."""
    k = facts.most_masks
    plain = DraftLayout.plain()
    few, some, full = (DraftLayout.full(1, 1), DraftLayout.full(2, 2), DraftLayout.full(k, k)) if k > 1 else [plain] * 3
    more = DraftLayout.full(3, 3) if k > 3 else some
    prompts = [Case(1, plain, context, prompt_rows=rows) for rows, context in PROMPTS]
    cases = [Case(1, plain), Case(1, some), prompts[0], Case(1, full), Case(8, plain), Case(8, some), *prompts[1:3]]
    # Where drafts pay most the layouts to choose among lie closest: what lies between two of them is not guessed.
    cases += [Case(num_sequences, layout) for num_sequences in (1, 2, 4) for layout in (plain, few, some, more)]
    if k > 2:  # 5, 6, 7 and 8 rows: about there lie the bends
        between = [DraftLayout.of(1, masks) for masks in ((2, 1), (2, 2), (3, 2), (3, 3))]
        cases += [Case(num_sequences, layout) for num_sequences in (1, 2) for layout in between]
    # And once more, of one sequence before the crowds: what is compared was not all measured in the same moment.
    again = [replace(case, turn=2) for case in cases if case.num_sequences <= 4 and not case.prompt_rows]
    cases += [case for case in again if case.num_sequences == 1]
    for num_sequences in (32, 64, 16, 128, 256):
        cases += [Case(num_sequences, plain), Case(num_sequences, some if num_sequences <= 16 else few)]
    for num_sequences in (1, 8, 32):
        cases += [Case(num_sequences, layout, temperature=1.0) for layout in (plain, few)]
        cases += [Case(num_sequences, layout, LONG_CONTEXT) for layout in (plain, some)]
    cases += [Case(8, full), Case(32, some), Case(64, some), *prompts[3:]]
    cases += again
    for case in dict.fromkeys(cases):
        if case.num_sequences <= max_sequences:
            yield case


def _expected(points: list[Point], num_rows: int) -> float:
    """Seconds of a step with so many rows, at most in proportion to those measured."""
    return max((seconds * max(1.0, num_rows / shape.num_rows) for shape, seconds in points[-1:]), default=0.0)


def _measure(
    model: StepModel,
    kv: PagedKV,
    case: Case,
    steps: StepsHere,
    clock: Callable[[], float],
) -> list[Point]:
    """The shape that the timed steps had, with the middle one of their seconds; none where pages do not suffice.

    On a device the first steps of a kind are compiled and captured; the cost learns nothing of those.
    """
    num_slots = case.context + (case.prompt_rows + 2 if case.prompt_rows else NEW_TOKENS)
    pages_each = -(-num_slots // kv.block_size)
    if pages_each > kv.num_blocks or num_slots > model.facts.window:
        return []
    cost, rng = Recorder(), random.Random(0)
    if case.prompt_rows:
        steps = "host"  # who reads a prompt, whoever decodes
    worker = _worker(model, kv, cost, FixedLayout(lambda room: case.layout), case.num_sequences, steps, clock)
    for number in range(case.num_sequences):
        # shared where there are few: K and V mean nothing
        first = number * pages_each % max(1, kv.num_blocks - pages_each + 1)
        _admit(worker, number, case, range(first, first + pages_each), rng)
    if case.prompt_rows:
        worker.step()
        return cost.points
    begun = clock()
    while len(cost.points) < NUM_IDLE + MOST_STEPS and worker.has_work:
        worker.step()
        if steps != "host" and len(cost.points) <= NUM_IDLE:
            begun = clock()  # what is done once is not the case's time
        num_timed, taken = len(cost.points) - NUM_IDLE, clock() - begun
        if (num_timed > 0 and taken > ENOUGH) or (num_timed >= NUM_STEPS and taken > LONG):
            break
    timed = sorted(cost.points[NUM_IDLE:], key=lambda point: point[1])
    return timed[len(timed) // 2 :][:1]


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


def _admit(worker: Worker, number: int, case: Case, pages: range, rng: random.Random) -> None:
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


# ---------------------------------------------------------------------------------------------- kept between starts


def cache_file(
    folder: Path, facts: ModelFacts, *, block_size: int, max_sequences: int, exact: bool = False, steps: str = "host"
) -> Path:
    """Where the points of this model on this machine are kept, as long as the same cases are measured."""
    device = (
        torch.cuda.get_device_name(facts.device)
        if facts.device.type == "cuda"
        else cpu_fact("model name") or platform.machine()
    )
    what = [
        installed_version("spaceserve") or "a checkout",
        str(MAKE),
        facts.model_hash,
        facts.number_format,
        str(facts.device),
        device,
        str(os.cpu_count()),
        str(facts.num_threads),
        str(facts.num_ranks),
        "exact" if exact else "as fast as can be",
        facts.attention,
        *_own_operations(facts),
        torch.__version__,
        str(block_size),
        str(max_sequences),
        *map(repr, _cases(facts, max_sequences)),
    ]
    if steps != "host":
        what.append(f"{steps} steps")
    return folder / f"step-cost-{hashlib.blake2b(chr(0).join(what).encode(), digest_size=12).hexdigest()}.json"


def _own_operations(facts: ModelFacts) -> list[str]:
    """The kind of processor that our own operations are compiled for, where the model is computed by them."""
    library = cpu_library() if facts.device.type == "cpu" and facts.dtype is torch.bfloat16 else None
    return [] if library is None else [library.kind]


def load_or_measure(file: Path | None, measure: Callable[[], list[Point]]) -> list[Point]:
    """The points kept in `file`, else measured now and kept there if that can be done."""
    if file is not None:
        try:
            points = read_points(json.loads(file.read_text()))
            if points:
                return points
        except (OSError, ValueError, TypeError):
            pass  # none yet, or of another make
    points = measure()
    if file is not None and points:
        partial = file.with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(write_points(points)))
            partial.replace(file)
        except OSError as error:
            _log.info("what steps cost is measured again at the next start: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    return points
