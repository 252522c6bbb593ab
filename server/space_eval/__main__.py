"""`spaceserve eval COMMAND …`: measure a checkpoint."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from space_common.process import exit_on_sigterm, sleep_soon
from space_model.model_error import ModelError

from space_eval.acceptance.options import add_acceptance, add_drafts, add_equivalence, add_speed
from space_eval.flags import EvalError, check_out
from space_eval.paper.options import add_paper
from space_eval.quality.options import add_quality


@dataclass(frozen=True)
class Evaluation:
    """A command."""

    module: str  # has `run(options)`; imported after the flags are parsed, because it imports torch
    add_arguments: Callable[[argparse.ArgumentParser], None]
    summary: str


COMMANDS = {
    "acceptance": Evaluation(
        "space_eval.acceptance.command", add_acceptance, "tokens per step by k and temperature, loops apart"
    ),
    "drafts": Evaluation(
        "space_eval.acceptance.drafts", add_drafts, "accepted drafts per step over given texts, without decoding"
    ),
    "speed": Evaluation(
        "space_eval.acceptance.speed",
        add_speed,
        "plain decoding against SPACE in seconds, and transformers' assisted decoding",
    ),
    "quality": Evaluation(
        "space_eval.quality.command", add_quality, "HumanEval pass@k, ROUGE-L, bits per byte, against a base"
    ),
    "equivalence": Evaluation("space_eval.acceptance.equivalence", add_equivalence, "prove that drafts change no text"),
    "paper": Evaluation(
        "space_eval.paper.command", add_paper, "the paper's Table 1, the published figures beside ours"
    ),
}

MOVED = {
    "crowd": "in a checkout: `make crowd FLAGS=…`",
    "explain": "`spaceserve eval acceptance` shows acceptance by position",
    "faults": "in a checkout: `make faults FLAGS=…`",
    "hosts": "in a checkout: `make hosts FLAGS=…`",
    "recipes": "its results are in router/guides/BENCHMARKS.md, under Training",
    "verdicts": "see router/guides/BENCHMARKS.md; `pytest tests/exactness` enumerates the verification rules",
}
"""Commands that were removed, and what to use instead."""


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    top = argparse.ArgumentParser(prog="spaceserve eval", description="Measure a checkpoint.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, evaluation in COMMANDS.items():
        command = commands.add_parser(
            name, help=evaluation.summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        evaluation.add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0, or 2 after one line of explanation."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in MOVED:
        print(f"spaceserve eval {given[0]} was removed; {MOVED[given[0]]}", file=sys.stderr)
        return 2
    try:
        options = parser().parse_args(given)
        if options.out is not None:
            check_out(options.out)  # now, and not when everything has been measured
        status: int = importlib.import_module(COMMANDS[options.command].module).run(options)
    except (EvalError, ModelError) as error:
        print(f"spaceserve eval: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        print(f"spaceserve eval: {missing.name} is not installed: pip install 'spaceserve[train]'", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sleep_soon(os.environ)  # before torch loads OpenMP
    exit_on_sigterm()
    sys.exit(main())
