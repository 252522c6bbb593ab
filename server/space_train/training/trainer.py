"""The training loop of `spaceserve train`: updates until the budget is used, on one process or many.

accelerate distributes it over processes (torchrun, `accelerate launch`, FSDP). An update depends only on the plan and
the row numbers, so a resumed run, and a run on several processes, computes the same as an uninterrupted one. A first
SIGINT or SIGTERM ends it after the current update, a second one at once."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env
from safetensors import SafetensorError
from space_model.checkpoint.checkpoint import Checkpoint, whole_folder
from space_model.malloc import keep_freed_memory
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel

from space_train.data.rows import MixedRows
from space_train.data.train_batch import Texts, anchor_rows, train_batch, within_documents
from space_train.estimate import ModelCost, flops_of
from space_train.networks.losses import best
from space_train.networks.recurrent_head import RecurrentHeadModule
from space_train.networks.trainee import Trainee
from space_train.progress import Counters, ProgressLines, RunClock, duration
from space_train.run_folder import (
    MODEL,
    OWN_TEXT_FILE,
    OWN_USER_TURNS,
    STATE_FILE,
    Measures,
    check_may_write,
    check_same,
    identity_of,
    kept_updates,
    load_checkpoint,
    save_atomically,
)
from space_train.self_generation.loops import LoopsToUnlearn
from space_train.train_plan import InvalidPlan, LearningRate, Method, TrainPlan
from space_train.training import sharding
from space_train.training.checkpoint import starting_point, write_checkpoint
from space_train.training.expected_accepted import EVERY
from space_train.training.optimiser import Optimiser

ROWS_AT_ONCE = 8


@torch.no_grad()
def held_out_figures(trainee: Trainee, held_out: Texts) -> Measures:
    """`loss`, `mask_j`, `head_j` and `recurrent_j` over the rows of `held_out`. Teacher-forced: draft j counts if it
    equals the model's most likely token, given that everything before it is right; the draft heads get the text's token
    before their target."""
    plan = trainee.plan
    num_masks = plan.num_masks if plan.has_masks else 0
    nats, num_targets = 0.0, 0
    agreed = {name: torch.zeros(num_masks) for name in ("mask", "head")}
    counted = torch.zeros(num_masks)
    recurrent = RecurrentAgreement.of(trainee)
    for begin in range(0, len(held_out.ids), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        texts = held_out.part(part)
        target, length = texts.is_target, texts.ids.shape[1]
        places = [(m, num_masks) for m in range(2, length - num_masks - 1, EVERY)] if num_masks else []
        if not places:
            real = trainee.real_rows(texts)
        else:
            anchors = anchor_rows([places] * len(texts.ids), target.cpu().numpy()).to(texts.ids.device)
            anchors = within_documents(anchors, texts)
            real, masks = trainee.hidden_rows(texts, anchors)
            source = anchors.positions  # the real row there teaches the mask
            teacher = real.gather(1, source[..., None].expand(-1, -1, real.shape[2]))
            own = best(trainee.decoder.logits, teacher.flatten(0, 1)).view_as(source)
            guesses = {"mask": masks}
            if trainee.head is not None:
                previous = trainee.decoder.embed(texts.ids.gather(1, source))
                guesses["head"] = trainee.head(masks, previous)
            learns = anchors.learns.view(len(source), -1, num_masks)
            counted += learns.sum((0, 1)).cpu()
            for name, hidden in guesses.items():
                agree = best(trainee.decoder.logits, hidden.flatten(0, 1)).view_as(own) == own
                agreed[name] += (agree.view_as(learns) & learns).sum((0, 1)).cpu()
        if recurrent is not None:
            recurrent.count(texts, real)
        for row, wanted, ids in zip(real, target, texts.ids, strict=True):
            logits = trainee.decoder.logits(row[:-1][wanted[1:]])
            nats += float(F.cross_entropy(logits, ids[1:][wanted[1:]], reduction="sum"))
        num_targets += int(target.sum())
    figures: Measures = {"loss": nats / max(num_targets, 1)}
    for name in ("mask", "head") if trainee.head is not None else ("mask",):
        for j in range(num_masks):
            if counted[j]:  # short texts may be too short for deep masks
                figures[f"{name}_{j + 1}"] = float(agreed[name][j] / counted[j])
    return figures if recurrent is None else figures | recurrent.shares()


@dataclass
class RecurrentAgreement:
    """How often draft 1, 2, … of the recurrent head is the model's most likely token."""

    trainee: Trainee
    head: RecurrentHeadModule
    agreed: torch.Tensor  # [K]
    counted: torch.Tensor  # [K]

    @classmethod
    def of(cls, trainee: Trainee) -> RecurrentAgreement | None:
        """Return one for the recurrent head of `trainee`, if there is one."""
        if trainee.recurrent is None:
            return None
        return cls(trainee, trainee.recurrent, *torch.zeros(2, trainee.plan.num_recurrent_drafts).unbind())

    def count(self, texts: Texts, real: torch.Tensor) -> None:
        """Count the recurrent head's drafts in `texts`. real [B, L, E]: hidden rows of their tokens."""
        depth, length = len(self.counted), texts.ids.shape[1]
        places = [(m, depth) for m in range(2, length - depth - 1, EVERY)]
        if not places:
            return
        decoder, target = self.trainee.decoder, texts.is_target
        anchors = anchor_rows([places] * len(texts.ids), target.cpu().numpy()).to(texts.ids.device)
        anchors = within_documents(anchors, texts)
        learns = anchors.learns
        states = self.head.unroll(real, texts.ids, anchors, decoder.embed)[learns]
        teacher = real.gather(1, anchors.positions[..., None].expand(-1, -1, real.shape[2]))[learns]
        drafts = self.head.token_of(best(self.trainee.draft_logits, states))
        agree = drafts == best(decoder.logits, teacher)
        for counts, rows in ((self.agreed, anchors.depth[learns][agree]), (self.counted, anchors.depth[learns])):
            counts += torch.bincount(rows - 1, minlength=depth).cpu()

    def shares(self) -> Measures:
        """Return `recurrent_j`, without depths that no text was long enough for."""
        pairs = enumerate(zip(self.agreed.tolist(), self.counted.tolist(), strict=True), start=1)
        return {f"{RECURRENT}_{j}": agreed / counted for j, (agreed, counted) in pairs if counted}


