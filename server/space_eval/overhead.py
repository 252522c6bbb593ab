"""`spaceserve bench overhead`: what masks cost, by batch and layout, and the batch at which they stop paying.

The worker is stepped in this process, without a server: plain decoding, fixed layouts and what the server would choose
take turns on the same weights, pages and prompts.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from space_common.version import version
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_model.model_error import ModelError
from space_model.space_model import SpaceModel
from space_server.__main__ import choose_threads
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance, parse_chances
from space_server.startup.calibration import SECONDS
from tokenizers import Tokenizer
from tqdm import tqdm

from space_eval.bench.facts import commit, machine
from space_eval.flag_values import whole
from space_eval.overhead_arms import PLAIN, PRUNED, Arm, arms
from space_eval.overhead_curve import MOST_ROWS, measure_pass
from space_eval.overhead_report import Measured, Subject, draw, row, to_markdown, write
from space_eval.overhead_turns import TAIL, Bench, Load, OverheadError, Turn
from space_eval.plots import PlotError
from space_eval.prompts import built_in

DEMO = "demo"

_EPILOG = """\
examples:
  spaceserve bench overhead --quick                          the embedded model and its own drafts, a minute or two
  spaceserve bench overhead --out overhead                   all batches from 1 to 64, with tables and a figure
  spaceserve bench make-model --size 125m llama-125m         a larger model, with random weights
  spaceserve bench overhead --model llama-125m --synthetic-acceptance .78 --synthetic-acceptance .57 --out overhead

Synthetic acceptance says what trained masks would bring at a given rate of acceptance: drafts are the text's own
continuation, each replaced by a wrong id so often that the rate comes out. Every table says so in its title, and the
trained embedded model's own row stands beside.
"""


class FlagError(ValueError):
    """A flag that cannot be used; the message names flag, value and cure."""


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    pruned: tuple[tuple[int, int], ...]
    num_rounds: int
    max_tokens: int
    most_steps: int  # timed, of a turn
    temperature: float
    prompt_tokens: int
    seed: int
    calibration_seconds: float
    by_cost: bool = False


NORMAL = Settings((1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 5), PRUNED, 9, 64, 24, 0.0, 64, 0, SECONDS)
QUICK = Settings((1, 4, 16), (1, 3), ((5, 12),), 3, 24, 8, 0.0, 32, 0, SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 1 where it failed, 2 for unusable flags or models."""
    options = _parser().parse_args(argv)
    try:
        settings, subjects = _settings(options), _subjects(options)
        most_threads = torch.get_num_threads()  # before a model for which one is enough
        measured = [_measure(subject, settings, options, most_threads) for subject in subjects]
    except (FlagError, ModelError) as error:
        return _fail(2, str(error))
    except OverheadError as error:
        return _fail(1, str(error))
    print(to_markdown(measured))
    if options.out is not None:
        try:
            files = write(options.out, measured)
            files += draw(options.out, measured)
        except OSError as error:
            return _fail(1, f"{options.out} cannot be written: {error.strerror or error}.")
        except PlotError as error:
            print(f"spaceserve bench overhead: no figure: {error}", file=sys.stderr)
        for file in files:
            print(f"spaceserve bench overhead: wrote {file}", file=sys.stderr)
    return 0


def _measure(subject: Subject, settings: Settings, options: argparse.Namespace, most_threads: int) -> Measured:
    own = options.model == subject.model
    model = load_model(
        subject.model,
        dtype=options.dtype if own else "auto",
        device=options.device if own else "auto",
        num_threads=(options.num_threads if own else None) or choose_threads(subject.model) or most_threads,
    )
    most_masks = model.facts.most_masks
    if not most_masks:
        raise FlagError(
            f"{subject.model} has no masks: there is nothing to lay out. Give it some with spaceserve train, or make a "
            "model that has: spaceserve bench make-model."
        )
    chosen = arms(settings.ks, settings.pruned, most_masks=most_masks)
    return measure(model, subject, settings, chosen, lambda: _prompts(model, subject.model, settings))


def measure(
    model: SpaceModel,
    subject: Subject,
    settings: Settings,
    chosen: Sequence[Arm],
    prompts: Callable[[], list[list[int]]],
) -> Measured:
    """All batches of one subject. Raises OverheadError."""
    facts = model.facts
    synthetic = None
    if subject.chances is not None:
        synthetic = SyntheticAcceptance(
            subject.chances, vocab_size=facts.vocab_size, mask_ids=facts.mask_ids, seed=settings.seed
        )
    most = max(settings.batches)
    cost = measure_pass(model, most_rows=min(MOST_ROWS, 36 * most))
    bench = Bench(
        model,
        Load(prompts(), settings.max_tokens, settings.temperature),
        chosen,
        most_sequences=most,
        synthetic=synthetic,
        calibration_seconds=settings.calibration_seconds,
        by_cost=settings.by_cost,
    )
    rows = []
    num_turns = len(settings.batches) * (settings.num_rounds + 1) * len(chosen)
    with tqdm(total=num_turns, desc=subject.title, unit="turn", file=sys.stderr, disable=None) as progress:
        for batch in settings.batches:
            bench.learn_texts(batch)
            turns: dict[str, list[Turn]] = {arm.name: [] for arm in chosen}
            for number in range(
                settings.num_rounds + 1
            ):  # the first one warms up, lets auto find its layout, and is not counted
                gc.collect()
                for arm in chosen if number % 2 else reversed(chosen):
                    steps = 3 if number == 0 and arm.rule is not None else settings.most_steps
                    turn = bench.turn(arm, batch, most_steps=steps)
                    if number:
                        turns[arm.name].append(turn)
                    progress.update()
            rows += [row(turns[arm.name], turns[PLAIN], cost) for arm in chosen]
    return Measured(subject, _facts(model, subject, settings), cost, rows)


