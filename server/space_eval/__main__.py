"""`spaceserve eval COMMAND …`: measure a checkpoint. Each command is a module with `add_arguments` and `run`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from space_model.model_error import ModelError

from space_eval.prompts import PromptError

COMMANDS = {
    "acceptance": "space_eval.acceptance_command",
    "quality": "space_eval.quality",
    "paper": "space_eval.paper",
    "speed": "space_eval.speed",
    "verdicts": "space_eval.verdicts",
    "explain": "space_eval.explain",
    "equivalence": "space_eval.equivalence_command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status 0, or 2 with one line of explanation."""
    top = argparse.ArgumentParser(prog="spaceserve eval", description="Measure a checkpoint.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(
            name,
            help=summary[:1].lower() + summary[1:].rstrip("."),
            description=getattr(module, "DESCRIPTION", summary),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = top.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (PromptError, ModelError) as error:
        print(f"spaceserve eval: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
