"""`python -m space_eval.gpu_check`: everything that only a GPU can show, in one command and one report.

Each stage runs in a process of its own with a time limit, and writes down what it finds as it goes. report.md and
report.json have the machine, every stage's outcome, and each target beside what was measured. Stages that are run one
by one into the same folder make one report, as long as machine, commit and kind of run are the same.

Exit status: 0; 1 if a stage failed or ran out of time; 2 for words that make no sense here. A target that is missed is
in the report, and no failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from space_eval.gpu_machine import gpu_facts
from space_eval.gpu_record import Record
from space_eval.gpu_report import summary, write
from space_eval.gpu_stages import BY_NAME, FAST_STAGES, STAGES, Stage, chosen, run_stage

MINUTES, DRY_MINUTES = 75.0, 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m space_eval.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n" + "\n".join(f"  {stage.name:<16} {stage.title}" for stage in STAGES),
    )
    parser.add_argument("--dry", action="store_true", help="every stage at tiny sizes on the CPU: figures mean nothing")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu-check"), help="folder of the report [runs/gpu-check]"
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        default=[],
        metavar="STAGE",
        choices=[*BY_NAME, "fast"],
        help="only these; fast: in a test",
    )
    parser.add_argument("--minutes", type=float, help=f"of all stages together [{MINUTES:g}; dry {DRY_MINUTES:g}]")
    parser.add_argument("--commit", help="of a copy that is no checkout")
    options = parser.parse_args(argv)
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device here (or this torch has none); --dry runs every stage on the CPU")
    names = [name for asked in options.stages for name in (FAST_STAGES if asked == "fast" else (asked,))]
    minutes = options.minutes or (DRY_MINUTES if options.dry else MINUTES)
    records = check(chosen(names), options.out, dry=options.dry, minutes=minutes, commit=options.commit)
    print(summary(records))
    return int(any(record.outcome in ("failed", "timed out") for record in records.values()))


def check(
    stages: Sequence[Stage], folder: Path, *, dry: bool, minutes: float, commit: str | None = None
) -> dict[str, Record]:
    """Run the stages and write the report, after each of them; what each found, and what the folder had of others."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = gpu_facts(dry=dry, said_commit=commit)
    machine = f"{facts['device']}, {facts['commit']}"
    records = {record.stage: record for record in _known(folder, machine, dry=dry)}
    for stage in stages:
        records.pop(stage.name, None)
    titles = {stage.name: stage.title for stage in STAGES}
    until = time.monotonic() + 60 * minutes

    def run(stage: Stage) -> Record:
        print(f"== {stage.name}: {stage.title}", file=sys.stderr, flush=True)
        return run_stage(stage, folder, dry=dry, machine=machine, seconds=until - time.monotonic())

    # Figures want the machine for themselves; a dry run has none that mean anything.
    with ThreadPoolExecutor(2 if dry else 1) as pool:
        for record in pool.map(run, stages):
            records[record.stage] = record
            written = {name: records[name] for name in titles if name in records}
            paths = write(folder, facts, titles, written, dry=dry)
    for path in paths if stages else ():
        print(f"wrote {path}", file=sys.stderr)
    return {name: records[name] for name in titles if name in records}


def _known(folder: Path, machine: str, *, dry: bool) -> Iterator[Record]:
    """What earlier runs of the same kind left, with this machine and commit."""
    for stage in STAGES:
        record = Record.read(folder / f"{stage.name}.json")
        if record is not None and record.dry == dry and record.machine == machine:
            yield record


if __name__ == "__main__":
    sys.exit(main())
