"""`python -m chaos EXPERIMENT …`: run one experiment, print its page, and exit with 0 if nothing went wrong, else 1."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from space_eval.bench.client import LoadError
from space_eval.bench.server_process import ServerError, unwind_when_told_to_end
from space_eval.report.tables import write_report

from chaos.harness import FlagError, Report
from chaos.machines import HostError

EXPERIMENTS = {
    "faults": "kill, stop and crash the workers under load",
    "hosts": "workers on hosts of their own: killed, cut off and restarted",
    "crowd": "slow readers beside fast ones, and ten times more requests than can be served",
    "soak": "mixed load for an hour: does memory, latency or anything else grow",
}
"""Each is a module of this package with `FLAGS` and `run`."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags are those of the experiment's FLAGS: name, default, help."""
    top = argparse.ArgumentParser(prog="chaos", description="Break a server under load; nothing may be lost.")
    experiments = top.add_subparsers(dest="experiment", required=True)
    for name, summary in EXPERIMENTS.items():
        module = importlib.import_module(f"chaos.{name}")
        parser = experiments.add_parser(name, help=summary, description=module.__doc__)
        parser.set_defaults(run=module.run)
        parser.add_argument("--model", default="demo", help="what is served: demo, a folder, a hub id [demo]")
        parser.add_argument("--seed", type=int, default=1, help="of all random choices [1]")
        parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"write {name}.json and {name}.md there")
        for flag, default, text in module.FLAGS:
            if default is False:
                parser.add_argument(flag, action="store_true", help=text)
            else:
                parser.add_argument(flag, type=type(default), default=default, metavar="N", help=f"{text} [{default}]")
        parser.add_argument("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")
    return top.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: nothing went wrong; 1: something did; 2: unusable flags."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        report: Report = options.run(options)
    except (ServerError, LoadError, HostError) as error:
        print(f"chaos {options.experiment}: {error}", file=sys.stderr)
        return 1
    except FlagError as error:
        print(f"chaos {options.experiment}: {error}", file=sys.stderr)
        return 2
    print(report.page())
    if options.out is not None:
        write_report(options.out, options.experiment, report.page(), report.record())
    return 0 if report.passed else 1


if __name__ == "__main__":
    unwind_when_told_to_end()
    sys.exit(main())
