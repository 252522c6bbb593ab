"""Measures step costs with synthetic sequences before the first router connects: seconds of work, once per machine.

The sequences run through whole worker steps on pages not in use yet, on the runner (host or device) that will serve. A
few steps, the anchors, are measured three times: at the beginning, in the middle and at the end. If these passes
differ, something else used the machine. A worker starts with costs from one of three origins:

file        written by an earlier start, and a plain step still takes as long
measured    at this start: three passes agreed and the machine was idle; written to the file for the next start
learned     three passes differed, or the machine was busy: a first estimate that serving corrects, not written

The file is readable JSON. Its name is derived from the model and how it is computed, so each configuration has its
own. Versions are stored inside; a file of another version is measured again and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from space_common.version import version
from space_common.worker.settings import StepsHere
from space_kernels.attention_backends import installed_version
from space_kernels.build.cpu_library import cpu_fact, cpu_library
from space_model.geometry.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from space_proto import worker_pb2 as pb

from space_server.machine.sensors import LoadWatch, MachineLoad
from space_server.model_runner import StepModel
from space_server.speculation.controller import FixedLayout, few_layouts
from space_server.step_cost import CostOrigin, Point, StepCost, StepShape, read_points
from space_server.worker import Worker
from space_server.worker_messages import PROTOCOL_MAJOR

_log = logging.getLogger(__name__)

SECONDS = 3.0
"""Default duration."""

CONTEXT, LONG_CONTEXT = 64, 512
"""Ids already computed in the sequences; their keys are whatever the pages hold."""

NEW_TOKENS = 160
"""Tokens that each sequence has slots for."""

NUM_ONE_TIME = 3
"""Steps of a prompt that is captured before its cost is learnt: they compile, are watched for waits, and capture."""

NUM_IDLE, NUM_STEPS, MOST_STEPS = 2, 5, 20
"""Untimed first steps of a case, which have no drafts yet and compile and capture on a device; then timed steps, of
which the median counts: at least NUM_STEPS, and up to MOST_STEPS while they are short."""

LONG = 0.03
"""Seconds of a case after which NUM_STEPS timed steps are enough: noise outlasts a few short steps."""

ENOUGH = 0.1
"""Seconds of a case after which one timed step is enough: its clock error is negligible."""

PROMPTS = ((128, 0), (32, LONG_CONTEXT), (32, 4096), (32, 0), (512, 0))
"""Prompt rows, and ids computed before them. Three come early, to bound the first prompt beside decoding sequences."""

NUM_PASSES, AGREE, FEWEST = 3, 0.1, 5
"""Passes over the anchors; the share by which they may differ if the costs are to be kept; and the least number of
different steps measured then."""

MOST_ONE_TIME = 3.0
"""Bound on the one-time work of captured steps, as a multiple of the time for measuring."""

MOST_MASK_ROWS = 640
"""Rows of a captured step beyond which layouts of masks are not measured: there they are slower than plain decoding."""

PASSES_SHARE = 1 / 3
"""Share of the time for all passes; slow machines measure fewer anchors, but at least one."""


@dataclass
class Recorder(StepCost):
    """A step cost model that records measurements instead of learning."""

    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(StepCost.typical("cpu").as_json())

    def learn(self, shape: StepShape, seconds: float) -> None:
        self.points.append((shape, seconds))


@dataclass(frozen=True)
class Timing:
    """Durations of steps of one shape."""

    shape: StepShape
    times: tuple[float, ...]  # seconds of each
    one_time: float = 0.0  # seconds before them: sequences are admitted, steps compiled and captured

    @property
    def seconds(self) -> float:
        """The median."""
        return sorted(self.times)[len(self.times) // 2]

    @property
    def noise(self) -> float:
        """Standard error of the median, relative to it, from the median absolute deviation under a normal distribution.
        With fewer than five steps it is unknown, and taken to be as large as passes may differ."""
        if len(self.times) < NUM_STEPS:
            return AGREE / 3
        deviation = 1.4826 * statistics.median(abs(taken - self.seconds) for taken in self.times)
        return math.sqrt(math.pi / 2 / len(self.times)) * deviation / self.seconds


@dataclass(frozen=True)
class Calibration:
    """The measurements."""

    points: list[Point]
    passes: dict[str, list[float]]  # by anchor: seconds of the same steps, pass by pass
    seconds: float  # that it took

    @property
    def spread(self) -> float | None:
        """The largest relative difference between passes of an anchor; None unless each was measured three times."""
        if not self.passes or any(len(found) < NUM_PASSES for found in self.passes.values()):
            return None
        return max(max(found) / min(found) - 1.0 for found in self.passes.values())

    @property
    def why_unsure(self) -> str | None:
        """Why later starts should not rely on this; None: they may."""
        num_shapes = num_different(self.points)
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
    """Measure points for `StepCost.from_points`, small steps first, as many as fit in `seconds`.
    `steps`: where decoding sequences keep their state, as when serving; of captured steps (`device`), what the first of
    each kind take to be compiled and captured does not count, up to `MOST_ONE_TIME` times the seconds. `between` is
    called between cases."""
    points: list[Point] = []
    passes: dict[str, list[float]] = {}
    anchors: list[CalibrationCase] = []
    is_captured, one_time = steps == "device", 0.0
    candidates = _anchors(model.facts, max_sequences)
    if model.facts.device.type == "cuda":
        for case in candidates:  # compilation does not count towards the seconds
            time_steps(model, kv, case, steps, clock)
    begun = clock()

    def spent() -> float:
        return clock() - begun - min(one_time, MOST_ONE_TIME * seconds)

    def timed(case: CalibrationCase) -> Timing | None:
        nonlocal one_time
        timing = time_steps(model, kv, case, steps, clock)
        if timing is not None and is_captured:
            one_time += timing.one_time
        between()
        return timing

    def keep(timing: Timing | None) -> None:
        if timing is not None:
            points.append((timing.shape, timing.seconds))

    def fits(case: CalibrationCase, reserve: float) -> bool:
        left = seconds - reserve - spent()
        return not points or case.least_steps * _expected(points, case.num_rows) < left

    def measure_anchors(cases: Sequence[CalibrationCase]) -> None:
        for case in cases:
            timing = timed(case)
            if timing is not None and sum(timing.times) < ENOUGH:  # a single interruption could dominate a short case
                timing = min(timing, timed(case) or timing, key=lambda one: one.seconds)
            keep(timing)
            if timing is not None:
                passes.setdefault(str(case), []).append(timing.seconds)

    for case in candidates:
        if fits(case, (1.0 - PASSES_SHARE / NUM_PASSES) * seconds):
            anchors.append(case)
            measure_anchors([case])
    pass_seconds = spent()
    left = NUM_PASSES - 1 if NUM_PASSES * pass_seconds < seconds else 0  # passes left
    for case in (_captured_cases if is_captured else _cases)(model.facts, max_sequences):
        if left == NUM_PASSES - 1 and spent() >= seconds / 2:
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
    """Time the first anchor, to check kept costs against. None if the pages do not suffice."""
    return time_steps(model, kv, PLAIN_STEP, steps, clock)


@dataclass(frozen=True)
class CalibrationCase:
    """Steps to measure: sequences that decode with one layout, or one prompt."""

    num_sequences: int
    layout: DraftLayout
    context: int = CONTEXT  # computed ids per sequence
    temperature: float = 0.0
    prompt_rows: int = 0  # pending ids of a single sequence; 0: it decodes
    turn: int = 1

    def __str__(self) -> str:
        who = f"{self.num_sequences} sequence" + "s" * (self.num_sequences > 1)
        masks = f"{self.layout.num_drafts} drafts, {self.layout.num_masks} masks" if self.layout.num_masks else "plain"
        if self.layout.head_drafts:
            masks = f"{self.layout.num_drafts} drafts by the head"
        return f"{who}, {self.prompt_rows} prompt rows" if self.prompt_rows else f"{who}, {masks}"

    @property
    def num_rows(self) -> int:
        """Rows of a step."""
        return self.prompt_rows or self.num_sequences * self.layout.num_rows

    @property
    def num_idle(self) -> int:
        """Untimed first steps; for a prompt one, which compiles its operations."""
        return 1 if self.prompt_rows else NUM_IDLE

    @property
    def least_steps(self) -> int:
        """Steps needed to measure it, in the units of `_expected`: two prompt steps cost less than one in
        proportion."""
        return 1 if self.prompt_rows else self.num_idle + 1


PLAIN_STEP = CalibrationCase(1, DraftLayout.plain())


def _anchors(facts: ModelFacts, max_sequences: int) -> list[CalibrationCase]:
    """Return the cases of every pass: the steps that are compared most."""
    found = [PLAIN_STEP, CalibrationCase(1, DraftLayout.full(2, 2)), CalibrationCase(8, DraftLayout.plain())]
    few_masks = facts.most_masks < 2
    return [case for case in found if case.num_sequences <= max_sequences and not (few_masks and case.layout.num_masks)]


def _cases(facts: ModelFacts, max_sequences: int) -> Iterator[CalibrationCase]:
    """Yield all cases, the most informative first: as many are measured as time allows."""
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
    # At small batches, where drafts help most, layouts are close in cost, so each is measured, not interpolated.
    cases += [
        CalibrationCase(num_sequences, layout) for num_sequences in (1, 2, 4) for layout in (plain, few, some, more)
    ]
    if k > 2:  # 5, 6, 7 and 8 rows: about there lie the bends
        between = [DraftLayout.of(1, masks) for masks in ((2, 1), (2, 2), (3, 2), (3, 3))]
        cases += [CalibrationCase(num_sequences, layout) for num_sequences in (1, 2) for layout in between]
    # Measured twice, for one sequence before the large batches, so that compared cases share moments.
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
    cases = _with_head(cases, facts.most_head_drafts)
    cases += [CalibrationCase(8, full), CalibrationCase(32, some), CalibrationCase(64, some), *prompts[3:]]
    cases += again
    for case in dict.fromkeys(cases):
        if case.num_sequences <= max_sequences:
            yield case


def _captured_cases(facts: ModelFacts, max_sequences: int) -> Iterator[CalibrationCase]:
    """Yield the cases of captured steps, the most informative first: their layouts are few, their batches large."""
    plain, masks = DraftLayout.plain(), few_layouts(facts.most_masks)
    most = facts.most_head_drafts
    heads = tuple(DraftLayout.by_head(count, count) for count in sorted({min(2, most), min(3, most), most}) if count)
    prompts = [CalibrationCase(1, plain, context, prompt_rows=rows) for rows, context in PROMPTS]
    best = (*masks[-1:], *heads[-1:])
    cases = [PLAIN_STEP, *(CalibrationCase(1, layout) for layout in best), prompts[0]]
    # Rows and keys grow together in steps of one context: without a second one the fit cannot tell them apart.
    for size, layouts in ((1, (plain, *best)), (8, (plain, *best)), (64, (plain, *heads[-1:]))):
        cases += [CalibrationCase(size, layout, n) for layout in layouts for n in (CONTEXT, LONG_CONTEXT)]
    for size in (8, 64, 1, 32, 128, 256, 2, 4, 16):
        fitting = (layout for layout in masks if size * layout.num_rows <= MOST_MASK_ROWS)
        cases += [CalibrationCase(size, layout) for layout in (plain, *heads, *fitting)]
    for size in (1, 8, 32):
        cases += [CalibrationCase(size, layout, temperature=1.0) for layout in (plain, *masks[:1], *heads[-1:])]
    cases += prompts[1:]
    cases += [replace(case, turn=2) for case in cases if not case.prompt_rows]
    for case in dict.fromkeys(cases):
        if case.num_sequences <= max_sequences:
            yield case


def _with_head(cases: Sequence[CalibrationCase], most: int) -> list[CalibrationCase]:
    """Return the cases, behind every one with masks the same with as many drafts of the recurrent head."""
    found = []
    for case in cases:
        found.append(case)
        if most and case.layout.makes_drafts:
            count = min(max(case.layout.num_drafts, 1), most)
            found.append(replace(case, layout=DraftLayout.by_head(count, count)))
    if most:
        sizes, counts = (1, 8, 32, 64, 128, 256), sorted({min(3, most), most})
        found += [CalibrationCase(size, DraftLayout.by_head(count, count)) for size in sizes for count in counts]
    return found


def case_names(facts: ModelFacts, max_sequences: int) -> Sequence[str]:
    """Return all cases: costs measured on other cases are not comparable."""
    return [repr(case) for cases in (_cases, _captured_cases) for case in cases(facts, max_sequences)]


def _expected(points: list[Point], num_rows: int) -> float:
    """Return an upper estimate of a step's seconds, scaled by rows from the last measurement."""
    return max((seconds * max(1.0, num_rows / shape.num_rows) for shape, seconds in points[-1:]), default=0.0)


