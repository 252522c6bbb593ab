"""One run of `spaceserve train`, from its options to the checkpoint and the report."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from space_model import family
from space_model.checkpoint import Checkpoint
from space_model.model_error import UnsupportedModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from space_train.examples import Example, pad_id, read_examples
from space_train.mixed_rows import MixedRows, Stream
from space_train.packed_examples import PackedExamples
from space_train.run_report import write_report
from space_train.self_generate import own_examples, prompts_of, write_own_texts
from space_train.train_batch import Texts
from space_train.train_plan import InvalidPlan, TrainPlan
from space_train.trainer import TrainResult, train

MOST_HELD_OUT_ROWS = 64
OWN_TEXT_FILE = "own_texts.jsonl"


def run_session(options: argparse.Namespace, plan: TrainPlan) -> TrainResult:
    """Read model and data, train, write `out/model` and the report."""
    checkpoint = Checkpoint.open(options.model)
    out: Path = options.out
    if options.restart and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    model = load_base(checkpoint, plan)
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.folder), trust_remote_code=False)
    vocab_size = len(model.get_input_embeddings().weight)
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
        mask_ids=section.get("mask_token_ids") or (),
    )
    fill = pad_id(tokenizer, vocab_size)
    streams, before = [Stream(packed(loaded.examples, plan, fill), 1.0)], dict[str, float]()
    if options.self_generate:
        own, before = write_own(options, plan, checkpoint, model, loaded.examples)
        streams = [
            Stream(streams[0].rows, 1.0 - options.own_share),
            Stream(packed(own, plan, fill), options.own_share, teaches=False),
        ]
    result = train(
        model,
        checkpoint.folder,
        MixedRows(streams, plan.seed),
        plan,
        out,
        tokenizer_size=tokenizer_size(tokenizer),
        given_mask_ids=options.mask_ids,
        held_out=held_out_rows(loaded.held_out or loaded.examples[:1], plan, fill),
        dtype=getattr(torch, options.weights),
        before=before,
    )
    if result.folder is not None:
        write_report(out, plan, result)
        print(f"The checkpoint is in {result.folder}: spaceserve serve --model {result.folder}", file=sys.stderr)
    return result


def load_base(checkpoint: Checkpoint, plan: TrainPlan) -> PreTrainedModel:
    """The model to train, in float32 where its weights move, else as it was saved."""
    config = family.read_config(checkpoint)
    frozen = not plan.trains_base
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            config=config,
            dtype="auto" if frozen and torch.cuda.is_available() else torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="flex_attention" if torch.cuda.is_available() else "sdpa",
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"The weights of {checkpoint.name} cannot be read: {error}") from error
    return model


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id the tokenizer gives."""
    return int(max(tokenizer.get_vocab().values())) + 1


def packed(examples: list[Example], plan: TrainPlan, fill: int) -> PackedExamples:
    """Rows as the plan wants them."""
    return PackedExamples(examples, length=plan.length, seed=plan.seed, pad_id=fill, pack=plan.pack)


def held_out_rows(examples: list[Example], plan: TrainPlan, fill: int) -> Texts:
    """The first rows of the held-out examples."""
    data = PackedExamples(examples, length=plan.length, seed=0, pad_id=fill)
    rows = data.rows(0, min(len(data), MOST_HELD_OUT_ROWS))
    return Texts(rows.ids, rows.learned, rows.document, torch.ones(len(rows.ids), dtype=torch.bool))


def write_own(
    options: argparse.Namespace,
    plan: TrainPlan,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    examples: list[Example],
) -> tuple[list[Example], dict[str, float]]:
    """Let the model write, through a worker process of ours; the texts, and the compute they took."""
    file: Path = options.out / OWN_TEXT_FILE
    most = plan.length - options.self_generate_tokens
    if most < 1:
        raise InvalidPlan(f"--self-generate-tokens must be below --length, {plan.length}.")
    prompts = prompts_of(examples, options.self_generate, longest=most, seed=plan.seed)
    written = write_own_texts(checkpoint.folder, prompts, max_tokens=options.self_generate_tokens, file=file)
    ledger = options.out / "own_texts.cost.json"
    spent = json.loads(ledger.read_text()) if ledger.exists() else {"rows": 0, "seconds": 0.0}
    spent = {"rows": spent["rows"] + written.num_rows, "seconds": spent["seconds"] + written.seconds}
    ledger.write_text(json.dumps(spent))
    return own_examples(file), {"flops": 2.0 * model.num_parameters() * spent["rows"], "seconds": spent["seconds"]}
