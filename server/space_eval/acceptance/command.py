"""`spaceserve eval acceptance`: tokens per step by k and temperature, repetition, and speed-up over plain decoding."""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from space_model.loading.load import load_model
from space_model.precision import KV_DTYPES, WEIGHTS
from space_proto import worker_pb2 as pb

from space_eval.acceptance.generation import Generation, generate
from space_eval.acceptance.model import describe_prompts, encode_prompts, load_tokenizer
from space_eval.acceptance.paired_decoding import TextsDiffer, make_worker
from space_eval.acceptance.text_statistics import is_blank, is_filler, is_looping, repeated_share
from space_eval.prompts import load_prompts
from space_eval.report.tables import markdown_facts, markdown_table, ratio, show_progress, write_report

DESCRIPTION = """\
Runs every prompt alone through the worker's own step, plain and with k drafts in turn, so that the speed-up is a ratio
within one run. Outputs that loop are reported apart: a loop flatters acceptance. An output loops if at least half of
its 4-grams have occurred earlier in it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `spaceserve eval acceptance`."""
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


@dataclass(frozen=True)
class AcceptanceRow:
    """One setting over all prompts. Shares are in 0..1; means are over steps, not over prompts."""

    temperature: float
    max_drafts: int  # k
    num_outputs: int
    num_tokens: int  # emitted after the prefill's token
    tokens_per_step: float
    tokens_per_step_not_looping: float  # over outputs that do not loop; nan if all loop
    tokens_per_step_no_blanks: float  # whitespace-only tokens are not counted, their steps are
    accepted_by_position: tuple[float, ...]  # accepted share of the drafts at position 1, 2, …
    repeated_4grams: float  # mean share of 4-grams that occurred before in the output
    looping: float  # share of outputs that loop
    characters_per_step: float
    accepted_filler: float  # share of accepted tokens that are only whitespace or punctuation
    speedup: float  # plain decoding's seconds per token / this one's, same prompts, same run

    @classmethod
    def of(
        cls,
        generations: Sequence[Generation],
        plain: Sequence[Generation],
        decode: Callable[[Sequence[int]], str],
        *,
        temperature: float,
        max_drafts: int,
    ) -> AcceptanceRow:
        """Build the row from one setting's generations and plain decoding's on the same prompts."""
        steps = [step for g in generations for step in g.steps]
        steady = [g for g in generations if not is_looping(g.tokens)]
        accepted = [token for step in steps for token in step.tokens[: step.num_accepted]]
        num_tokens = sum(g.num_decoded for g in generations)
        blanks = sum(is_blank(decode([token])) for step in steps for token in step.tokens)
        by_position = []
        for position in range(1, max_drafts + 1):
            laid_out = [step.num_accepted >= position for step in steps if step.num_drafted >= position]
            by_position.append(ratio(sum(laid_out), len(laid_out)))
        return cls(
            temperature=temperature,
            max_drafts=max_drafts,
            num_outputs=len(generations),
            num_tokens=num_tokens,
            tokens_per_step=ratio(num_tokens, len(steps)),
            tokens_per_step_not_looping=ratio(sum(g.num_decoded for g in steady), sum(len(g.steps) for g in steady)),
            tokens_per_step_no_blanks=ratio(num_tokens - blanks, len(steps)),
            accepted_by_position=tuple(by_position),
            repeated_4grams=statistics.fmean(repeated_share(g.tokens) for g in generations),
            looping=1.0 - ratio(len(steady), len(generations)),
            characters_per_step=ratio(sum(len(decode(g.tokens[len(g.first) :])) for g in generations), len(steps)),
            accepted_filler=ratio(sum(is_filler(decode([token])) for token in accepted), len(accepted)),
            speedup=ratio(_seconds_per_token(plain), _seconds_per_token(generations)),
        )


def _seconds_per_token(generations: Sequence[Generation]) -> float:
    return ratio(sum(g.decode_seconds for g in generations), sum(g.num_decoded for g in generations))


def run(options: argparse.Namespace) -> int:
    """Print the table. Return exit status 0."""
    rows, facts = measure(options)
    page = to_markdown(rows, facts)
    print(page)
    if options.out is not None:
        write_report(options.out, "acceptance", page, {"facts": facts, "rows": [asdict(row) for row in rows]})
    return 0


def measure(options: argparse.Namespace) -> tuple[list[AcceptanceRow], dict[str, object]]:
    """Measure all settings of the options over all prompts."""
    model = load_model(
        options.model,
        dtype=options.dtype,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
        num_threads=options.num_threads,
    )
    tokenizer = load_tokenizer(options.model)
    loaded = load_prompts(options.prompts, options.limit)
    prompts = encode_prompts(tokenizer, loaded, window=model.facts.window, max_tokens=options.max_tokens)
    ks = sorted({min(k, model.facts.num_masks) for k in options.k} - {0})
    workers = {k: make_worker(model, k, options.layout) for k in (0, *ks)}

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
                if outputs[k][-1].tokens != outputs[0][-1].tokens:
                    raise TextsDiffer(f"Prompt {number + 1} gives another text with k={k} than without drafts.")
            last = number + 1 == len(prompts)
            show_progress(f"T={temperature:g}: prompt {number + 1} of {len(prompts)}", last=last)
        rows += [
            AcceptanceRow.of(
                outputs[k],
                outputs[0],
                lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
                temperature=temperature,
                max_drafts=k,
            )
            for k in workers
        ]
    facts: dict[str, object] = {
        "model": model.facts.name,
        "model hash": model.facts.model_hash[:12],
        "dtype": model.facts.number_format,
        "prompts": describe_prompts(options.prompts.name, prompts),
        "new tokens": options.max_tokens,
        "batch": 1,
        "layout": options.layout,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    return rows, facts


def to_markdown(rows: Sequence[AcceptanceRow], facts: Mapping[str, object]) -> str:
    """Return the facts of the run and the table as Markdown."""
    head = ["T", "k", "tokens/step", "not looping", "no blanks", "accepted at 1, 2, …", "repeated 4-grams", "looping"]
    head += ["chars/step", "accepted filler", "speed-up"]
    cells = [
        [
            f"{row.temperature:g}",
            str(row.max_drafts),
            f"{row.tokens_per_step:.2f}",
            f"{row.tokens_per_step_not_looping:.2f}",
            f"{row.tokens_per_step_no_blanks:.2f}",
            " ".join(f"{share:.2f}" for share in row.accepted_by_position),
            f"{row.repeated_4grams:.2f}",
            f"{row.looping:.0%}",
            f"{row.characters_per_step:.1f}",
            f"{row.accepted_filler:.2f}",
            f"{row.speedup:.2f}",
        ]
        for row in rows
    ]
    return markdown_facts(facts) + "\n" + markdown_table(head, cells)
