"""Plain decoding against SPACE in seconds, and against transformers' assisted generation."""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from space_common.version import version
from space_model.checkpoint import Checkpoint
from space_model.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from tokenizers import Tokenizer
from tqdm import tqdm

from space_eval.assisted import AssistedAnswer, AssistedDecoder, Rival
from space_eval.bench_facts import commit, machine
from space_eval.bench_prompts import built_in
from space_eval.bench_report import Spread
from space_eval.plots import PlotError
from space_eval.prompts import PromptError, load_prompts
from space_eval.speed_decoding import PLAIN, Answer, PairedDecoder, TextsDiffer, check_same_text, space_files
from space_eval.speed_report import OURS, RivalRow, SpeedRow, to_markdown, write_speed

DESCRIPTION = """\
Times plain decoding and SPACE on the same weights, machine and prompts: on each prompt they take turns, --rounds times,
every other time in reverse order, so that a machine that gets slower in between slows both. The texts must be the same,
id by id; where they are not, the run fails.
"""

EPILOG = """\
examples:
  spaceserve eval speed                                              the embedded model, built-in function heads
  spaceserve eval speed --model PATH --prompts humaneval.jsonl --limit 16 --k 1 3 5 --temperature 0 0.8 --out speed
  spaceserve eval speed --model PATH --against prompt-lookup         and transformers' lookup of n-grams in the prompt
  spaceserve eval speed --model PATH --against assisted:DRAFT_FOLDER and transformers with a draft model

--against runs transformers' own generation loop on the base's weights, greedy, in the same run. Its ratio is over its
own plain decoding, ours over ours; the absolute times, passes of both models, and the extra bytes stand beside.
"""


class FlagError(PromptError):
    """A flag that cannot be used; the message names flag, value and cure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `spaceserve eval speed`."""
    parser.epilog = EPILOG
    parser.add_argument("--model", default="demo", help="folder of a checkpoint, hub id, or demo [demo]")
    parser.add_argument("--prompts", type=Path, help="JSONL (prompt, question, turns, …) or text [function heads]")
    parser.add_argument("--limit", type=int, help="only so many prompts [all]")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt [128]")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 5], help="most drafts per step [1 3 5]")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="0 is greedy [0]")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; each has its own [0]")
    parser.add_argument("--rounds", type=int, default=3, help="times each prompt is timed; medians are shown [3]")
    parser.add_argument("--layout", choices=["auto", "full"], default="auto", help="as served, or (k+1)² rows [auto]")
    parser.add_argument("--against", action="append", default=[], metavar="HOW", help="assisted:DRAFT or prompt-lookup")
    parser.add_argument("--draft-tokens", type=int, help="drafts per pass of --against [transformers'; 10 for lookup]")
    parser.add_argument(
        "--allow-ties", action="store_true", help="count texts that differ and go on: a GPU's products may tie"
    )
    parser.add_argument("--mask-ids", type=int, nargs="+", help="of a checkpoint that does not say: one, or one each")
    parser.add_argument("--num-masks", type=int, help="how many masks it was trained with, for --mask-ids")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 [auto]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, … [auto]")
    parser.add_argument("--num-threads", type=int, help="of a product [as torch has it]")
    parser.add_argument("--out", type=Path, help="folder for speed.json, speed.md and speed.png [table only]")


def run(options: argparse.Namespace) -> int:
    """Print the tables; 0, or 1 where speculation changed a text."""
    for flag, value in (("--rounds", options.rounds), ("--max-tokens", options.max_tokens)):
        if value < 1:
            raise FlagError(f"{flag} is {value}; it must be at least 1.")
    rivals = [Rival.parse(text) for text in options.against]
    if rivals and 0.0 not in options.temperature:
        raise FlagError("--against compares greedy decoding; add 0 to --temperature.")
    try:
        rows, others, facts = measure(options, rivals)
    except TextsDiffer as error:
        print(f"spaceserve eval speed: {error}", file=sys.stderr)
        return 1
    print(to_markdown(rows, others, facts))
    if options.out is not None:
        try:
            for file in write_speed(options.out, rows, others, facts):
                print(f"spaceserve eval speed: wrote {file}", file=sys.stderr)
        except PlotError as error:
            print(f"spaceserve eval speed: no figure: {error}", file=sys.stderr)
    return 0


