"""Decoding speed at the shapes of a 1B and an 8B Llama, random weights, drafts accepted at a synthetic rate."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from exactness_matrix import without_draft_head
from overhead_arms import auto, by_head, full, plain, pruned
from space_common.worker.settings import NAMED_CHANCES, StepsHere
from space_kernels.dispatch import Ops
from space_model.geometry.draft_layout import DraftLayout
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from space_server.device_runner.device_batch import why_on_host
from space_server.machine.memory import free_bytes
from space_server.startup.attention_choice import choose_ops
from space_server.startup.calibration import calibrate
from space_server.step_cost import StepCost

from gpu.llama import DRY, NUM_MASKS, SHAPES, WHISPER, Foretold, Shape, facts_of, random_llama, space_llama
from gpu.pace import (
    BLOCK_SIZE,
    DEVICE,
    DecodingSpeed,
    DeviceClock,
    PacedWorker,
    SequenceSize,
    device_busy,
    forward_seconds,
    known_steps,
    memory_in_use,
)
from gpu.report import BATCH_SIZES, Notes, written
from gpu.stages import Slice
from gpu.ties import changed_texts

pytestmark = pytest.mark.gpu

ACCEPTANCE = NAMED_CHANCES[0.78]
COPY_BYTES = 2 * 1024**3
FRACTION = 0.8  # of the free memory that pages may take


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    num_steps: int
    seconds: float  # of one arm at one batch
    rounds: int
    batch_sizes: Sequence[int]
    sequence_size: SequenceSize
    calibration_seconds: float


FULL = Effort(
    num_steps=200, seconds=1.0, rounds=2, batch_sizes=BATCH_SIZES, sequence_size=SequenceSize(512, 448),
    calibration_seconds=8.0,
)  # fmt: skip
LITTLE = Effort(
    num_steps=6, seconds=0.2, rounds=1, batch_sizes=(1, 2), sequence_size=SequenceSize(16, 96), calibration_seconds=0.2
)


def test_llama_1b(notes: Notes) -> None:
    """And what exact products cost."""
    _Measurement(notes, "1b").run(exact=True)


def test_llama_8b(notes: Notes) -> None:
    _Measurement(notes, "8b").run(exact=False)


class _Measurement:
    """One shape, from its weights to its last figure."""

    def __init__(self, notes: Notes, name: str) -> None:
        self._notes, self._name, self._device = notes, name, notes.device
        self._shape: Shape = DRY if notes.dry else SHAPES[name]
        self._effort = LITTLE if notes.dry else FULL
        self._facts = facts_of(self._shape, self._device, ACCEPTANCE)
        self._clock = DeviceClock(self._device)
        free = free_bytes(self._device)
        if free < 1.5 * self._shape.num_bytes:
            pytest.skip(
                f"{self._shape.num_bytes / 1024**3:.1f} GiB of weights need half as much again; "
                f"{free / 1024**3:.1f} GiB are free"
            )

    def run(self, *, exact: bool) -> None:
        notes, name = self._notes, self._name
        bandwidth = self._clock.copy_bandwidth(1 << 20 if notes.dry else COPY_BYTES)
        torch.cuda.empty_cache()  # of what was copied
        notes.figure("copy bandwidth", bandwidth / 1e12, "TB/s")
        begun = time.perf_counter()
        ops = choose_ops(self._facts, asked="auto", block_size=BLOCK_SIZE)
        model = self._build(ops, WHISPER)
        notes.figure(f"{name} seconds to make the weights", time.perf_counter() - begun, "s")
        notes.note(f"attention: {ops.attention}; drafts are accepted at the synthetic rates {ACCEPTANCE}")
        kv = self._pages(model)
        steps = known_steps(model.facts)
        step_seconds, is_first = {}, notes.part.number == 1
        if is_first:
            self._forwards(model, kv)
        for how in steps if is_first else ():
            step_seconds = self._batch_of_one(model, kv, how, bandwidth, is_default=how == steps[-1])
        if DEVICE not in steps and is_first:
            notes.missing(f"{name} device-resident steps", why_on_host(model.facts) or "")
        self._batches(model, kv, steps[-1])
        tensors, reserved = memory_in_use(self._device)
        notes.figure(f"{name} weights and pages", tensors / 1024**3, "GiB")
        notes.figure(f"{name} most that torch had taken", reserved / 1024**3, "GiB")
        if exact and is_first:
            del model, kv
            gc.collect()
            torch.cuda.empty_cache()
            self._exact(steps[-1], step_seconds)

    def _build(self, ops: Ops, whisper: float) -> SpaceModel:
        made = random_llama(self._shape, self._device, whisper=whisper)
        return space_llama(made, self._facts, ops, self._shape)

    def _pages(self, model: SpaceModel) -> PagedKV:
        """For the largest batch that fits."""
        each = self._effort.sequence_size.blocks_each * BLOCK_SIZE * self._facts.kv_bytes_per_token
        fits = int(FRACTION * free_bytes(self._device) / each)
        self._most = max((batch for batch in self._effort.batch_sizes if batch <= fits), default=1)
        for batch in [batch for batch in self._effort.batch_sizes if batch > self._most]:
            self._notes.missing(f"{self._name} auto/plain at batch {batch}", f"pages for {fits} sequences fit")
        return model.allocate_kv(self._most * self._effort.sequence_size.blocks_each, BLOCK_SIZE)

    def _forwards(self, model: SpaceModel, kv: PagedKV) -> None:
        """The network and the head over 1 row and over 36, on the device alone."""
        seconds = {}
        for layout in (DraftLayout.plain(), DraftLayout.full(NUM_MASKS, NUM_MASKS)):
            rows, taken = forward_seconds(model, kv, layout, self._effort.sequence_size.context, self._clock)
            seconds[rows] = taken
            self._notes.figure(f"{self._name} network and head, {rows} row{'s' * (rows > 1)}", 1e3 * taken, "ms")
        self._notes.figure(f"{self._name} network and head, 36 rows/1 row", seconds[36] / seconds[1])

    def _batch_of_one(
        self, model: SpaceModel, kv: PagedKV, how: StepsHere, bandwidth: float, *, is_default: bool
    ) -> dict[str, float]:
        """Steps of a single sequence: what each layout takes, and gives. Headlines are those of the default steps.

        Drafts are accepted at a synthetic rate, in steps on the device as in the host's.
        """
        notes, name, effort = self._notes, self._name, self._effort
        foretold = Foretold(model.facts, ACCEPTANCE)
        arms = [plain(), full(NUM_MASKS), pruned(5, 12), pruned(3, 6), by_head(3), by_head(5), auto()]
        found: dict[str, DecodingSpeed] = {}
        busy: dict[str, float] = {}
        replayed: dict[str, float] = {}
        cost = self._cost(model, kv, how)
        for arm in arms:
            paced = PacedWorker(
                model, kv, arm, effort.sequence_size, max_sequences=self._most, steps=how,
                cost=cost if arm.rule is None else None, foretold=foretold,
            )  # fmt: skip
            found[arm.name] = self._best(paced, 1)
            replayed[arm.name] = paced.worker.num_replays / paced.worker.num_forwards
            if arm.name in ("plain", f"k={NUM_MASKS}") and not notes.dry:
                try:
                    busy[arm.name] = paced.stretch(1, 20, device_busy)
                except RuntimeError as error:
                    notes.missing(f"{name} device idle between steps, {arm.name}", str(error)[:300])
        masks_alone = PacedWorker(
            without_draft_head(model), kv, full(NUM_MASKS), effort.sequence_size,
            max_sequences=self._most, steps=how, foretold=foretold,
        )  # fmt: skip
        found["k=5, no draft head"] = self._best(masks_alone, 1)
        notes.table(
            f"{name}, batch 1, {how} steps", _HEAD, [_row(arm, pace, found["plain"]) for arm, pace in found.items()]
        )
        head = f"{name} " if is_default else f"{name}, {how} steps: "
        first, whole = found["plain"], found[f"k={NUM_MASKS}"]
        drafting = [found[arm.name] for arm in arms if arm.name != "plain"]
        share = self._shape.step_bytes / first.step_seconds / bandwidth
        notes.figure(f"{head}plain decoding at batch 1", first.tokens_per_second, "tokens/s")
        notes.figure(f"{head}plain decoding at batch 1: share of weight bandwidth", share, "%")
        notes.figure(f"{head}step(36 rows)/step(1 row) at batch 1", whole.step_seconds / first.step_seconds)
        notes.figure(f"{head}speed-up at k=5, acceptance .78", whole.tokens_per_second / first.tokens_per_second)
        best = max(pace.tokens_per_second for pace in drafting)
        notes.figure(f"{head}speed-up with the best layout, acceptance .78", best / first.tokens_per_second)
        notes.figure(f"{head}tokens per step at k=5", whole.tokens_per_step)
        if how == DEVICE:
            rarest = min(replayed, key=replayed.__getitem__)
            notes.figure(f"{head}steps that replay a graph, least of all layouts ({rarest})", replayed[rarest], "%")
        notes.figure(f"{head}drafts outside synthetic acceptance", foretold.synthetic.num_unknown)
        for arm_name, seconds in busy.items():
            idle = 1.0 - seconds / found[arm_name].step_seconds
            notes.figure(f"{head}device idle between steps, {arm_name}", max(0.0, idle), "%")
        if notes.dry:
            notes.missing(f"{head}device idle between steps", "there is no device to profile")
        return {arm: pace.step_seconds for arm, pace in found.items()}

    def _batches(self, model: SpaceModel, kv: PagedKV, how: StepsHere) -> None:
        """Throughput of the server's own choice of layouts over plain decoding's, the two in turn. Where the stage has
        slices, those after the first share the batches."""
        notes, name, effort = self._notes, self._name, self._effort
        part = notes.part
        if part.count > 1 and part.number == 1:
            return
        others = Slice(part.stage, max(1, part.number - 1), max(1, part.count - 1))
        foretold = Foretold(model.facts, ACCEPTANCE)
        arms = [plain(), auto(), by_head(5)]
        cost = self._cost(model, kv, how)
        paced = {
            arm.name: PacedWorker(
                model, kv, arm, effort.sequence_size, max_sequences=self._most, steps=how, cost=c, foretold=foretold
            )
            for arm, c in zip(arms, (None, cost, None), strict=True)
        }
        rows = []
        for batch in others.share([batch for batch in effort.batch_sizes if batch <= self._most]):
            if notes.is_late(f"{name} auto/plain at batch {batch}"):
                continue
            rates: dict[str, list[DecodingSpeed]] = {arm.name: [] for arm in arms}
            for turn in range(effort.rounds):
                for arm in arms if turn % 2 == 0 else arms[::-1]:
                    rates[arm.name].append(self._pace(paced[arm.name], batch))
            slow, fast, head = (statistics.median(p.tokens_per_second for p in rates[arm.name]) for arm in arms)
            notes.figure(f"{name} auto/plain at batch {batch}", fast / slow)
            last = rates["auto"][-1]
            per_step = last.num_drafted / last.num_steps / batch
            step = rates["head k=5"][-1].step_seconds
            rows.append(
                [
                    batch, f"{slow:.0f}", f"{fast:.0f}", f"{fast / slow:.2f}", f"{per_step:.1f}", f"{head:.0f}",
                    f"{1e3 * batch / slow:.2f}", f"{1e3 * step:.2f}",
                ]
            )  # fmt: skip
            columns = ["batch", "plain, tokens/s", "auto, tokens/s", "auto/plain", "drafts per step"]
            columns += ["head k=5, tokens/s", "plain, ms a step", "head k=5, ms a step"]
            notes.table(f"{name}, acceptance .78, {how} steps", columns, rows)

    def _exact(self, how: StepsHere, usual: dict[str, float]) -> None:
        """The same shape with row-invariant products: what a step takes then, and that drafts change no bit.

        Ordinary random weights: often two ids are so near that rounding decides.
        """
        notes, name, effort = self._notes, self._name, self._effort
        ops = choose_ops(self._facts, asked="auto", block_size=BLOCK_SIZE, exact=True)
        model = self._build(ops, 1.0)
        changed = changed_texts(model, *((2, 6) if notes.dry else (4, 48)))
        kv = self._pages(model)
        rows = []
        for arm in (plain(), full(NUM_MASKS)):
            paced = PacedWorker(model, kv, arm, effort.sequence_size, max_sequences=self._most, steps=how)
            seconds = self._best(paced, 1).step_seconds
            notes.figure(f"{name} a step of {arm.name} with exact products, over the usual", seconds / usual[arm.name])
            rows.append([arm.name, f"{1e3 * usual[arm.name]:.2f}", f"{1e3 * seconds:.2f}"])
        notes.table(f"{name}: what exact costs, batch 1", ["layout", "ms per step", "ms, exact"], rows)
        notes.figure(f"{name} texts with exact products that drafts changed", len(changed))
        assert not changed, f"exact products, {changed[0]}"

    def _cost(self, model: SpaceModel, kv: PagedKV, how: StepsHere) -> StepCost | None:
        """As a server's own measurement at its start has it, of the steps that it serves with."""
        seconds = self._effort.calibration_seconds
        points = calibrate(model, kv, max_sequences=self._most, seconds=seconds, steps=how).points
        return StepCost.from_points(points) if points else None

    def _pace(self, paced: PacedWorker, batch: int) -> DecodingSpeed:
        warm_up = 4 if self._notes.dry else 40 if paced.arm.rule is None else 12
        return paced.pace(batch, num_steps=self._effort.num_steps, seconds=self._effort.seconds, warm_up=warm_up)

    def _best(self, paced: PacedWorker, batch: int) -> DecodingSpeed:
        """The middle one of the rounds, and one before them to warm up."""
        self._pace(paced, batch)
        found = sorted(
            (self._pace(paced, batch) for _ in range(self._effort.rounds)), key=lambda p: p.tokens_per_second
        )
        return found[len(found) // 2]


_HEAD = ["layout", "ms per step", "tokens per step", "tokens/s", "speed-up", "drafts accepted"]


def _row(arm: str, pace: DecodingSpeed, first: DecodingSpeed) -> list[str]:
    return [
        arm, f"{1e3 * pace.step_seconds:.3f}", f"{pace.tokens_per_step:.2f}", f"{pace.tokens_per_second:.1f}",
        f"{pace.tokens_per_second / first.tokens_per_second:.2f}",
        written(pace.num_accepted / pace.num_drafted, "%") if pace.num_drafted else "–",
    ]  # fmt: skip