def time_steps(
    model: StepModel,
    kv: PagedKV,
    case: CalibrationCase,
    steps: StepsHere = "host",
    clock: Callable[[], float] = time.perf_counter,
) -> Timing | None:
    """Run the case's steps and return the timed ones; None if the pages do not suffice.
    First steps are not timed: they compile and capture on a device, and compile the prompt operations."""
    num_slots = case.context + (case.prompt_rows + 2 if case.prompt_rows else NEW_TOKENS)
    pages_each = -(-num_slots // kv.block_size)
    if pages_each > kv.num_blocks or num_slots > model.facts.window:
        return None
    if case.prompt_rows and steps == "eager":
        steps = "host"  # prompts always run on the host runner, which replays graphs of small ones
    recorder, rng = Recorder(), random.Random(0)
    worker = _worker(model, kv, recorder, FixedLayout(lambda room: case.layout), case.num_sequences, steps, clock)

    def admit(number: int) -> None:
        # pages are shared if there are few: K and V are arbitrary
        first = number * pages_each % max(1, kv.num_blocks - pages_each + 1)
        _admit(worker, number, case, range(first, first + pages_each), rng)

    def is_over(begun: float) -> bool:
        num_timed, taken = len(recorder.points) - case.num_idle, clock() - begun
        return (num_timed > 0 and taken > ENOUGH) or (num_timed >= NUM_STEPS and taken > LONG)

    admitted = begun = clock()
    if case.prompt_rows:
        most_timed = case.num_idle + NUM_STEPS
        for number in range(most_timed + (NUM_ONE_TIME if steps == "device" else 0)):  # one after the other
            admit(number)
            worker.step()
            worker.apply(pb.Command(release=pb.Release(seq_id=number + 1)))
            if not recorder.points:
                begun = clock()  # one-time work does not count
            if is_over(begun) or len(recorder.points) == most_timed:
                break
    else:
        for number in range(case.num_sequences):
            admit(number)
        while len(recorder.points) < NUM_IDLE + MOST_STEPS and worker.has_work:
            worker.step()
            if steps != "host" and len(recorder.points) <= NUM_IDLE:
                begun = clock()  # one-time work does not count
            if is_over(begun):
                break
    timed = sorted(recorder.points[case.num_idle :], key=lambda point: point[1])
    if not timed:
        return None
    return Timing(timed[len(timed) // 2][0], tuple(seconds for _, seconds in timed), begun - admitted)


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
        num_cached=0 if facts.is_recurrent else case.context,
        pages=pages,
        sampling=pb.Sampling(seed=number, temperature=case.temperature),
        limits=pb.Limits(max_tokens=NEW_TOKENS),
        max_draft_length=worker.max_draft_length,
    )
    worker.apply(pb.Command(admit=admit))
    sequence = worker.batch.get(number + 1)
    if worker.kv.states is not None and sequence is not None and case.context:  # states are arbitrary, too
        sequence.num_computed = case.context
        worker.kv.states.put(sequence.state, case.context - 1)


FORMAT = 5
"""Raised whenever the file's format or the meaning of its costs changes."""


class BadCostFile(ValueError):
    """The file cannot be used; the message says why."""


@dataclass(frozen=True)
class KeptCosts:
    """The contents of a file."""

    points: list[Point]
    passes: dict[str, list[float]]  # by anchor: seconds, pass by pass
    written: str  # date and time, for messages

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain step of one sequence: the middle pass."""
        return sorted(self.passes[str(PLAIN_STEP)])[NUM_PASSES // 2]

    @property
    def plain_spread(self) -> float:
        """Relative difference of its passes."""
        found = self.passes[str(PLAIN_STEP)]
        return max(found) / min(found) - 1.0


@dataclass(frozen=True)
class CostFile:
    """The file of one model, computed in one way on one machine."""

    path: Path
    setup: Mapping[str, str | int]  # what is computed, and on what; part of the file name
    versions: Mapping[str, str | int]  # software versions; a file of others is replaced

    @classmethod
    def of(
        cls,
        folder: Path,
        facts: ModelFacts,
        *,
        block_size: int,
        max_sequences: int,
        exact: bool = False,
        steps: str = "host",
        draft_model: str | None = None,
    ) -> CostFile:
        """The file in `folder` for this model on this machine. `draft_model`: the name of the one that drafts."""
        on_gpu = facts.device.type == "cuda"
        setup: dict[str, str | int] = {
            "model": Path(facts.name).name,
            "model_hash": facts.model_hash,
            "numbers": facts.number_format,
            "device": str(facts.device),
            "gpu": torch.cuda.get_device_name(facts.device) if on_gpu else "none",
            "cpu": cpu_fact("model name") or platform.machine(),
            "processors": os.cpu_count() or 0,
            "threads": facts.num_threads,
            "instruction_set": facts.instruction_set,
            "ranks": facts.num_ranks,
            "exact": "on" if exact else "off",
            "attention": facts.attention,
            "steps": steps,
            "block_size": block_size,
            "max_sequences": max_sequences,
        }
        if draft_model is not None:
            setup["draft_model"] = Path(draft_model).name
        cases = hashlib.blake2b("\n".join(case_names(facts, max_sequences)).encode(), digest_size=6).hexdigest()
        versions: dict[str, str | int] = {
            "format": FORMAT,
            "spaceserve": version(),
            "torch": torch.__version__,
            "cases": cases,
        }
        if on_gpu:
            versions["triton"] = installed_version("triton") or "none"
        elif (library := cpu_library()) is not None:
            versions["kernels"] = library.path.stem  # has a digest of their source
        digest = hashlib.blake2b(json.dumps(setup, sort_keys=True).encode(), digest_size=8).hexdigest()
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(facts.name).name)[-48:].strip("-.") or "model"
        return cls(folder / f"step-cost-{name}-{digest}.json", setup, versions)

    def read(self) -> KeptCosts | None:
        """Return the kept costs; None if there is no file. Raises BadCostFile."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._name_old_files()
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise BadCostFile(f"it cannot be read ({error})") from None
        if not isinstance(found, dict):
            raise BadCostFile("it is of an older format")
        for name, own in (*self.versions.items(), *self.setup.items()):
            if found.get(name) != own:
                raise BadCostFile(f"{name} is {found.get(name)!r} there and {own!r} here")
        passes = found.get("passes")
        if not isinstance(passes, dict) or str(PLAIN_STEP) not in passes:
            raise BadCostFile("its passes are missing")
        for name, times in passes.items():
            if not isinstance(times, list) or len(times) != NUM_PASSES or not all(map(_is_time, times)):
                raise BadCostFile(f"{name!r} does not have {NUM_PASSES} passes of so many seconds each: {times!r}")
            if max(times) > (1.0 + AGREE) * min(times):
                raise BadCostFile(f"its passes of {name!r} differ by more than {100 * AGREE:.0f} %")
        return KeptCosts(kept_points(found), passes, str(found.get("written", "an unknown day")))

    def _name_old_files(self) -> None:
        """Log files of earlier formats, which do not name their configuration."""
        old = list(self.path.parent.glob(f"step-cost-{'[0-9a-f]' * 24}.json"))
        if old:
            _log.info("%d files of step costs in %s are of an older format: not used", len(old), self.path.parent)

    def write(self, calibration: Calibration, load: MachineLoad, now: datetime) -> None:
        """Keep the measurements. If the folder is not writable, the next start measures again."""
        assert calibration.spread is not None
        head = {
            "what": "seconds of steps, measured by a worker of spaceserve at its start; may be deleted at any time",
            "written": now.isoformat(timespec="seconds"),
            **self.versions,
            **self.setup,
            "load": load.as_json(),
            "spread": round(calibration.spread, 4),
            "passes": {name: [_short(one) for one in times] for name, times in calibration.passes.items()},
            "columns": [*StepShape._fields, "seconds"],
        }
        rows = ",\n".join(f"    {json.dumps([*shape, _short(seconds)])}" for shape, seconds in calibration.points)
        text = f'{json.dumps(head, indent=2)[:-2]},\n  "points": [\n{rows}\n  ]\n}}\n'
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            _log.info("what steps cost is measured again at the next start: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def kept_points(found: object) -> list[Point]:
    """Parse the points of a cost file's JSON. Raises BadCostFile."""
    try:
        if not isinstance(found, dict) or found["columns"] != [*StepShape._fields, "seconds"]:
            raise BadCostFile("its columns are of an older format")
        points = read_points(found["points"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise error if isinstance(error, BadCostFile) else BadCostFile("its points are no numbers") from None
    if any(min(shape) < 0 or not shape.num_rows or not _is_time(seconds) for shape, seconds in points):
        raise BadCostFile("some of its points are no times of steps")
    if (num_shapes := num_different(points)) < FEWEST:
        raise BadCostFile(f"it holds {num_shapes} different steps; it takes {FEWEST}")
    return points


def num_different(points: Sequence[Point]) -> int:
    """Count the different steps, whatever their contexts: steps of one case differ in those by a few ids."""
    return len({shape._replace(num_context=0) for shape, _ in points})


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _short(seconds: float) -> float:
    """Round to six digits; the others are noise."""
    return float(f"{seconds:.6g}")


TRIES = 3
"""Checks of a plain step against the file before it is discarded: one slow moment is not enough."""

LEAST_TOLERANCE = 0.03
"""Relative difference of a plain step between starts on a quiet machine, whatever the passes of one start show: memory
is placed differently each time."""

SIGMAS = 3.0
"""Standard errors of the median within which it may be off."""


@dataclass(frozen=True)
class StartingCosts:
    """Points, and their origin."""

    points: list[Point]
    origin: CostOrigin

    def cost(self) -> StepCost:
        """Build the cost model. It keeps learning, quickly where the points are only a first estimate."""
        cost = StepCost.from_points(self.points, are_sure=self.origin.source != "learned")
        cost.origin = self.origin
        return cost


def tolerance(kept: KeptCosts, timing: Timing) -> float:
    """Return the relative difference allowed for a plain step: the passes' spread plus the noise of this timing."""
    return max(LEAST_TOLERANCE, kept.plain_spread) + SIGMAS * timing.noise


def starting_costs(
    file: CostFile,
    *,
    measure: Callable[[Callable[[], None]], Calibration],
    time_plain_step: Callable[[], Timing | None],
    watch: LoadWatch,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> StartingCosts | None:
    """Return the costs kept in `file` if a plain step confirms them; else measure, and keep them if they are reliable.
    `measure` receives a function to call between steps. None if nothing could be measured."""
    points = _kept(file, time_plain_step)
    if points is not None:
        return StartingCosts(points, CostOrigin("file"))
    watch.begin()
    watch.look()
    calibration = measure(watch.look)
    load = watch.load()
    if not calibration.points:
        return None
    why_not = load.why_busy or calibration.why_unsure
    if why_not is not None:
        _log.info("step costs are not kept, but learned while serving: %s", why_not)
        return StartingCosts(calibration.points, CostOrigin("learned", why_not))
    file.write(calibration, load, now())
    return StartingCosts(calibration.points, CostOrigin("measured"))


def _kept(file: CostFile, time_plain_step: Callable[[], Timing | None]) -> list[Point] | None:
    """Return the file's points, scaled to today's speed, if they still hold; None: measure."""
    try:
        kept = file.read()
    except BadCostFile as error:
        _log.info("step costs kept in %s are not used: %s", file.path.name, error)
        return None
    if kept is None:
        return None
    for timing in _timings(time_plain_step):
        ratio, bound = timing.seconds / kept.plain_seconds, tolerance(kept, timing)
        if 1.0 / (1.0 + bound) <= ratio <= 1.0 + bound:
            return [(shape, ratio * seconds) for shape, seconds in kept.points]
        _log.info(
            "step costs kept in %s (%s) do not hold: a plain step takes %.3g ms now and %.3g there, and %.0f %% may be",
            file.path.name,
            kept.written,
            1000 * timing.seconds,
            1000 * kept.plain_seconds,
            100 * bound,
        )
    return None


def _timings(time_plain_step: Callable[[], Timing | None]) -> Iterator[Timing]:
    for _ in range(TRIES):
        timing = time_plain_step()
        if timing is None:
            return
        yield timing
        if len(timing.times) < 2:
            return  # a retry would take as long as measuring
