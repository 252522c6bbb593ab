"""Compare verification rules on the same weights: which drafts stand, tokens per step, and which rules are exact."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from space_model.load import load_model
from space_proto import worker_pb2 as pb
from transformers.utils import logging as transformers_logging

from space_eval.distribution import draw, octal_checkpoint
from space_eval.exact_law import counts_of
from space_eval.generation import Generation, generate
from space_eval.measured import (
    Measured,
    PromptSet,
    add_model_arguments,
    draw_figures,
    markdown_facts,
    positive_int,
    positive_temperature,
    progress,
    write_report,
)
from space_eval.verdict_rules import Rule
from space_eval.verdicts_law import (
    Ids,
    ModelLaws,
    StepLaws,
    autoregressive_law,
    noise_floor,
    run_law,
    total_variation,
    worst_case,
)
from space_eval.verdicts_report import (
    DecodingRow,
    ErrorRow,
    SamePlaces,
    decoding_row,
    draw_verdicts,
    same_places,
    verdicts_markdown,
)
from space_eval.verdicts_step import Place, ruled_worker

DESCRIPTION = """\
Five rules judge the drafts of one checkpoint through the worker's own step:

  coupling    the model's own sample of every row, by noise that drafts and rows share; what the server runs
  token-wise  accept with min(1, p/q), on rejection draw from the residual (Leviathan et al., Chen et al.)
  block       accept the longest prefix the drafts' joint probability allows (Sun et al., arXiv 2403.10444)
  argmax      the coupling's verdict on the masks' most probable ids
  published   the SPACE code as published: accept with p/q, on rejection draw from p; not exact

First their error on tiny vocabularies, by exact enumeration of the first three tokens over every draft and verdict;
then tokens per step on the checkpoint, at batch 1. Only the coupling gives the same text for a seed whatever is
drafted, so it alone serves; the others are here to be measured.
"""
TINY_PROMPT: Ids = (1, 4, 2)
DEPTH = 3
TINY_MASKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `spaceserve eval verdicts`."""
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL (prompt, question, turns, …) or text")
    parser.add_argument("--limit", type=positive_int, help="only so many prompts (default: all)")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="new tokens per prompt (default: 128)")
    parser.add_argument("--k", type=int, nargs="+", help="most drafts per step (default: as many as there are masks)")
    parser.add_argument(
        "--temperature",
        type=positive_temperature,
        nargs="+",
        default=[0.8, 1.0],
        help="above 0: greedy, all rules but the drafts' are one (default: 0.8 and 1)",
    )
    parser.add_argument(
        "--texts", type=positive_int, default=1, help="texts per prompt, each with its seed (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first text (default: 0)")
    parser.add_argument(
        "--draws",
        type=positive_int,
        default=4000,
        help="runs of the coupling's kernels on the tiny model (default: 4000)",
    )
    parser.add_argument("--out", type=Path, help="folder for verdicts.md, verdicts.json and the figures")


def run(options: argparse.Namespace) -> int:
    """Print the tables; exit status 0."""
    measured = Measured.load(options)
    prompts = measured.prompt_set(options.prompts, options.limit, options.max_tokens)
    ks = measured.drafts_within(options.k)
    errors = measure_errors(options.temperature, options.draws)
    rows: list[DecodingRow] = []
    places: list[SamePlaces] = []
    for temperature in options.temperature:
        for k in ks:
            found = {rule: _decode(measured, prompts, rule, temperature, k, options) for rule in Rule}
            rows += [decoding_row(rule, temperature, k, texts) for rule, (texts, _) in found.items()]
            served, drawn = found[Rule.COUPLING][1], found[Rule.TOKEN_WISE][1]
            places.append(same_places(temperature, k, served, drawn))
    facts = measured.facts() | {
        "prompts": prompts,
        "texts": f"{options.texts} per prompt and rule, {options.max_tokens} new tokens, batch 1, (k+1)² rows",
    }
    facts = {name: str(value) for name, value in facts.items()}
    markdown = markdown_facts(facts) + "\n" + verdicts_markdown(errors, rows, places)
    print(markdown)
    if options.out is not None:
        record: dict[str, object] = {
            "facts": facts,
            "errors": [row.as_json() for row in errors],
            "decoding": [row.as_json() for row in rows],
            "same_places": [row.as_json() for row in places],
        }
        write_report(options.out, "verdicts", markdown, record)
        draw_figures(lambda: draw_verdicts(options.out, errors, rows))
    return 0


def measure_errors(temperatures: Sequence[float], num_draws: int) -> list[ErrorRow]:
    """Total variation of every rule against one token at a time: hand-made worst case, and a random model of 8 ids."""
    rows = [
        _error_row("worst case, 1 token", worst_case(), rule, (0,), num_drafts=1, depth=2) for rule in Rule
    ]  # the prefill's token has no draft to judge: of two tokens, the second is the step's
    transformers_logging.disable_progress_bar()  # a model of 2,000 numbers
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(octal_checkpoint(Path(folder), seed=3), dtype="float32")
        for temperature in temperatures:
            laws = ModelLaws(model, temperature)
            name = f"random model of 8 ids, {DEPTH} tokens, T={temperature:g}"
            rows += [_error_row(name, laws, rule, TINY_PROMPT, num_drafts=TINY_MASKS, depth=DEPTH) for rule in Rule]
            sampling = pb.Sampling(temperature=temperature)
            runs = draw(model, TINY_PROMPT, sampling, depth=DEPTH, num_runs=num_draws).runs
            exact = autoregressive_law(laws, TINY_PROMPT, DEPTH)
            counts = counts_of(runs, vocab_size=laws.vocab_size, depth=DEPTH)
            mean, deviation = noise_floor(exact, num_draws)
            seen = total_variation(counts / num_draws, exact)
            rows.append(
                ErrorRow(name, f"coupling, worker, {num_draws} seeds", seen, None, floor=mean, deviation=deviation)
            )
    progress("exact enumeration: done", last=True)
    return rows


def _error_row(case: str, laws: StepLaws, rule: Rule, prompt: Ids, *, num_drafts: int, depth: int) -> ErrorRow:
    found = run_law(laws, rule, prompt, num_drafts=num_drafts, depth=depth)
    error = total_variation(found.law, autoregressive_law(laws, prompt, depth))
    return ErrorRow(case, rule.value, error, found.tokens_in_first_step)


def _decode(
    measured: Measured, prompts: PromptSet, rule: Rule, temperature: float, k: int, options: argparse.Namespace
) -> tuple[list[Generation], list[Place]]:
    """Every text under one rule, each alone in the batch."""
    worker, stepper = ruled_worker(measured.model, rule, num_drafts=k, seed=options.seed)
    texts: list[Generation] = []
    seeds = np.arange(len(prompts.prompts) * options.texts) + options.seed
    for number, seed in enumerate(seeds):
        texts += generate(
            worker,
            [prompts.prompts[number % len(prompts.prompts)]],
            sampling=pb.Sampling(seed=int(seed), temperature=temperature),
            max_tokens=options.max_tokens,
            max_draft_length=k,
            eos_ids=measured.model.facts.eos_ids,
        )
        progress(f"T={temperature:g} k={k} {rule}: text {number + 1} of {len(seeds)}", last=number + 1 == len(seeds))
    return texts, stepper.places
