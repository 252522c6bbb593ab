"""`python -P -m gpu`: everything that only a GPU can show, in one command and one report.

Each stage consists of slices: runs of pytest in processes of their own, each with a limit of at most four minutes. They
write down their results as they go. report.md and report.json have the machine, every slice's outcome, and each target
beside what was measured. Slices that are run one by one into the same folder make one report, as long as machine,
commit and kind of run are the same; --resume leaves out those that have passed, and --plan lists what would be run.

Exit status: 0; 1 if a stage failed or ran out of time; 2 for unusable flags. A target that is missed is in the report,
and no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import torch
from space_common.process import module_command, safe_environment

from gpu.report import CHECK, Catalogue, Record, Report, written
from gpu.stages import ALL_STAGES, FAST_STAGES, ROOT, Slice, Stage, num_processes

HERE = Path(__file__).parent
MINUTES, DRY_MINUTES = 100.0, 10.0
LEAST_SECONDS = 20.0  # a stage for which less time is left is not begun

_SHOWN = 25


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(CHECK, "python -P -m gpu", __doc__ or "", Path("runs/gpu-check"), fast=FAST_STAGES)
    return run_catalogue(CHECK, parser, parser.parse_args(argv), fast=FAST_STAGES)


def parser_of(
    catalogue: Catalogue, prog: str, description: str, out: Path, *, fast: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The flags of a command that runs a catalogue's stages. `fast`: those that the name `fast` stands for, if any."""
    stages = catalogue.stages
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n" + "\n".join(f"  {name:<18} {stage.title}" for name, stage in stages.items()),
    )
    parser.add_argument("--dry", action="store_true", help="every stage at tiny sizes on the CPU: figures mean nothing")
    parser.add_argument("--out", type=Path, default=out, help="folder of the report [%(default)s]")
    slices = [str(one) for name in stages for one in Slice.all_of(name) if one.count > 1]
    parser.add_argument(
        "--stages",
        nargs="+",
        default=[],
        metavar="STAGE",
        choices=[*stages, *slices, *(["fast"] if fast else [])],
        help=f"only these, or these slices ({slices[1]}) [all]",
    )
    parser.add_argument("--resume", action="store_true", help="leave out slices that have passed")
    parser.add_argument("--plan", action="store_true", help="list the slices and their limits; run nothing")
    parser.add_argument("--minutes", type=float, help=f"of all stages together [{MINUTES:g}; dry {DRY_MINUTES:g}]")
    parser.add_argument("--commit", help="of a copy that is no checkout")
    return parser


def run_catalogue(
    catalogue: Catalogue,
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    *,
    fast: Sequence[str] = (),
    words: Sequence[object] = (),
) -> int:
    """Run the slices that `options` ask for and write the report. `words`: further ones of pytest. The exit status."""
    if not (options.dry or options.plan) and not torch.cuda.is_available():
        parser.error("there is no CUDA device here (or this torch has none); --dry runs every stage on the CPU")
    stages = catalogue.stages
    asked = {name for word in options.stages for name in (fast if word == "fast" else (word,))} or set(stages)
    minutes = options.minutes or (DRY_MINUTES if options.dry else MINUTES)
    report = Report(options.out.resolve(), dry=options.dry, commit_given=options.commit, catalogue=catalogue)
    in_one = options.dry and not options.plan
    found = {one for name in asked for one in Slice.named(name, dry=in_one)}
    chosen = [one for name in stages for one in Slice.all_of(name, dry=in_one) if one in found]
    if options.resume:
        passed = {name for name, record in report.records().items() if record.outcome == "passed"}
        chosen = [one for one in chosen if str(one) not in passed]
    if options.plan:
        print("\n".join(plan(chosen)))
        return 0
    if options.dry:
        whole = [one for name in dict.fromkeys(one.stage for one in chosen) for one in Slice.all_of(name)]
        print("\n".join(["on a GPU:", *plan(whole)]), file=sys.stderr)
    records = check(chosen, report, minutes, words)
    for record in records.values():
        print(f"{record.stage:<20} {record.outcome:<10} {written(record.seconds, 's'):>8}  {record.why}")
    print(f"wrote {report.folder}/report.md and report.json", file=sys.stderr)
    return int(any(record.outcome in ("failed", "timed out") for record in records.values()))


def plan(slices: Sequence[Slice]) -> list[str]:
    """Lines: each slice's name, limit and title, and the limit of all together."""
    stages = [ALL_STAGES[one.stage] for one in slices]
    limits = [stage.seconds for stage in stages]
    lines = [f"{one!s:<20} ≤ {stage.seconds:3.0f} s  {stage.title}" for one, stage in zip(slices, stages, strict=True)]
    return [*lines, f"{len(slices)} slices: ≤ {sum(limits) / 60:.0f} minutes"]


