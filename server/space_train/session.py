"""One run of `spaceserve train`, from its options to the checkpoint and the report."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.quantized_formats import read_format
from space_model.checkpoint.unused_tensors import check_found
from space_model.free_memory import FreeMemory, is_out_of_memory
from space_model.loading.load_progress import show_load_progress_on_terminals
from space_model.loading.whole_model import stream_model
from space_model.model_error import UnsupportedModel, malformed_is_unsupported
from space_model.precision import multiplies_bfloat16
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from space_train.data.examples import Example, pad_id, read_examples
from space_train.data.records import UnusableTokenizer
from space_train.data.rows import MixedRows, PackedExamples, RowStream, with_own_texts
from space_train.data.train_batch import Texts
from space_train.disk_space import check_disk
from space_train.estimate import check_fits, does_not_fit, fitted, gpu_memory, parts_on_cpu, shape_of
from space_train.networks.trainee import check_is_trainable
from space_train.reports import write_report
from space_train.run_folder import (
    LEDGER,
    OWN_TEXT_FILE,
    check_goes_on,
    check_may_write,
    forget,
    holds_state,
    inputs_of,
    kept_parts,
)
from space_train.self_generation.self_generate import forget_others, own_examples, prompts_of, write_own_texts
from space_train.train_plan import Anchors, InvalidPlan, Method, TrainPlan
from space_train.training.checkpoint import OwnMasks, check_can_start_from, check_given_ids
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
    started = time.monotonic() if started is None else started
    processes = PartialState(on_cpu(), timeout=PATIENCE)
    checkpoint = Checkpoint.open(options.model)
    out: Path = options.out
    check_may_write(out, checkpoint)
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
    OwnMasks.read(checkpoint, plan, hidden_size=int(config.hidden_size), vocab_size=vocab_size)
    if options.mask_ids:
        check_given_ids(options.mask_ids, plan.num_masks, vocab_size, tokenizer_size(tokenizer))
    section = checkpoint.config.get("space") or {}
    loaded = read_examples(
        options.data,
        tokenizer,
        split=options.split,
        template=options.template,
        limit=options.limit,
        max_length=plan.length,
        held_out_share=options.held_out_share,
        vocab_size=vocab_size,
        end_ids=checkpoint.eos_ids(vocab_size),
        mask_ids=options.mask_ids or section.get("mask_token_ids") or (),
        quiet=not processes.is_main_process,
    )
    # The server must use the chat template of the training data.
    has_own = loaded.report.has_conversations and (options.template or not tokenizer.chat_template)
    if has_own and checkpoint.gguf is not None and not plan.trains_base:
        raise InvalidPlan(
            f"The chat template of {checkpoint.name} is in the GGUF file, and no other can be written beside it. "
            f"Train a converted copy: spaceserve convert {checkpoint.gguf.path} NEW_FOLDER"
        )
    fill = pad_id(tokenizer, vocab_size)
    asked = own_prompts(options, plan, loaded.examples)
    rows, length = packed(loaded.examples, plan, fill), plan.length
    plan = fitted_rows(plan, rows, asked, options.self_generate_tokens)
    if plan.length != length:
        rows = packed(loaded.examples, plan, fill)
    chosen = options.accumulate is not None
    if not chosen and not options.restart and (parts := kept_parts(out)):  # so that a resumed run computes the same
        plan, chosen = replace(plan, accumulate=parts), True
    plan, note = in_memory(plan, checkpoint, processes.num_processes, is_chosen=chosen, resumes=holds_state(out))
    if note and processes.is_main_process:
        print(note, file=sys.stderr, flush=True)
    own_texts = {"self_generate": len(asked)}
    if asked:
        own_texts |= {"self_generate_tokens": options.self_generate_tokens, "own_share": options.own_share}
    inputs = inputs_of(plan, checkpoint, rows, own_texts)
    if options.mask_ids:
        inputs["mask ids"] = (options.mask_ids * plan.num_masks)[: plan.num_masks]
    if not options.restart:
        check_goes_on(out, inputs)
    if processes.is_main_process:
        with torch.device("meta"):
            check_disk(out, checkpoint, meta, plan, getattr(torch, options.weights))
    model = load_base(checkpoint, plan)
    out.mkdir(parents=True, exist_ok=True)
    if options.restart and processes.is_main_process:
        forget(out, but=(OWN_TEXT_FILE, LEDGER) if asked else ())
    processes.wait_for_everyone()
    streams, before = [RowStream(rows, 1.0)], dict[str, float]()
    startup_seconds = time.monotonic() - started  # writing own texts is counted by its ledger
    if asked:
        if processes.is_main_process:
            write_own(options, checkpoint, asked)
        processes.wait_for_everyone()
        own, before = own_examples(out / OWN_TEXT_FILE, asked), own_cost(out, model)
        streams = with_own_texts(rows, packed(own, plan, fill), options.own_share)
    data = MixedRows(streams, plan.seed)
    if len(data.streams) > 1 and processes.is_main_process:
        print(f"rows: {data}.", file=sys.stderr, flush=True)
    held_out = None
    if loaded.held_out:
        held_out = held_out_rows(loaded.held_out, plan, fill, rows_per_evaluation(plan, len(data)))
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
            chat_template=loaded.report.template if has_own else None,
            before=before,
            inputs=inputs,
            startup_seconds=startup_seconds,
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
    window = getattr(family.read_config(checkpoint), "max_position_embeddings", None)
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
    config = family.read_config(checkpoint)
    dtype = torch.float32 if plan.trains_base or plan.precision != "bf16" else torch.bfloat16
    as_saved = dtype is torch.bfloat16 and torch.cuda.is_available()
    if checkpoint.gguf is not None:
        made, found = stream_model(checkpoint, config, config.dtype if as_saved else dtype, _CPU, copies=True)
        check_found(checkpoint, made, found)
        return made
    try:
        show_load_progress_on_terminals()
        model, found = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            config=config,
            dtype="auto" if as_saved else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=family.key_mapping(checkpoint),
            ignore_mismatched_sizes=True,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"The weights of {checkpoint.name} cannot be read: {error}") from error
    form = read_format(checkpoint.config, checkpoint.name)
    check_found(checkpoint, model, found, () if form is None else [f".{part}" for part in form.needless])
    loaded: PreTrainedModel = model
    return loaded


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the tokenizer's largest id."""
    return int(max(tokenizer.get_vocab().values())) + 1