def measure(
    options: argparse.Namespace, rivals: Sequence[Rival]
) -> tuple[list[SpeedRow], list[RivalRow], dict[str, object]]:
    """All temperatures, ks and rivals over all prompts."""
    model = load_model(
        options.model,
        dtype=options.dtype,
        device=options.device,
        mask_ids=options.mask_ids,
        num_masks=options.num_masks,
        num_threads=options.num_threads,
    )
    ks = sorted({min(k, model.facts.num_masks) for k in options.k} - {PLAIN})
    if not ks:
        raise FlagError(
            f"{options.model} has {model.facts.num_masks} masks and --k is {options.k}: there is nothing to compare. "
            "spaceserve train makes a checkpoint with masks; --mask-ids and --num-masks declare a published one's."
        )
    prompts = _prompts(options, model)
    decoder = PairedDecoder(model, ks, layout=options.layout)
    decoder.warm_up(prompts[0])
    base = Checkpoint.open(options.model)
    theirs = [AssistedDecoder(base, model.facts, r, num_draft_tokens=options.draft_tokens) for r in rivals]
    for other in theirs:
        other.plain(prompts[0], 4)
        other.assisted(prompts[0], 4)

    rows: list[SpeedRow] = []
    others: list[RivalRow] = []
    for temperature in options.temperature:
        answers: list[dict[int, Answer]] = []
        pairs: list[list[list[tuple[AssistedAnswer, AssistedAnswer]]]] = []  # by prompt, rival, round
        for number, prompt in enumerate(
            tqdm(prompts, desc=f"temperature {temperature:g}", unit="prompt", file=sys.stderr, disable=None)
        ):
            sampling = pb.Sampling(seed=options.seed + number, temperature=temperature)
            made = decoder.run(prompt, sampling=sampling, max_tokens=options.max_tokens, rounds=options.rounds)
            if not options.allow_ties:
                check_same_text(made, f"Prompt {number + 1}")
            answers.append(made)
            if temperature == 0:
                pairs.append([_paired(other, prompt, options) for other in theirs])
        rows += [SpeedRow.of(temperature, k, answers) for k in ks]
        if temperature == 0 and theirs:
            others.append(_ours(model, ks[-1], answers))
            longest = max(map(len, prompts)) + options.max_tokens
            others += [_rival(one, [of[n] for of in pairs], longest) for n, one in enumerate(theirs)]
    return rows, others, _facts(options, model, prompts)


def _paired(
    other: AssistedDecoder, prompt: Sequence[int], options: argparse.Namespace
) -> list[tuple[AssistedAnswer, AssistedAnswer]]:
    """(plain, assisted) of each round, in turn first."""
    made = []
    for number in range(options.rounds):
        if number % 2:
            assisted = other.assisted(prompt, options.max_tokens)
            made.append((other.plain(prompt, options.max_tokens), assisted))
        else:
            plain = other.plain(prompt, options.max_tokens)
            made.append((plain, other.assisted(prompt, options.max_tokens)))
    return made


def _ours(model: SpaceModel, k: int, answers: Sequence[Mapping[int, Answer]]) -> RivalRow:
    row = SpeedRow.of(0.0, k, answers)
    space = [by_k[k] for by_k in answers]
    num_passes = sum(answer.num_steps + 1 for answer in space)
    num_drafted = sum(answer.num_drafted for answer in space)
    return RivalRow(
        name=f"SPACE, k={k}, {row.rows_per_step:.0f} rows per step",
        runtime=OURS,
        num_prompts=len(space),
        tokens_per_pass=sum(len(answer.ids) for answer in space) / num_passes,
        num_passes=num_passes,
        num_other_passes=0,
        accepted_share=sum(answer.num_accepted for answer in space) / num_drafted if num_drafted else float("nan"),
        speedup=row.speedup,
        ms_per_token=row.space_ms_per_token,
        plain_ms_per_token=row.plain_ms_per_token,
        extra_weight_bytes=extra_weight_bytes(model),
        extra_kv_bytes=(k + 1) * model.facts.kv_bytes_per_token,
        num_identical=row.num_identical,
    )