def _facts(model: SpaceModel, subject: Subject, settings: Settings) -> dict[str, object]:
    facts = model.facts
    said: dict[str, object] = {"drafts": subject.title.partition(", ")[2]}
    return said | {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version(),
        "commit": commit(),
        "machine": machine(),
        "model": f"{Path(facts.name).name}, {str(facts.dtype).removeprefix('torch.')} on {facts.device}, "
        f"{facts.num_threads} threads, {facts.most_masks} masks, {'a' if facts.has_draft_head else 'no'} draft head",
        "load": f"prompts of {settings.prompt_tokens} tokens, {settings.max_tokens} more each, "
        f"temperature {settings.temperature:g}, {settings.num_rounds} rounds of up to {settings.most_steps} steps",
        "time": "of each step what was measured at the start for its size; all of it is called host"
        if settings.by_cost
        else "by the clock",
    }


def _prompts(model: SpaceModel, name: str, settings: Settings) -> list[list[int]]:
    """One for each sequence, all different, all equally long: function heads, each the end of a text of several."""
    longest = model.facts.window - settings.max_tokens - TAIL
    if settings.prompt_tokens > longest:
        raise FlagError(f"--prompt-tokens is {settings.prompt_tokens}; with --max-tokens it is at most {longest}.")
    file = Checkpoint.open(name).folder / "tokenizer.json"
    if not file.is_file():
        raise FlagError(f"{file} does not exist. Save the tokenizer in its fast form, or run spaceserve convert.")
    tokenizer = Tokenizer.from_file(str(file))
    heads = [tokenizer.encode(prompt.text).ids for prompt in built_in()]
    prompts = []
    for n in range(max(settings.batches)):
        ids = list(heads[n % len(heads)])
        mark = tokenizer.encode(f"# {n}\n").ids
        while len(ids) < settings.prompt_tokens:
            ids = [*heads[(n + len(ids)) % len(heads)], *mark, *ids]
        prompts.append([*mark, *ids[-settings.prompt_tokens :]][-settings.prompt_tokens :])
    return prompts


def _subjects(options: argparse.Namespace) -> list[Subject]:
    """What is measured; beside synthetic acceptance always the embedded model with its own drafts."""
    if not options.synthetic_acceptance:
        return [Subject(options.model, None)]
    return [Subject(DEMO, None), *(Subject(options.model, chances) for chances in options.synthetic_acceptance)]


def _settings(options: argparse.Namespace) -> Settings:
    base = QUICK if options.quick else NORMAL

    def given(name: str) -> object:
        value = getattr(options, name)
        return getattr(base, name) if value is None else value

    names = (
        "batches",
        "ks",
        "num_rounds",
        "max_tokens",
        "most_steps",
        "temperature",
        "prompt_tokens",
        "seed",
        "calibration_seconds",
    )
    values = {name: given(name) for name in names}
    pruned = base.pruned if options.ks is None else tuple((k, kept) for k, kept in PRUNED if k in options.ks)
    return Settings(pruned=pruned, by_cost=options.by_cost, **values)  # type: ignore[arg-type]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench overhead",
        description="Steps the worker in this process and says what mask rows cost: rows, step time by part, tokens "
        "per second against plain decoding, and the batch at which each layout stops paying.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEMO, help="folder of a checkpoint, hub id, or demo [demo]")
    parser.add_argument(
        "--synthetic-acceptance",
        type=_chances,
        action="append",
        metavar="P",
        help=".78, .57, or five chances by mask depth; repeatable [the model's own drafts]",
    )
    parser.add_argument("--quick", action="store_true", help="fewer batches, layouts, rounds and tokens: does it work?")
    parser.add_argument("--batch", type=_numbers, dest="batches", metavar="B,…", help="sequences [1,2,4,8,16,32,64]")
    parser.add_argument("--k", type=_numbers, dest="ks", metavar="K,…", help="drafts of fixed layouts [1,2,3,5]")
    parser.add_argument("--rounds", type=whole, dest="num_rounds", help="in which all layouts take turns [9]")
    parser.add_argument("--max-tokens", type=whole, help="timed, of each sequence [64]")
    parser.add_argument("--steps", type=whole, dest="most_steps", help="most steps of a turn [24]")
    parser.add_argument("--prompt-tokens", type=whole, help="of each sequence [64]")
    parser.add_argument("--temperature", type=float, help="0 is greedy [0]")
    parser.add_argument("--seed", type=int, help="of synthetic acceptance [0]")
    parser.add_argument(
        "--calibration-seconds",
        type=float,
        help="of measuring what steps cost, for auto, as a server does at its start [as there]",
    )
    parser.add_argument(
        "--by-cost",
        action="store_true",
        help="a step takes what that measuring found for its size, not what the clock says: which layout is best, and "
        "whether auto finds it, on a machine whose speed changes meanwhile",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 [auto]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, … [auto]")
    parser.add_argument("--num-threads", type=whole, help="of a product [as the server chooses]")
    parser.add_argument("--out", type=Path, help="folder for overhead.json, overhead.md and figures [table only]")
    return parser


def _chances(text: str) -> tuple[float, ...]:
    try:
        return parse_chances(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({whole(word.strip()) for word in text.split(",")}))


def _fail(status: int, reason: str) -> int:
    print(f"spaceserve bench overhead: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
