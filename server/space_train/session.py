"""One run of `spaceserve train`, from its options to the checkpoint and the report."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.free_memory import FreeMemory, is_out_of_memory
from space_model.loading.transformers_model import read_whole_model
from space_model.model_error import malformed_is_unsupported
from space_model.precision import multiplies_bfloat16
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from space_train.data.decontamination import EvaluationTexts
from space_train.data.examples import Example, pad_id
from space_train.data.records import UnusableTokenizer
from space_train.data.rows import MixedRows, PackedExamples
from space_train.data.train_batch import Texts
from space_train.disk_space import check_disk
from space_train.estimate import check_fits, does_not_fit, fitted, gpu_memory, parts_on_cpu, shape_of
from space_train.networks.trainee import check_is_trainable
from space_train.reports import write_report
from space_train.run_folder import (
    LEDGER,
    FolderLock,
    check_goes_on,
    check_may_write,
    forget,
    holds_state,
    inputs_of,
    kept_option,
)
from space_train.self_generation.own_cost import MOST_WRITING_SHARE
from space_train.text_source import DataTextSource, Ledger, OwnTextSource, TextSettings, TextSource
from space_train.train_plan import InvalidPlan, Method, TrainPlan
from space_train.training.checkpoint import OwnMasks, check_can_start_from, check_given_ids, with_own_sizes
from space_train.training.trainer import TrainResult, on_cpu, train

MOST_HELD_OUT_ROWS, LEAST_HELD_OUT_ROWS = 64, 4

EVALUATION_SHARE = 0.5
"""Most held-out rows over all evaluations, as a share of the trained rows. A held-out row takes a third of the time of
a trained one."""

_CPU = torch.device("cpu")

PATIENCE = timedelta(days=7)  # how long the other processes wait while the first generates the model's own texts


def run_session(options: argparse.Namespace, plan: TrainPlan, *, started: float | None = None) -> TrainResult:
    """Read model and data, train, write `out/model` and the report. `started`: when the command was given, on
    `time.monotonic`; None: now."""
    with FolderLock(options.out) as lock:
        return _run_locked(options, plan, time.monotonic() if started is None else started, lock)


def _run_locked(options: argparse.Namespace, plan: TrainPlan, started: float, lock: FolderLock) -> TrainResult:
    processes = PartialState(on_cpu(), timeout=PATIENCE)
    checkpoint = Checkpoint.open(options.model)
    out: Path = options.out
    check_may_write(out, checkpoint)
    if processes.is_main_process:
        lock.take()
    check_can_start_from(checkpoint, plan)
    if options.mask_ids and plan.method is not Method.FULL:
        raise InvalidPlan(f"Method {plan.method} gives no ids to masks: leave --mask-ids out.")
    plan.check_divides_among(processes.num_processes)
    plan = within_window(plan, checkpoint, is_asked_for=options.length is not None)
    if options.precision == "auto":
        precision, reason = choose_precision(cpu=on_cpu())
        plan = replace(plan, precision=precision)
        if processes.is_main_process:
            name = "float32" if precision == "no" else precision
            print(f"precision: {name}, as {reason}.", file=sys.stderr, flush=True)
    # Everything that can be refused is refused before anything is written or forgotten.
    config = family.read_config(checkpoint)
    with torch.device("meta"), malformed_is_unsupported():
        meta = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        check_is_trainable(meta)
    tokenizer = load_tokenizer(checkpoint)
    vocab_size = int(config.vocab_size)
    sizes = {"hidden_size": int(config.hidden_size), "vocab_size": vocab_size}
    if options.preset is None:
        given = {name for name, value in vars(options).items() if value is not None}
        plan, flags = with_own_sizes(checkpoint, plan, given, **sizes)
        if flags and processes.is_main_process:
            print(f"sizes: those of {checkpoint.name}, to go on from it: {flags}.", file=sys.stderr, flush=True)
    OwnMasks.read(checkpoint, plan, **sizes)
    if options.mask_ids:
        check_given_ids(options.mask_ids, plan.num_masks, vocab_size, tokenizer_size(tokenizer))
    section = checkpoint.config.get("space") or {}
    fill = pad_id(tokenizer, vocab_size)
    settings = TextSettings(options, checkpoint, tokenizer, vocab_size, fill, processes.is_main_process, plan, started)
    texts = text_source(settings, plan, options.mask_ids or section.get("mask_token_ids") or ())
    # The server must use the chat template of the training data.
    has_own = texts.template is not None and (options.template or not tokenizer.chat_template)
    if has_own and checkpoint.gguf is not None and not plan.trains_base:
        raise InvalidPlan(
            f"The chat template of {checkpoint.name} is in the GGUF file, and no other can be written beside it. "
            f"Train a converted copy: spaceserve convert {checkpoint.gguf.path} NEW_FOLDER"
        )
    plan = texts.fit(plan)
    goes_on, chosen = holds_state(out) and not options.restart, options.accumulate is not None
    if plan.budget.minutes is not None and options.rows_per_step is None:
        if goes_on and (rows := kept_option(out, "rows_per_step")):
            plan = replace(plan, rows_per_step=rows)
        elif processes.num_processes == 1:  # several would each measure another rate
            plan = settings.cost.with_rows_in_time(plan, MOST_WRITING_SHARE if texts.num_written else 0.0)
    if not chosen and goes_on and (parts := kept_option(out, "accumulate")):  # so that a resumed run computes the same
        plan, chosen = replace(plan, accumulate=parts), True
    inputs = inputs_of(plan, checkpoint) | texts.inputs()
    if options.mask_ids:
        inputs["mask ids"] = (options.mask_ids * plan.num_masks)[: plan.num_masks]
    if not options.restart:
        check_goes_on(out, inputs)  # before the memory check, whose advice is about this run
    plan, note = in_memory(plan, checkpoint, processes.num_processes, is_chosen=chosen, resumes=holds_state(out))
    if note and processes.is_main_process:
        print(note, file=sys.stderr, flush=True)
        if not goes_on and (slow := settings.cost.describe_slow_updates(plan)):
            print(slow, file=sys.stderr, flush=True)
    if processes.is_main_process:
        with torch.device("meta"):
            check_disk(out, checkpoint, meta, plan, getattr(torch, options.weights))
    model = load_base(checkpoint, plan)
    out.mkdir(parents=True, exist_ok=True)
    if processes.is_main_process:
        lock.take()
    if options.restart and processes.is_main_process:
        forget(out, but=texts.keeps())
    processes.wait_for_everyone()
    before = dict[str, float]()
    begun = time.monotonic()
    if texts.num_written:
        if processes.is_main_process:
            texts.write(plan)
        processes.wait_for_everyone()
        before = own_cost(out, model)
    written_seconds = time.monotonic() - begun  # counted by its ledger
    streams, held_out_examples = texts.streams(plan)
    data = MixedRows(streams, plan.seed)
    if texts.num_written and processes.is_main_process:
        print(f"rows: {data}.", file=sys.stderr, flush=True)
    held_out = None
    if held_out_examples:
        row_seconds = None if plan.budget.minutes is None else settings.cost.row_seconds(plan)
        held_out = held_out_rows(held_out_examples, plan, fill, rows_per_evaluation(plan, len(data), row_seconds))
    try:
        result = train(
            model,
            checkpoint.home,
            data,
            plan,
            out,
            tokenizer_size=tokenizer_size(tokenizer),
            given_mask_ids=options.mask_ids,
            held_out=held_out,
            dtype=getattr(torch, options.weights),
            chat_template=texts.template if has_own else None,
            before=before,
            inputs=inputs,
            startup_seconds=time.monotonic() - started - written_seconds,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        memory = FreeMemory.on(_CPU).among(processes.num_processes).num_bytes if on_cpu() else gpu_memory()
        where = {"cpu": on_cpu(), "resumes": holds_state(out)}
        raise does_not_fit(checkpoint, plan, processes.num_processes, memory, error, **where) from error
    if result.folder is not None and processes.is_main_process:
        write_report(out, plan, result)
        print(f"The checkpoint is in {result.folder}: spaceserve serve --model {result.folder}", file=sys.stderr)
    return result


def in_memory(
    plan: TrainPlan, checkpoint: Checkpoint, num_processes: int, *, is_chosen: bool, resumes: bool
) -> tuple[TrainPlan, str | None]:
    """Return the plan with the number of parts of an update that fits this machine's memory, and a line on that memory.
    `is_chosen`: the number was given. Raises DoesNotFit on a CPU; on a GPU the first update fails instead."""
    shape = shape_of(checkpoint)
    here = replace(plan, rows_per_step=plan.rows_per_step // num_processes)
    if not on_cpu():
        memory = gpu_memory()
        fit = None if is_chosen or shape is None or memory is None else fitted(shape, here, memory)
        if fit is None or fit.activation_checkpointing != plan.activation_checkpointing:
            return plan, None
        return replace(plan, accumulate=fit.accumulate), None
    free = FreeMemory.on(_CPU).among(num_processes)
    if not is_chosen:
        here = replace(here, accumulate=parts_on_cpu(here))
        fit = None if shape is None else fitted(shape, here, free.num_bytes, cpu=True)
        if fit is not None and fit.activation_checkpointing == plan.activation_checkpointing:
            here = fit
        plan = replace(plan, accumulate=here.accumulate)
    return plan, check_fits(shape, plan, num_processes, free, resumes=resumes)


def within_window(plan: TrainPlan, checkpoint: Checkpoint, *, is_asked_for: bool) -> TrainPlan:
    """Return the plan with the row length limited to the model's window."""
    window = family.positions(family.read_config(checkpoint))
    if window is None or plan.length <= window:
        return plan
    if is_asked_for:
        raise InvalidPlan(f"Rows of {plan.length} ids are longer than the {window} positions of {checkpoint.name}.")
    return replace(plan, length=window)