def extra_weight_bytes(model: SpaceModel) -> int:
    """What SPACE adds to the base: the files that config.json's `space` names, and an embedding row per mask id."""
    checkpoint = Checkpoint.open(model.facts.name)
    section = checkpoint.config.get("space") or {}
    in_files: int = sum(file.stat().st_size for file in space_files(checkpoint))
    rows = len(set(section.get("mask_token_ids") or model.facts.mask_ids)) if not section.get("adapter") else 0
    return in_files + rows * model.facts.hidden_size * model.facts.dtype.itemsize


def _rival(
    other: AssistedDecoder, pairs: Sequence[Sequence[tuple[AssistedAnswer, AssistedAnswer]]], longest: int
) -> RivalRow:
    """`pairs`: by prompt and round."""
    firsts = [rounds[0] for rounds in pairs]
    num_tokens = sum(len(assisted.ids) for _, assisted in firsts)
    num_passes = sum(assisted.num_forwards for _, assisted in firsts)
    num_drafts = sum(assisted.num_draft_forwards for _, assisted in firsts)
    plain_ms, ms = [], []
    for rounds in zip(*pairs, strict=True):
        plain_ms.append(1000 * sum(p.seconds for p, _ in rounds) / sum(len(p.ids) for p, _ in rounds))
        ms.append(1000 * sum(a.seconds for _, a in rounds) / sum(len(a.ids) for _, a in rounds))
    return RivalRow(
        name=other.rival.name,
        runtime="transformers",
        num_prompts=len(pairs),
        tokens_per_pass=num_tokens / num_passes,
        num_passes=num_passes,
        num_other_passes=num_drafts,
        accepted_share=(num_tokens - num_passes) / num_drafts if num_drafts else float("nan"),
        speedup=Spread.of([plain / fast for plain, fast in zip(plain_ms, ms, strict=True)]),
        ms_per_token=Spread.of(ms),
        plain_ms_per_token=Spread.of(plain_ms),
        extra_weight_bytes=other.draft_weight_bytes,
        extra_kv_bytes=longest * other.draft_kv_bytes_per_token,
        num_identical=sum(plain.ids == assisted.ids for plain, assisted in firsts),
    )


def _prompts(options: argparse.Namespace, model: SpaceModel) -> list[list[int]]:
    file = Checkpoint.open(options.model).folder / "tokenizer.json"
    if not file.is_file():
        raise FlagError(f"{file} does not exist. Save the tokenizer in its fast form, or run spaceserve convert.")
    longest = model.facts.window - options.max_tokens
    if longest < 1:
        raise FlagError(f"--max-tokens is {options.max_tokens}; it must be below the window of {model.facts.window}.")
    texts = built_in()[: options.limit] if options.prompts is None else load_prompts(options.prompts, options.limit)
    tokenizer = Tokenizer.from_file(str(file))
    return [tokenizer.encode(prompt.text).ids[-longest:] for prompt in texts]


def _facts(options: argparse.Namespace, model: SpaceModel, prompts: Sequence[Sequence[int]]) -> dict[str, object]:
    name = "built-in function heads" if options.prompts is None else options.prompts.name
    return {
        "model": options.model,
        "prompts": f"{name} ({len(prompts)}, {statistics.fmean(map(len, prompts)):.0f} tokens each)",
        "new tokens": options.max_tokens,
        "batch": 1,
        "rounds": options.rounds,
        "layout": options.layout,
        "dtype": str(model.facts.dtype).removeprefix("torch."),
        "device": str(model.facts.device),
        "machine": f"{machine()}; {model.facts.num_threads} threads of torch {torch.__version__}",
        "version": version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