def packed(examples: list[Example], plan: TrainPlan, fill: int) -> PackedExamples:
    """Pack examples into rows as the plan sets."""
    return PackedExamples(examples, length=plan.length, seed=plan.seed, pad_id=fill, pack=plan.pack)


def rows_per_evaluation(plan: TrainPlan, epoch: int) -> int:
    """Return the held-out rows per evaluation, limited so that a short run does not spend most of its time on them.
    `epoch`: rows of one epoch. A budget in minutes or operations cannot be converted to rows in advance."""
    budget, known = plan.budget, [math.inf]
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


def own_prompts(options: argparse.Namespace, plan: TrainPlan, examples: list[Example]) -> list[list[int]]:
    """Return the prompts that the model continues itself; none without --self-generate."""
    if not options.self_generate:
        return []
    most = plan.length - options.self_generate_tokens
    if most < 1:
        raise InvalidPlan(f"--self-generate-tokens must be below --length, {plan.length}.")
    return prompts_of(examples, options.self_generate, longest=most, seed=plan.seed)


def fitted_rows(plan: TrainPlan, data: PackedExamples, prompts: list[list[int]], num_new: int) -> TrainPlan:
    """Return the plan with rows as long as the fullest one at most, and with no more anchors than any row has places:
    short data is not padded, and no mask is trained twice. `prompts`: of own texts, which get `num_new` ids each."""
    num_own = sum(len(prompt) + num_new for prompt in prompts)
    longest = max(data.longest, num_own, 2 * (plan.num_masks + 1) + 1)
    length = min(plan.length, longest)
    places = max(1, data.most_places, min(length, num_own))
    if plan.anchors is Anchors.MANY:
        plan = replace(plan, anchors_per_token=min(plan.anchors_per_token, places / length))
    return replace(plan, length=length)


def write_own(options: argparse.Namespace, checkpoint: Checkpoint, prompts: list[list[int]]) -> None:
    """Generate the model's own texts through a worker process, and record the cost."""
    file: Path = options.out / OWN_TEXT_FILE
    ledger = options.out / LEDGER
    spent = json.loads(ledger.read_text()) if ledger.exists() else {"rows": 0, "seconds": 0.0}
    if options.restart:
        share = forget_others(checkpoint.home, prompts, max_tokens=options.self_generate_tokens, file=file)
        spent = {name: share * value for name, value in spent.items()}
        ledger.write_text(json.dumps(spent))
    written = write_own_texts(checkpoint.home, prompts, max_tokens=options.self_generate_tokens, file=file)
    spent = {"rows": spent["rows"] + written.counts.num_rows, "seconds": spent["seconds"] + written.seconds}
    ledger.write_text(json.dumps(spent))


def own_cost(out: Path, model: PreTrainedModel) -> dict[str, float]:
    """Return the compute spent on the model's own texts, as counters of a run."""
    spent = json.loads((out / LEDGER).read_text())
    return {"flops": 2.0 * model.num_parameters() * spent["rows"], "seconds": spent["seconds"]}