def choose_precision(*, cpu: bool) -> tuple[str, str]:
    """Return the matmul precision for this machine and the reason; on a CPU by the server's rule."""
    if not cpu:
        return "bf16", "an accelerator has such products"
    if multiplies_bfloat16():
        return "bf16", "this CPU has such products"
    return "no", "this CPU has no bfloat16 products (AVX512-BF16 or AMX)"


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    try:
        folder = str(checkpoint.folder)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())  # may have several lines
        raise UnusableTokenizer(f"The tokenizer of {checkpoint.name} cannot be read: {reason}") from error
    return tokenizer


def load_base(checkpoint: Checkpoint, plan: TrainPlan) -> PreTrainedModel:
    """Load the model in float32 if its weights are trained or matmuls are float32; else as saved on a GPU, and in
    bfloat16 on a CPU."""
    if plan.trains_base or plan.precision != "bf16":
        return read_whole_model(checkpoint, torch.float32)
    return read_whole_model(checkpoint, None if torch.cuda.is_available() else torch.bfloat16)


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the tokenizer's largest id."""
    return int(max(tokenizer.get_vocab().values())) + 1


def rows_per_evaluation(plan: TrainPlan, epoch: int, row_seconds: float | None = None) -> int:
    """Return the held-out rows per evaluation, limited so that a short run does not spend most of its time on them.
    `epoch`: rows of one epoch; `row_seconds`: of training on a row, None: unknown. A budget in operations cannot be
    converted to rows in advance."""
    budget, known = plan.budget, [math.inf]
    if budget.minutes is not None and row_seconds:
        known.append(60 * budget.minutes / row_seconds)
    for limit, rows in ((budget.steps, plan.rows_per_step), (budget.epochs, epoch), (budget.tokens, 1 / plan.length)):
        if limit is not None:
            known.append(limit * rows)
    affordable = EVALUATION_SHARE * min(known) / (plan.evaluations + 1)
    return int(min(MOST_HELD_OUT_ROWS, max(LEAST_HELD_OUT_ROWS, affordable)))


def held_out_rows(examples: list[Example], plan: TrainPlan, fill: int, most: int = MOST_HELD_OUT_ROWS) -> Texts:
    """Return the first rows of the held-out examples, at most `most`."""
    data = PackedExamples(examples, length=plan.length, seed=0, pad_id=fill)
    rows = data.rows(0, min(len(data), most))
    return Texts(rows.ids, rows.learned, rows.document, torch.ones(len(rows.ids), dtype=torch.bool))


def text_source(settings: TextSettings, plan: TrainPlan, mask_ids: Sequence[int]) -> TextSource:
    """Return the source that the options name."""
    files, count = settings.options.decontaminate, settings.options.own_data
    evaluation = EvaluationTexts.read(files) if files else None
    if count is not None:
        return OwnTextSource(settings, plan, count if count > 0 else None, evaluation)
    return DataTextSource.read(settings, plan, mask_ids, evaluation)


def own_cost(out: Path, model: PreTrainedModel) -> dict[str, float]:
    """Return the compute spent on the model's own texts, as counters of a run."""
    spent = Ledger(out / LEDGER).read()
    return {"flops": 2.0 * model.num_parameters() * spent["rows"], "seconds": spent["seconds"]}
