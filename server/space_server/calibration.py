"""What steps cost here, measured with made-up sequences before the first router comes: seconds of work, once a machine.

The sequences go through whole steps of a worker, on the pages that nobody uses yet.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from space_model.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from space_model.paged_kv import PagedKV
from space_proto import worker_pb2 as pb

from space_server.controller import FixedLayout
from space_server.step_cost import Point, StepCost, StepShape, read_points, write_points
from space_server.step_model import StepModel
from space_server.worker import PROTOCOL_MAJOR, Worker

SECONDS = 3.0
"""Of measuring, unless told otherwise."""

CONTEXT, LONG_CONTEXT = 64, 512
"""Ids that the sequences have computed before; the keys are whatever lies in the pages."""

NEW_TOKENS = 160
"""That each sequence has slots for."""

NUM_STEPS = 5
"""Timed steps of a shape, of which the middle one counts."""

PREFILL_ROWS = (32, 128, 512)

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
    clock: Callable[[], float] = time.perf_counter,
) -> list[Point]:
    """Points for `StepCost.from_points`; small ones first, as many as there are seconds for."""
    points: list[Point] = []
    begun = clock()
    for num_sequences, layout, context, temperature in _cases(model.facts, max_sequences):
        left = seconds - (clock() - begun)
        expected = _expected(points, num_sequences * layout.num_rows)
        if points and (NUM_STEPS + 1) * expected > left:
            continue
        points += _measure(model, kv, num_sequences, layout, context, temperature, clock)
    for rows in PREFILL_ROWS:
        if points and 2 * _expected(points, rows) < seconds - (clock() - begun):
            points += _prefill(model, kv, rows, clock)
    return points


def _cases(facts: ModelFacts, max_sequences: int) -> Iterator[tuple[int, DraftLayout, int, float]]:
    """Sequences, layout, context, temperature: the most telling first."""
    k = facts.most_masks
    plain = DraftLayout.plain()
    few, some, full = (DraftLayout.full(1, 1), DraftLayout.full(2, 2), DraftLayout.full(k, k)) if k > 1 else [plain] * 3
    wanted = [(1, some), (1, full), *((n, some if n <= 16 else few) for n in (8, 32, 64, 2, 16, 4, 128, 256))]
    cases = [(1, plain, CONTEXT, 0.0)]
    for num_sequences, layout in wanted:
        cases += [(num_sequences, plain, CONTEXT, 0.0), (num_sequences, layout, CONTEXT, 0.0)]
    for num_sequences in (1, 8, 32):
        cases += [(num_sequences, plain, CONTEXT, 1.0), (num_sequences, few, CONTEXT, 1.0)]
        cases += [(num_sequences, plain, LONG_CONTEXT, 0.0), (num_sequences, some, LONG_CONTEXT, 0.0)]
    cases += [(8, full, CONTEXT, 0.0), (32, some, CONTEXT, 0.0), (64, some, CONTEXT, 0.0)]
    for case in dict.fromkeys(cases):
        if case[0] <= max_sequences:
            yield case


def _expected(points: list[Point], num_rows: int) -> float:
    """Seconds of a step with so many rows, at most in proportion to those measured."""
    return max((seconds * max(1.0, num_rows / shape.num_rows) for shape, seconds in points[-1:]), default=0.0)


def _measure(
    model: StepModel,
    kv: PagedKV,
    num_sequences: int,
    layout: DraftLayout,
    context: int,
    temperature: float,
    clock: Callable[[], float],
) -> list[Point]:
    """The shapes that the timed steps had, each with the middle one of its seconds; none where pages do not suffice."""
    cost = Recorder()
    worker = _worker(model, kv, cost, FixedLayout(lambda room: layout), num_sequences, clock)
    size = kv.block_size
    pages_each = -(-(context + NEW_TOKENS) // size)
    if pages_each > kv.num_blocks or context + NEW_TOKENS > model.facts.window:
        return []
    rng = random.Random(0)
    for number in range(num_sequences):
        first = (
            number * pages_each % max(1, kv.num_blocks - pages_each + 1)
        )  # shared where there are few: K, V mean nothing
        _admit(worker, number, context, range(first, first + pages_each), temperature, rng)
    for _ in range(NUM_STEPS + 2):
        worker.step()
    timed = sorted(cost.points[2:], key=lambda point: point[1])
    return timed[len(timed) // 2 :][:1]


def _prefill(model: StepModel, kv: PagedKV, rows: int, clock: Callable[[], float]) -> list[Point]:
    """A prompt of so many rows by itself."""
    pages = -(-(rows + 2) // kv.block_size)
    if pages > kv.num_blocks or rows + 2 > model.facts.window:
        return []
    cost = Recorder()
    worker = _worker(model, kv, cost, FixedLayout(lambda room: DraftLayout.plain()), 1, clock)
    _admit(worker, 0, rows, range(pages), 0.0, random.Random(0), num_cached=0)
    worker.step()
    return cost.points


def _worker(
    model: StepModel,
    kv: PagedKV,
    cost: StepCost,
    controller: FixedLayout,
    max_sequences: int,
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
        clock=clock,
    )
    start = pb.Start(protocol_major=PROTOCOL_MAJOR, max_draft_length=worker.max_draft_length, max_prefill_rows=1 << 20)
    worker.apply(pb.Command(start=start))
    return worker


def _admit(
    worker: Worker,
    number: int,
    context: int,
    pages: range,
    temperature: float,
    rng: random.Random,
    *,
    num_cached: int | None = None,
) -> None:
    facts = worker.facts
    allowed = [id_ for id_ in range(min(facts.vocab_size, 4096)) if id_ not in set(facts.mask_ids)]
    ids = rng.choices(allowed, k=context + 1)
    admit = pb.Admit(
        seq_id=number + 1,
        ids=ids,
        num_prompt=len(ids),
        num_cached=context if num_cached is None else num_cached,
        pages=pages,
        sampling=pb.Sampling(seed=number, temperature=temperature),
        limits=pb.Limits(max_tokens=NEW_TOKENS),
        max_draft_length=worker.max_draft_length,
    )
    worker.apply(pb.Command(admit=admit))


# ---------------------------------------------------------------------------------------------- kept between starts


def cache_file(folder: Path, facts: ModelFacts, *, block_size: int, max_sequences: int) -> Path:
    """Where the points of this model on this machine are kept."""
    device = torch.cuda.get_device_name(facts.device) if facts.device.type == "cuda" else _processor()
    what = [
        version("spaceserve"),
        facts.model_hash,
        str(facts.dtype),
        str(facts.device),
        device,
        str(os.cpu_count()),
        str(facts.num_threads),
        facts.attention,
        torch.__version__,
        str(block_size),
        str(max_sequences),
    ]
    return folder / f"step-cost-{hashlib.blake2b(chr(0).join(what).encode(), digest_size=12).hexdigest()}.json"


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
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(write_points(points)))
            partial.replace(file)
        except OSError as error:
            _log.info("what steps cost is measured again at the next start: %s", error)
    return points


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/spaceserve`, or `~/.cache/spaceserve`."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "spaceserve"


def _processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
