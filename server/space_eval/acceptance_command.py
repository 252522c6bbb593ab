"""Tokens per step by k and temperature, repetition, and speed-up against plain decoding."""

import argparse
import platform
import statistics
import sys
from pathlib import Path

import torch
from space_model.checkpoint import Checkpoint
from space_model.load import load_model
from space_model.precision import KV_DTYPES, WEIGHTS
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.controller import Controller, FixedLayout
from space_server.worker import Worker
from tokenizers import Tokenizer

from space_eval.acceptance import AcceptanceRow, summarise
from space_eval.generation import Generation, generate
from space_eval.prompts import load_prompts
from space_eval.report import to_markdown, write_report

DESCRIPTION = """\
Runs every prompt alone through the worker's own step, plain and with k drafts in turn, so that the speed-up is a ratio
within one run. Outputs that loop are reported apart: a loop flatters acceptance. An output loops if at least half of
its 4-grams have occurred earlier in it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `spaceserve eval acceptance`."""
    parser.add_argument("--model", default="demo", help="folder of a checkpoint, or demo (default: demo)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL (prompt, question, turns, …) or text")
    parser.add_argument("--limit", type=int, help="only so many prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt (default: 128)")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="most drafts per step (default: 1–5)")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy (default: 0 and 0.8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; each has its own (default: 0)")
    parser.add_argument(
        "--layout", choices=["full", "auto"], default="full", help="(k+1)² rows, or as served (default: full)"
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    parser.add_argument("--weights", choices=WEIGHTS, default="plain", help="(default: plain)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values (default: auto)")
    parser.add_argument("--num-threads", type=int, help="of a product (default: as torch has it)")
    parser.add_argument("--out", type=Path, help="folder for acceptance.md and acceptance.json")


def run(options: argparse.Namespace) -> int:
    """Print the table; exit status 0."""
    rows, facts = run_acceptance(options)
    print(to_markdown(rows, facts))
    if options.out is not None:
        write_report(options.out, "acceptance", rows, facts)
    return 0


def run_acceptance(options: argparse.Namespace) -> tuple[list[AcceptanceRow], dict[str, object]]:
    """All settings of the options over all prompts."""
    model = load_model(
        options.model,
        dtype=options.dtype,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        num_threads=options.num_threads,
    )
    tokenizer = Tokenizer.from_file(str(Checkpoint.open(options.model).folder / "tokenizer.json"))
    longest = model.facts.window - options.max_tokens
    prompts = [tokenizer.encode(p.text).ids[-longest:] for p in load_prompts(options.prompts, options.limit)]
    ks = sorted({min(k, model.facts.num_masks) for k in options.k} - {0})
    workers = {k: _worker(model, k, options.layout) for k in (0, *ks)}

    rows: list[AcceptanceRow] = []
    for temperature in options.temperature:
        outputs: dict[int, list[Generation]] = {k: [] for k in workers}
        for number, prompt in enumerate(prompts):
            sampling = pb.Sampling(seed=options.seed + number, temperature=temperature)
            for k, worker in workers.items():
                outputs[k] += generate(
                    worker,
                    [prompt],
                    sampling=sampling,
                    max_tokens=options.max_tokens,
                    max_draft_length=k,
                    eos_ids=model.facts.eos_ids,
                )
            _progress(f"T={temperature:g}: prompt {number + 1} of {len(prompts)}", last=number + 1 == len(prompts))
        _check_same_text(outputs)
        for k in workers:
            rows.append(
                summarise(
                    outputs[k],
                    outputs[0],
                    lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
                    temperature=temperature,
                    max_drafts=k,
                )
            )
    facts: dict[str, object] = {
        "model": model.facts.name,
        "model hash": model.facts.model_hash[:12],
        "dtype": model.facts.number_format,
        "prompts": f"{options.prompts.name} ({len(prompts)}, {statistics.fmean(map(len, prompts)):.0f} tokens each)",
        "new tokens": options.max_tokens,
        "batch": 1,
        "layout": options.layout,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    return rows, facts


class TextsDiffer(AssertionError):
    """Speculation changed a text: never right."""


def _check_same_text(outputs: dict[int, list[Generation]]) -> None:
    for k, generations in outputs.items():
        for number, (plain, drafted) in enumerate(zip(outputs[0], generations, strict=True)):
            if plain.tokens != drafted.tokens:
                raise TextsDiffer(f"Prompt {number + 1} gives another text with k={k} than without drafts.")


def _worker(model: SpaceModel, k: int, layout: str) -> Worker:
    controller: Controller | None = None if layout == "auto" else FixedLayout.full(k)  # None: by measured cost
    num_blocks = -(-(model.facts.window + model.facts.num_masks + 1) // 16)
    return Worker(model, num_blocks=num_blocks, max_sequences=1, max_draft_length=k, controller=controller)


def _progress(text: str, *, last: bool) -> None:
    if sys.stderr.isatty() or last:
        print(f"\r{text}", end="\n" if last else "", file=sys.stderr, flush=True)
