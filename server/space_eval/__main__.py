"""`spaceserve eval COMMAND …`: measure a checkpoint. Each command is a module with `add_arguments` and `run`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from space_model.model_error import ModelError

from space_eval.bench.server_process import exit_on_sigterm
from space_eval.flags import EvalError, check_out

COMMANDS = {
    "acceptance": ("space_eval.acceptance.command", "tokens per step by k and temperature, loops apart"),
    "drafts": ("space_eval.acceptance.drafts", "accepted drafts per step over given texts, without decoding"),
    "speed": (
        "space_eval.acceptance.speed",
        "plain decoding against SPACE in seconds, and transformers' assisted decoding",
    ),
    "quality": ("space_eval.quality.command", "HumanEval pass@k, ROUGE-L, bits per byte, against a base"),
    "equivalence": ("space_eval.acceptance.equivalence", "prove that drafts change no text"),
    "paper": ("space_eval.paper.command", "the paper's Table 1, the published figures beside ours"),
}
"""Module (imported on use) and summary of each command."""

MOVED = {
    "crowd": "in a checkout: `make crowd FLAGS=…`",
    "explain": "`spaceserve eval acceptance` shows acceptance by position",
    "faults": "in a checkout: `make faults FLAGS=…`",
    "hosts": "in a checkout: `make hosts FLAGS=…`",
    "recipes": "its results are in router/guides/BENCHMARKS.md, under Training",
    "verdicts": "see router/guides/BENCHMARKS.md; `pytest tests/exactness` enumerates the verification rules",
}
"""Commands that were removed, and what to use instead."""


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser of all commands, with the flags of the one that `arguments` start with."""
    top = argparse.ArgumentParser(prog="spaceserve eval", description="Measure a checkpoint.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, (path, summary) in COMMANDS.items():
        if name != next(iter(arguments), None):
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(path)
        description = getattr(module, "DESCRIPTION", (module.__doc__ or "").splitlines()[0])
        kind = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=summary, description=description, formatter_class=kind)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0, or 2 after one line of explanation."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in MOVED:
        print(f"spaceserve eval {given[0]} was removed; {MOVED[given[0]]}", file=sys.stderr)
        return 2
    try:
        options = parser(given).parse_args(given)
        if options.out is not None:
            check_out(options.out)  # now, and not when everything has been measured
        status: int = options.run(options)
    except (EvalError, ModelError) as error:
        print(f"spaceserve eval: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        print(f"spaceserve eval: {missing.name} is not installed: pip install 'spaceserve[train]'", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
