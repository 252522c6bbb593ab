"""The measurements by name, and the command line that they share."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from space_eval.bench.server_process import ServerError
from space_model.model_error import ModelError

from perf.harness import PerfError

MEASUREMENTS: Mapping[str, tuple[str, str]] = {
    "overhead": ("perf.overhead", "what mask rows cost, and the batch at which each draft layout stops paying"),
    "host-time": ("perf.host_time", "what a step of the worker takes besides model computation, by part"),
    "matmul": ("perf.matmul", "the CPU's matmul of few rows, beside memory's speed and torch's own"),
    "memory": ("perf.memory", "what SPACE takes in memory, beside a server with a draft model"),
    "edge": ("perf.edge", "one core and 1 GiB: whether all texts are exact, and what the server takes"),
    "scheduler": ("perf.scheduler", "what a step costs the router, by queued requests and by pages"),
    "streams": ("perf.streams", "what one router adds and costs, from one stream to a thousand"),
    "engines": ("perf.engines.compare", "other inference engines beside ours, in one run on the same weights"),
}
"""A module with `add_arguments` and `run`, loaded when it is asked for, and what it measures."""


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """All measurements, and the flags of the one that `arguments` begin with."""
    top = argparse.ArgumentParser(prog="python tests/perf", description=__doc__)
    commands = top.add_subparsers(dest="name", required=True)
    for name, (path, summary) in MEASUREMENTS.items():
        if name != next(iter(arguments), None):
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(path)
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.add_argument("--out", type=Path, metavar="FOLDER", help=f"write {name}.md and {name}.json there")
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one measurement. Exit status 0; 1 where a result is wrong or a server failed; 2 for unusable flags."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser(given).parse_args(given)
    try:
        report = options.run(options)
    except (PerfError, ModelError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    print(report.markdown(), end="")
    if options.out is not None:
        report.write(options.out, options.name)
        print(f"{options.name}: wrote {options.out / options.name}.md and .json", file=sys.stderr)
    return 1 if report.failures else 0