RECURRENT = "recurrent"


def draft_agreement(figures: Measures, name: str | None = None) -> list[float]:
    """Return the agreement of draft 1, 2, … by the drafter `name`; None: with the head if there is one."""
    name = name or ("head" if "head_1" in figures else "mask")
    return [value for key, value in figures.items() if key.rpartition("_")[0] == name]


def tokens_per_step(figures: Measures, name: str | None = None) -> float:
    """Return 1 + Σ_j Π_{i≤j} of the agreements, with the head if there is one: the tokens per greedy step if the
    agreements were independent."""
    return float(1.0 + np.cumprod(draft_agreement(figures, name)).sum())


SAME = 1.0
"""Seconds within which a repeated signal counts as the same one, because launchers forward a terminal's signal."""
STDERR = 2


class Interrupted(RuntimeError):
    """The run was stopped by a signal; it can be resumed."""


@contextlib.contextmanager
def interruptions(
    *, says: bool, losing: Callable[[], str] = str, clock: Callable[[], float] = time.monotonic
) -> Iterator[list[int]]:
    """Yield a list that receives the signal number on SIGINT or SIGTERM; the run then ends after the current update.
    `says`: print a note at once, with what `losing` returns: what a second signal loses. Another signal more than SAME
    seconds later raises KeyboardInterrupt."""
    received: list[int] = []
    first = 0.0

    def note(number: int, _: object) -> None:
        nonlocal first
        if received and clock() - first > SAME:
            raise KeyboardInterrupt
        if not received:
            received.append(number)
            first = clock()
            if says:  # not through sys.stderr, which the signal may have interrupted
                line = f"\nspaceserve train: ends after this update; once more to stop at once{losing()}\n"
                os.write(STDERR, line.encode())

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread can set signal handlers
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_at_once(out: Path) -> str:
    """Describe the files in `out` of a run that was stopped outside of an update."""
    updates = kept_updates(out)
    if updates is None:
        has_texts = any((out / name).exists() for name in (OWN_TEXT_FILE, OWN_USER_TURNS))
        texts = f" {out} keeps the texts that it wrote: {GO_ON}." if has_texts else ""
        return f"Stopped before an update was saved.{texts}"
    return f"Stopped. {out} keeps the run up to update {updates}: {GO_ON}."