def check(slices: Sequence[Slice], report: Report, minutes: float, words: Sequence[object] = ()) -> dict[str, Record]:
    """Run slices and write the report after each; the records that the folder then has. `words`: see `run_slice`."""
    report.folder.mkdir(parents=True, exist_ok=True)
    for one in slices:
        (report.folder / f"{one}.json").unlink(missing_ok=True)
    until = time.monotonic() + 60 * minutes

    def run(one: Slice) -> None:
        stage = ALL_STAGES[one.stage]
        print(f"== {one}: {stage.title}", file=sys.stderr, flush=True)
        run_slice(one, stage, report, until - time.monotonic(), words)

    # Figures want the machine for themselves; those of a dry run mean nothing.
    with ThreadPoolExecutor(2 if report.dry else 1) as pool:
        for _ in pool.map(run, slices):
            report.write()
    return report.records()


def run_slice(one: Slice, stage: Stage, report: Report, seconds: float, more: Sequence[object] = ()) -> Record:
    """Run a slice in a process of its own, for at most so many seconds; its record, however it ended. `more`: words for
    pytest beside those that every stage has."""
    file = report.folder / f"{one}.json"
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    blank = Record(str(one), report.dry, report.machine, date)
    if seconds < LEAST_SECONDS or stage.missing():
        blank.outcome = "not run"
        blank.why = stage.missing() or f"{max(0.0, seconds):.0f} s were left; raise --minutes"
        blank.save(file)
        return blank
    blank.save(file)
    limit = min(stage.seconds, seconds)
    added, begun = {}, time.monotonic()
    with TemporaryDirectory(prefix="gpu-check") as folder:
        results = Path(folder) / "results.xml"
        if stage.suite is None:
            node = f"{HERE / stage.file}::test_{one.stage.replace('-', '_')}"
            words = [node, "-s", "-m", "gpu", "--out", report.folder, "--seconds", f"{limit:.1f}", *more]
            words += [
                "--slice",
                f"{one.number}/{one.count}",
                "--commit",
                report.facts["commit"],
            ]  # else its record is another machine's
            words += ["--dry"] if report.dry else []
        else:
            words = [*one.words(stage.suite(report.dry)), "--junitxml", results]
            added = {"OMP_NUM_THREADS": "2"}  # of the references, in as many processes as half of the cores
            if not report.dry and importlib.util.find_spec("xdist") is not None:
                words += ["-n", num_processes()]
        status = _run(["-q", "-p", "no:cacheprovider", "-p", "gpu.stages", *words], limit, dry=report.dry, added=added)
        record = Record.read(file) or blank
        if stage.suite is not None and status is not None:
            _add_results(record, one.stage, results, status)
    record.machine, record.date, record.seconds = report.machine, date, time.monotonic() - begun
    if status is None:
        record.outcome, record.why = "timed out", f"stopped after {limit:.0f} s; what it had found until then stands"
    elif record.outcome == "running":
        record.outcome, record.why = "failed", f"its process ended with status {status}"
    record.save(file)
    return record


def _run(words: Sequence[object], limit: float, *, dry: bool, added: Mapping[str, str]) -> int | None:
    """Exit status of pytest with these words; None where it had to be stopped."""
    path = [str(ROOT / "tests" / "support"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = safe_environment({"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"})
    environment |= {"TQDM_DISABLE": "1", **added}
    environment.pop("TRITON_INTERPRET", None)
    if dry:  # sees no GPU; tests/conftest.py then has Triton's kernels interpreted
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        module_command("pytest", *words), cwd=ROOT, env=environment, stdout=sys.stderr, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # the process, and all that it started, which share its session
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 30.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def _add_results(record: Record, stage: str, results: Path, status: int) -> None:
    cases = list(ElementTree.parse(results).iter("testcase")) if results.is_file() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    record.figures[f"{stage}: tests that passed"] = (len(cases) - len(failed) - skipped, "")
    record.figures[f"{stage}: tests that failed"] = (len(failed), "")
    record.notes += [f"{case.get('classname')}::{case.get('name')}" for case in failed[:_SHOWN]]
    is_bad = bool(failed) or status not in (0, 5)
    record.outcome = "failed" if is_bad else "passed"
    record.why = f"{len(failed)} of {len(cases)} tests failed, exit status {status}" if is_bad else ""


if __name__ == "__main__":
    sys.exit(main())
