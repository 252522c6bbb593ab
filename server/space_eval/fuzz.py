"""`python -m space_eval.fuzz`: hostile inputs by the hundred thousand. None may crash, hang, or be answered with a 500.

Every input is made by dice of its own, from the seed, the target's name and its number: a finding names these, and
`--only NAME --from NUMBER --count 1` tries that input again. Each target runs in a process of its own, so that a crash
is a finding, too, and the next input is tried in a fresh one.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from space_common.python_process import module_command

from space_eval.fuzz_target import Target, dice_of, short

COUNT = 101_000
SECONDS = 30.0
"""Longest that one input may take: three times what any limit inside allows."""
SETTLE_EVERY = 1000
MOST_FINDINGS = 20
MOST_CRASHES = 5
MOST_MEMORY = 16 * 1024**3
"""Bytes of address space of a target's process: what asks for more finds that there is none."""


def _http_bodies() -> Target:
    from space_eval.fuzz_http import HttpBodies

    return HttpBodies()


def _http_bytes() -> Target:
    from space_eval.fuzz_http import HttpBytes

    return HttpBytes()


def _grpc_messages() -> Target:
    from space_eval.fuzz_grpc import GrpcMessages

    return GrpcMessages()


def _worker_commands() -> Target:
    from space_eval.fuzz_worker import WorkerCommands

    return WorkerCommands()


def _worker_reports() -> Target:
    from space_eval.fuzz_grpc import WorkerReports

    return WorkerReports()


def _checkpoints() -> Target:
    from space_eval.fuzz_checkpoint import Checkpoints

    return Checkpoints()


def _templates() -> Target:
    from space_eval.fuzz_text import Templates

    return Templates()


def _grammars() -> Target:
    from space_eval.fuzz_text import Grammars

    return Grammars()


TARGETS: Mapping[str, tuple[float, Callable[[], Target]]] = {
    "http-bodies": (0.30, _http_bodies),
    "http-bytes": (0.26, _http_bytes),
    "grpc-messages": (0.05, _grpc_messages),
    "worker-reports": (0.14, _worker_reports),
    "worker-commands": (0.08, _worker_commands),
    "templates": (0.07, _templates),
    "grammars": (0.09, _grammars),
    "checkpoints": (0.005, _checkpoints),
}
"""Share of the inputs, and how the target is made: in its own process, for each needs other parts of the house."""


@dataclass
class Tally:
    """What became of one target's inputs."""

    target: str
    num_inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def add(self, other: Mapping[str, Any]) -> None:
        """What one process of this target told."""
        told = Tally(**{**other, "outcomes": Counter(other["outcomes"])})
        self.num_inputs += told.num_inputs
        self.seconds += told.seconds
        self.outcomes += told.outcomes
        self.findings += told.findings

    def line(self) -> str:
        outcomes = ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common(8))
        figures = f"{self.num_inputs:7} inputs {self.seconds:7.1f} s  {len(self.findings)} findings"
        return f"{self.target:16} {figures}  {outcomes}"


async def try_all(name: str, seed: int, first: int, count: int, began: Callable[[int], None]) -> Tally:
    """In this process. `began` is told the number of every input before it is tried."""
    tally = Tally(name)
    begun = time.monotonic()
    async with TARGETS[name][1]() as target:
        for number in range(first, first + count):
            began(number)
            try:
                async with asyncio.timeout(SECONDS):
                    outcome = await target.try_one(dice_of(seed, name, number))
            except Exception as error:
                where = f"--seed {seed} --only {name} --from {number} --count 1"
                tally.findings.append(short(f"{where}: {type(error).__name__}: {error}", 1500))
                outcome = "FOUND"
            tally.num_inputs += 1
            tally.outcomes[outcome] += 1
            if tally.num_inputs % SETTLE_EVERY == 0 or number == first + count - 1:
                try:
                    await target.settle()
                except Exception as error:
                    tally.findings.append(short(f"after input {number}: {type(error).__name__}: {error}", 1500))
            if len(tally.findings) >= MOST_FINDINGS:
                break
    tally.seconds = time.monotonic() - begun
    return tally


def _here(options: argparse.Namespace) -> int:
    """One target, in this process; the tally goes to a file as JSON, with the number of the input that is tried."""
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)
    logging.disable(logging.CRITICAL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, hard))
    with options.progress.open("wb", buffering=0) as progress:

        def began(number: int) -> None:
            os.pwrite(progress.fileno(), number.to_bytes(8, "little"), 0)
            signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)

        tally = asyncio.run(try_all(options.only, options.seed, options.first, options.count, began))
        signal.setitimer(signal.ITIMER_REAL, 0)
    options.tally.write_text(json.dumps(vars(tally)))
    return 0


def run_target(name: str, seed: int, first: int, count: int) -> Tally:
    """In processes of its own, one after another where one crashes or hangs."""
    tally = Tally(name)
    end, num_crashes = first + count, 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        progress, told = Path(folder) / "progress", Path(folder) / "tally.json"
        while first < end and num_crashes < MOST_CRASHES and len(tally.findings) < MOST_FINDINGS:
            words = ["--only", name, "--seed", seed, "--from", first, "--count", end - first]
            command = module_command("space_eval.fuzz", *words)
            command += ["--progress", str(progress), "--tally", str(told)]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode == 0:
                tally.add(json.loads(told.read_text()))
                break
            num_crashes += 1
            number = int.from_bytes(progress.read_bytes()[:8], "little") if progress.exists() else first
            how = "hung" if done.returncode == -signal.SIGALRM else f"ended with {done.returncode}"
            where = f"--seed {seed} --only {name} --from {number} --count 1"
            tally.findings.append(short(f"{where}: the process {how}: {done.stderr[-900:]}", 1500))
            tally.num_inputs += number + 1 - first
            first = number + 1
    return tally


def shares(count: int, names: Sequence[str]) -> dict[str, int]:
    """How many inputs each target gets, at least one."""
    whole = sum(TARGETS[name][0] for name in names)
    return {name: max(1, round(count * TARGETS[name][0] / whole)) for name in names}


def main(arguments: Sequence[str]) -> int:
    """1 with findings."""
    parser = argparse.ArgumentParser(prog="python -m space_eval.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="inputs in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all dice (default: %(default)s)")
    parser.add_argument("--only", choices=list(TARGETS), help="one target")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="NUMBER", help="the first input")
    parser.add_argument("--report", type=Path, help="write the tallies there, as JSON")
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tally", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tally is not None:
        return _here(options)
    names = list(TARGETS) if options.only is None else [options.only]
    tallies = []
    for name, count in shares(options.count, names).items():
        tallies.append(run_target(name, options.seed, options.first, count))
        print(tallies[-1].line(), flush=True)
        for finding in tallies[-1].findings:
            print(f"    {finding}", flush=True)
    total, found = sum(one.num_inputs for one in tallies), sum(len(one.findings) for one in tallies)
    print(f"{total} inputs with seed {options.seed}: {found} findings")
    if options.report is not None:
        options.report.write_text(json.dumps([vars(one) for one in tallies], indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