def what_is_kept(out: Path) -> str:
    """Describe the files in `out` of a run that failed."""
    updates = kept_updates(out)
    if updates is None:
        return "No update was saved."
    return f"{out} keeps the run up to update {updates}."


LOSS_NAMES = {
    "loss": "next-token loss",
    "masks": "loss per mask",
    "head": "with the draft head",
    "recurrent": "recurrent head's loss per draft",
}
"""Names of an update's figures, which are shown until the first evaluation on held-out records."""

GO_ON = "the same command, without --restart, goes on from there"


@dataclass(frozen=True)
class TrainResult:
    """Result of a run."""

    folder: Path | None  # of the checkpoint; None if the run was stopped early
    counters: Counters
    peak_bytes: int  # peak memory of the process, or of its GPU
    num_processes: int = 1

    @property
    def final(self) -> Measures:
        """The last held-out figures."""
        return self.counters.curve[-1] if self.counters.curve else {}


def train(
    model: PreTrainedModel,
    source: Path,
    data: MixedRows,
    plan: TrainPlan,
    out: Path,
    *,
    tokenizer_size: int,
    given_mask_ids: list[int] | None = None,
    held_out: Texts | None = None,
    dtype: torch.dtype | None = None,
    chat_template: str | None = None,
    before: Mapping[str, float] | None = None,
    inputs: Mapping[str, Any] | None = None,
    startup_seconds: float = 0.0,
    beside: LoopsToUnlearn | None = None,
    export: bool = True,
    progress: bool = True,
    stop_after_steps: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Run `plan` on `model`, which was read from `source`, and write the checkpoint to `out/model`.

    `given_mask_ids`: for methods that use ids; `chat_template`: of the checkpoint, else its source's; `before`: `flops`
    and `seconds` spent on generating own texts; `inputs`: what else a resumed run must share, by name;
    `startup_seconds`: of this process, which count too. `beside`: an extra loss of every update. An existing run in
    `out` is resumed. `stop_after_steps` ends this call early and leaves the run resumable.
    """
    begun = time.monotonic()
    run = TrainingRun(
        model,
        source,
        data,
        plan,
        out,
        tokenizer_size=tokenizer_size,
        given_mask_ids=given_mask_ids,
        inputs=inputs or {},
        beside=beside,
    )
    if plan.budget.minutes is not None:
        startup_seconds = run.agreed_seconds(startup_seconds + time.monotonic() - begun)
    if run.counters.step == 0:
        plan.check_start_leaves_some(**(before or {}), startup_seconds=startup_seconds)
    if before and run.counters.step == 0:
        run.counters.flops, run.counters.seconds = before["flops"], before["seconds"]
    run.counters.seconds += startup_seconds
    with interruptions(says=run.accelerator.is_main_process, losing=run.unsaved) as told_to_stop:
        finished = run.steps(held_out, progress, stop_after_steps, clock, told_to_stop, before or {})
    folder = run.export(dtype, chat_template) if finished and export else None
    return TrainResult(folder, run.counters, run.peak_bytes(), run.accelerator.num_processes)


def on_cpu() -> bool:
    """Return whether to train on the CPU; accelerate needs it to form a process group there."""
    return bool(parse_flag_from_env("ACCELERATE_USE_CPU")) or not torch.accelerator.is_available()


def peak_of_process() -> int:
    """Return the peak memory of this process in bytes: on Linux VmHWM, because `ru_maxrss` starts with the peak of the
    parent process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return (found[0] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


class TrainingRun:
    """One run: its trainee, optimiser and progress."""

    def __init__(
        self,
        model: PreTrainedModel,
        source: Path,
        data: MixedRows,
        plan: TrainPlan,
        out: Path,
        *,
        tokenizer_size: int,
        given_mask_ids: list[int] | None,
        inputs: Mapping[str, Any],
        beside: LoopsToUnlearn | None = None,
    ) -> None:
        self.plan, self.data, self.out, self.beside = plan, data, out, beside
        self.checkpoint = Checkpoint.open(source)
        check_may_write(out, self.checkpoint)
        is_asked_to_shard = sharding.take_request()
        AcceleratorState._reset_state()  # else the first run in a process would fix the precision of later ones
        self.accelerator = Accelerator(mixed_precision=plan.precision, cpu=on_cpu())
        self.device = self.accelerator.device
        self.num_parts = plan.accumulate * self.accelerator.num_processes
        plan.check_divides_among(self.accelerator.num_processes)
        if beside is not None and self.accelerator.num_processes > 1:
            raise InvalidPlan("What is learnt beside the rows is computed by one process; start one.")
        if self.device.type == "cpu":
            keep_freed_memory()
        draft_ids: torch.Tensor | None = None
        if plan.has_recurrent_head:
            vocab_size = len(model.get_input_embeddings().weight)
            mask_ids = (self.checkpoint.config.get("space") or {}).get("mask_token_ids") or ()
            draft_ids = data.frequent_ids(plan.draft_vocab, vocab_size, never=mask_ids)
        trainee = starting_point(model, self.checkpoint, plan, tokenizer_size, given_mask_ids, draft_ids)
        self.cost = ModelCost.of(trainee)
        self.trainee = trainee.train(plan.trains_base)
        self.is_sharded = is_asked_to_shard and self.accelerator.num_processes > 1
        if self.is_sharded:
            sharding.check_can_shard(plan)
            sharding.shard(trainee, self.device, self.accelerator.num_processes)
            self.wrapped: nn.Module = trainee
        else:
            self.wrapped = self.accelerator.prepare(trainee.to(self.device))
        rates = {"adam_rate": plan.peak_rate, "muon_rate": plan.muon_rate if plan.optimiser == "muon" else None}
        limits = {"weight_decay": plan.weight_decay, "clip_norm": plan.clip_norm}
        self.optimiser = Optimiser(trainee.trained, **rates, **limits)  # type: ignore[arg-type]
        self.rate = LearningRate(plan.warmup, plan.decay_from, cosine=plan.cosine)
        self.counters = Counters()
        self._saved = 0, 0.0  # updates and seconds of the saved state
        self.identity = dict(inputs) | identity_of(plan, self.checkpoint, data, trainee.mask_ids)
        if trainee.adapters is not None:
            self.checkpoint.weights_sha256()  # the checkpoint names it; at the end of the run no time is left for it
        self._resume()

    def steps(
        self,
        held_out: Texts | None,
        progress: bool,
        stop_after_steps: int | None,
        clock: Callable[[], float],
        told_to_stop: list[int],
        spent: Mapping[str, float],
    ) -> bool:
        """Run updates. Return True when the budget is used, False when stopped. `spent`: before the first update."""
        counters, plan, main = self.counters, self.plan, self.accelerator.is_main_process
        held_out = held_out and held_out.to(self.device)
        writer: SummaryWriter | None = None
        if main and progress:
            # Drop logged figures of updates that were lost in a kill.
            writer = SummaryWriter(str(self.out / "tensorboard"), purge_step=counters.step)
        run_clock = RunClock(plan.budget, counters, len(self.data) / plan.rows_per_step, spent)
        lines = ProgressLines(is_off=not (main and progress))
        self._saved = counters.step, counters.seconds
        here, stopping = 0, False

        def used() -> float:
            return run_clock.progress(is_evaluated=held_out is None or self._is_evaluated)

        def seconds_since(since: float) -> float:
            return self.agreed_seconds(clock() - since)

        def save() -> None:
            since = clock()
            self.save()
            run_clock.count_save(seconds_since(since))
            self._saved = counters.step, counters.seconds

        def evaluate(done: float) -> None:
            assert held_out is not None
            since = clock()
            self._evaluate(held_out, done, writer)
            run_clock.count_evaluation(seconds_since(since))

        if counters.step and (done := used()) < 1.0:
            of = run_clock.of_total()
            lines.write(f"{plan.method}: goes on from update {counters.step}{of} ({100 * done:.0f} %).")
        elif counters.step:
            lines.write(f"{plan.method}: nothing is left to train: the run ended with update {counters.step}.")
        # A finished run that is extended has one evaluation more than the schedule of its new budget.
        num_evaluations = min(len(counters.curve), math.ceil(used() * plan.evaluations))
        with contextlib.ExitStack() as open_things:
            open_things.callback(lines.close)
            if writer is not None:
                open_things.callback(writer.close)
            while (done := used()) < 1.0:
                if stopping or (stop_after_steps is not None and here >= stop_after_steps):
                    self.save()
                    if stopping:
                        raise Interrupted(
                            f"Stopped after update {counters.step} ({100 * done:.0f} %). The run is kept in "
                            f"{self.out}: {GO_ON}."
                        )
                    return False
                if plan.evaluations and held_out is not None and done >= num_evaluations / plan.evaluations:
                    if not self._is_evaluated and run_clock.may_evaluate():
                        evaluate(done)
                    num_evaluations += 1
                since = clock()
                measures = self.update(self.rate.at(done))
                here += 1
                stopping, seconds = self._agreed(bool(told_to_stop), clock() - since)
                run_clock.count_update(seconds)
                left = 0 if held_out is None else max(1, plan.evaluations + 1 - num_evaluations)
                done = used()
                lines.show(self._progress_line(run_clock, measures, done, left), done, is_due=here <= 2)
                if writer is not None:
                    for name, value in measures.items():
                        writer.add_scalar(f"train/{name}", value, counters.step)
                by_steps, by_time = plan.checkpoint_steps, plan.checkpoint_seconds
                if counters.step % by_steps == 0 if by_steps else counters.seconds - self._saved[1] >= by_time:
                    save()
            if held_out is not None and not self._is_evaluated:
                evaluate(1.0)
            if counters.ended != plan.budget.as_json():
                counters.ended = plan.budget.as_json()
                self.save()
        return True

    def _progress_line(self, run_clock: RunClock, measures: Measures, done: float, evaluations_left: int) -> str:
        """Return the line shown after an update. `measures`: of the update; `done`: the share of the run."""
        counters, plan = self.counters, self.plan
        left = run_clock.seconds_left(evaluations_left, 1)
        parts = [f"{plan.method}: update {counters.step}{run_clock.of_total(evaluations_left)}"]
        latest = counters.curve[-1] if counters.curve else {}
        on_text = "{:.2f} tokens per step on held-out text"
        recurrent = "{:.2f} by the recurrent head" if plan.has_masks else on_text
        found = {"tokens_per_step": on_text, "recurrent_tokens_per_step": recurrent}
        if shown := [words.format(latest[name]) for name, words in found.items() if name in latest]:
            parts += shown
        else:
            parts += [f"{LOSS_NAMES[name]} {value:.2f} nats" for name, value in measures.items() if name in LOSS_NAMES]
        if left is not None and done < 1.0:
            parts.append(f"about {duration(left)} more")
        return ", ".join(parts)

    def unsaved(self) -> str:
        """Return what stopping at once loses, for the note on a first signal."""
        step, seconds = self._saved
        updates = self.counters.step - step
        if not updates:
            return ", which loses this update"
        lost = f"{updates} {'update' if updates == 1 else 'updates'} ({duration(self.counters.seconds - seconds)})"
        return f", which loses {lost} and this one"

    def agreed_seconds(self, seconds: float) -> float:
        """Return the mean of the seconds of all processes, so that each ends with the same update."""
        return self._agreed(False, seconds)[1]

    def _agreed(self, stopping: bool, seconds: float) -> tuple[bool, float]:
        """Agree over all processes: whether any was asked to stop, and their mean time. Without it, a process that
        stops would leave the others waiting."""
        if self.accelerator.num_processes == 1:
            return stopping, seconds
        own = torch.tensor([float(stopping), seconds], device=self.device)
        signalled, total = self.accelerator.reduce(own, reduction="sum").tolist()
        return signalled > 0, total / self.accelerator.num_processes

    def update(self, multiplier: float) -> Measures:
        """One update of `rows_per_step` rows, each process taking its share."""
        plan, accelerator, counters = self.plan, self.accelerator, self.counters
        rows = plan.rows_per_step // self.num_parts
        first = counters.step * plan.rows_per_step
        # Every process knows all parts' sizes, so that means are over the whole update.
        starts = range(first, first + plan.rows_per_step, rows)
        parts = [train_batch(self.data, plan, start, rows) for start in starts]
        if self.is_sharded:
            sharding.check_parts(parts)
        num_targets = max(1, sum(part.num_targets for part in parts))
        num_masks = max(1, sum(part.num_learning_masks for part in parts))
        num_recurrent = max(1, sum(part.num_learning_recurrent for part in parts))
        mine = range(self.num_parts)[accelerator.process_index * plan.accumulate :][: plan.accumulate]
        sums = torch.zeros(4, device=self.device)
        for number in mine:
            torch.manual_seed(plan.seed * 1_000_003 + starts[number])  # for the base's dropout, if it has any
            with self._adding_up(is_last=number == mine[-1]), self._in_precision():
                losses = self.wrapped(parts[number].to(self.device))
                total = losses.next_token / num_targets
                total = total + plan.mask_loss_weight * losses.masks / num_masks
                total = total + plan.head_loss_weight * losses.head / num_masks
                if plan.has_recurrent_head:
                    total = total + plan.recurrent_loss_weight * losses.recurrent / num_recurrent
            if total.requires_grad:
                # accelerate averages gradients over processes; these losses must be summed.
                accelerator.backward(total * accelerator.num_processes)
            sums += torch.stack(losses.parts).detach().float()
        extra = 0.0
        if self.beside is not None:
            with self._in_precision():
                other = self.beside.loss(self.trainee, counters.step)
            if other.requires_grad:
                accelerator.backward(other)
            extra = float(other.detach())
        self.optimiser.step(multiplier)
        sums = accelerator.reduce(sums, reduction="sum").cpu()
        counters.step += 1
        counters.num_tokens += sum(part.num_tokens for part in parts)
        counters.num_masks += sum(part.num_learning_masks for part in parts)
        counters.flops += sum(flops_of(self.trainee, self.cost, part) for part in parts)
        measures: Measures = {}
        if plan.trains_base:
            measures["loss"] = float(sums[0]) / num_targets
        if plan.has_masks and plan.method is not Method.HEAD:
            measures["masks"] = float(sums[1]) / num_masks
        if plan.has_head:
            measures["head"] = float(sums[2]) / num_masks
        if plan.has_recurrent_head:
            measures["recurrent"] = float(sums[3]) / num_recurrent
        weights = {"loss": 1.0, "masks": plan.mask_loss_weight, "head": plan.head_loss_weight}
        weights["recurrent"] = plan.recurrent_loss_weight
        counters.losses.append(sum(weights[name] * value for name, value in measures.items()) + extra)
        return measures if self.beside is None else measures | {"beside": extra}

    def _adding_up(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context of one part of an update: gradients are synchronised only in the last part."""
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(is_last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.wrapped)

    def _in_precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.precision == "bf16")

    def save(self) -> None:
        """Save the run's state; the old one is replaced only when the new one is complete."""
        weights = {name: parameter.detach() for name, parameter in self.trainee.trained.items()}
        state: dict[str, Any] = {"trained": weights, "optimiser": self.optimiser.state_dict()}
        if self.is_sharded:
            state = sharding.whole(state, keep=self.accelerator.is_main_process)
        if self.accelerator.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
            run = {"counters": asdict(self.counters), "plan": json.dumps(self.identity)}
            beside = {} if self.beside is None else {"beside": self.beside.state_dict()}
            save_atomically(run | state | beside, self.out / STATE_FILE)

    def export(self, dtype: torch.dtype | None, chat_template: str | None) -> Path:
        """Write the checkpoint to `out/model` from the main process, replacing an old one only when complete."""
        weights = self.trainee.state_dict()
        if self.is_sharded:
            weights = sharding.whole(weights, keep=self.accelerator.is_main_process)
        folder = self.out / MODEL
        if self.accelerator.is_main_process:
            acceptance = draft_agreement(self.counters.curve[-1]) if self.counters.curve else ()
            try:
                with whole_folder(folder) as new:
                    more: dict[str, Any] = {"acceptance": acceptance, "chat_template": chat_template}
                    if self.plan.has_recurrent_head and self.counters.curve:
                        more["recurrent_acceptance"] = draft_agreement(self.counters.curve[-1], RECURRENT)
                    write_checkpoint(self.trainee, weights, self.checkpoint, new, dtype=dtype, **more)
            except SafetensorError as error:  # safetensors raises it for a failed write
                raise OSError(f"{folder} cannot be written: {error}") from error
        self.accelerator.wait_for_everyone()
        return folder

    def peak_bytes(self) -> int:
        """Return the peak memory so far in bytes: of the GPU, or of this process."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return peak_of_process()

    @property
    def _is_evaluated(self) -> bool:
        """Return whether the curve ends with the figures of the current weights."""
        return bool(self.counters.curve) and self.counters.curve[-1]["step"] == self.counters.step

    def _evaluate(self, held_out: Texts, progress: float, writer: SummaryWriter | None) -> None:
        """Evaluate on the held-out rows and add the figures to the curve."""
        counters = self.counters
        was_training = self.trainee.training
        self.trainee.eval()
        with self._in_precision():
            figures = self.trainee.reading(lambda: held_out_figures(self.trainee, held_out))
        if isinstance(self.trainee, FSDPModule):
            self.trainee.reshard()
        self.trainee.train(was_training)
        if self.plan.has_masks:
            figures["tokens_per_step"] = tokens_per_step(figures)
        if self.plan.has_recurrent_head:
            figures["recurrent_tokens_per_step"] = tokens_per_step(figures, RECURRENT)
        place = {"progress": progress, "step": float(counters.step), "tokens": float(counters.num_tokens)}
        counters.curve.append(place | {"flops": counters.flops, "seconds": counters.seconds} | figures)
        if writer is not None:
            for name, value in figures.items():
                writer.add_scalar(f"held_out/{name}", value, counters.step)

    def _resume(self) -> None:
        file = self.out / STATE_FILE
        if not file.is_file():
            return
        state = load_checkpoint(file)
        check_same(json.loads(state["plan"]), self.identity, self.out)
        self.counters = Counters(**state["counters"])
        if self.beside is not None and "beside" in state:
            self.beside.load_state_dict(state["beside"])
        own = self.trainee.trained
        with torch.no_grad():
            for name, tensor in state["trained"].items():
                own[name].copy_(sharding.shard_like(tensor, own[name]))
        if self.is_sharded:
            sharding.shard_moments(state["optimiser"], self.optimiser)
        self.optimiser.load_state_dict(state["optimiser"])
