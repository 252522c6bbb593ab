"""`python -P -m gpu.side_by_side`: other engines beside ours, on the same GPU, in the same run.

For each engine that is installed, its server and ours are started beside each other on the one device, with the same
weights (random, of Llama-3.1-8B's shape), and asked over HTTP by the same client. They take turns, in reverse order in
every other round, and while one computes, the other is idle. Medians, their spread and ratios of one round each are in
report.md and report.json, with what is wanted beside them. Measured are: plain decoding at 1 to 256 streams, and ours
with drafts in the same turns; drafts at 1 to 128 streams, where the other engine has an EAGLE-3 head's shape and is
started once for each k of 1, 2, 3 and 5, of which the best counts; the first token of 1 × 2048, 8 × 2048, 32 × 512 and
1 × 50 prompt tokens. Drafts of all are accepted at the same synthetic rates: .84, .81, .78, .75, .72.

An engine is looked for in this interpreter, or in the one that --peer names. One that is missing is named with the line
that installs it; one that dies, or does not answer in time, is reported, and all else goes on. The work comes in slices
of at most four minutes, and slices that are run one by one into the same folder make one report.

examples:
  python3 -m venv vllm && vllm/bin/pip install vllm
  make gpu-peers FLAGS="--peer vllm=vllm/bin/python"
  make gpu-peers FLAGS="--peer vllm=vllm/bin/python --minutes 9 --resume"   what has not passed, as far as it gets
  make gpu-peers FLAGS="--stages weights vllm-plain vllm-drafts-4"          some stages, or slices of them
  make gpu-peers FLAGS="--plan"                                            the slices and their limits; nothing is run
  make gpu-peers DRY=1                                                     all of it, tiny, on a CPU: further servers
                                                                           of ours stand in for the other engines

Exit status: 0; 1 if a stage failed or ran out of time; 2 for unusable flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from space_eval.report import markdown_table

from gpu.__main__ import parser_of, run_catalogue
from gpu.llama import SHAPES
from gpu.peers import PEERS
from gpu.report import Catalogue, Record, written
from gpu.stages import PEER_STAGES

PLAIN, DRAFTS, AUTO, FIRST_TOKEN = "plain", "drafts", "auto/plain", "first token"

TABLE = "Medians by engine"
COLUMNS = (
    "what", "size", "engine", "drafts", "median", "low", "high", "unit", "rounds", "ours/theirs", "tokens a step",
    "same ids",
)  # fmt: skip

OURS = "spaceserve"
SHORT = "1 × 50"  # a prompt whose first token is held against our own plain step
MOST_STEPS = 4.0  # that it may take

WANTED: Mapping[str, Mapping[str, float]] = {
    PLAIN: dict.fromkeys(("1", "8", "32", "64", "128", "256"), 1.05),
    DRAFTS: {"1": 1.3, "8": 1.15, "32": 1.1, "64": 1.1, "128": 1.15},
    AUTO: {"1": 0.995, "8": 0.995, "32": 0.995, "64": 1.6, "128": 0.995, "256": 0.995},
    FIRST_TOKEN: dict.fromkeys(("1 × 2048", "8 × 2048", "32 × 512"), 0.97),
}
"""Ours over theirs, by size: at least; of the first token: at most. Of `AUTO`: ours with drafts over ours without."""


@dataclass(frozen=True)
class Entry:
    """A row of a slice's table, as far as the summary needs it."""

    what: str
    size: str
    engine: str
    drafts: str
    median: float
    ratio: float | None  # ours over theirs
    shown: str  # of that ratio
    unit: str
    is_dry: bool


def entries(record: Record) -> Iterator[Entry]:
    head, *rows = record.tables.get(TABLE, [list(COLUMNS)])
    for row in rows:
        cell = dict(zip(head, row, strict=True))
        shown = cell["ours/theirs"]
        ratio = None if shown == "–" else float(shown.split()[0])
        yield Entry(
            cell["what"], cell["size"], cell["engine"], cell["drafts"], float(cell["median"]), ratio, shown,
            cell["unit"], record.dry,
        )  # fmt: skip


def summary(records: Mapping[str, Record]) -> str:
    """Markdown: for each engine a table of ours, theirs at its best k, the ratio, and what is wanted."""
    parts = []
    for name, peer in PEERS.items():
        found = {label: list(entries(one)) for label, one in records.items() if label.startswith(f"{name}-")}
        rows = [*_rows(name, list(found.values()))]
        if rows:
            parts += [f"## Beside {peer.label}\n", markdown_table(_HEAD, rows)]
        reasons = {one.why for label, one in records.items() if label in found and one.why}
        parts += [f"{peer.label}: {why}\n" for why in sorted(reasons)]
    return "\n".join(parts)


_HEAD = ["what", "streams or prompts", "ours", "theirs", "ours/theirs", "wanted", "verdict"]


def _rows(name: str, slices: Sequence[Sequence[Entry]]) -> Iterator[list[str]]:
    """Each size once, from the slice in which the other engine was fastest."""
    plain = (entry for one in slices for entry in one if (entry.what, entry.size, entry.engine) == (PLAIN, "1", OURS))
    step = next((1e3 / entry.median for entry in plain), None)
    for what in (PLAIN, DRAFTS, AUTO, FIRST_TOKEN):
        for size in dict.fromkeys(entry.size for one in slices for entry in one if entry.what == what):
            pairs: list[tuple[Entry, Entry | None]] = []
            for one in slices:
                here = {entry.engine: entry for entry in reversed(one) if (entry.what, entry.size) == (what, size)}
                if OURS in here:
                    pairs.append((here[OURS], here.get(name)))
            if pairs:
                yield _row(*max(pairs, key=lambda pair: 0.0 if pair[1] is None else pair[1].median), step)


def _row(ours: Entry, theirs: Entry | None, step: float | None) -> list[str]:
    wanted = WANTED[ours.what].get(ours.size)
    is_time = ours.what == FIRST_TOKEN
    bound = "–" if wanted is None else f"{'≤' if is_time else '≥'} {written(wanted)}"
    is_met = (
        wanted is not None and ours.ratio is not None and (ours.ratio <= wanted if is_time else ours.ratio >= wanted)
    )
    verdict = "–" if wanted is None or ours.ratio is None else "met" if is_met else "missed"
    if is_time and ours.size == SHORT and step is not None:
        bound = f"ours ≤ {MOST_STEPS:g} plain steps ({MOST_STEPS * step:.1f} ms)"
        verdict = "met" if ours.median <= MOST_STEPS * step else "missed"
    best = "–" if theirs is None else f"{written(theirs.median, theirs.unit)}{_depth(theirs)}"
    verdict = "dry run: means nothing" if ours.is_dry else verdict
    return [ours.what, ours.size, written(ours.median, ours.unit), best, ours.shown, bound, verdict]


def _depth(entry: Entry) -> str:
    return f" ({entry.drafts})" if entry.drafts.startswith("k=") else ""


SIDE_BY_SIDE = Catalogue("Engines side by side on one GPU", PEER_STAGES, summary)


def main(argv: Sequence[str] | None = None) -> int:
    prog = "python -P -m gpu.side_by_side"
    parser = parser_of(SIDE_BY_SIDE, prog, __doc__ or "", Path("runs/gpu-peers"))
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=PYTHON",
        help=f"the interpreter that has an engine ({', '.join(PEERS)}); repeatable [this one]",
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="a Llama's, of the weights [%(default)s]")
    parser.add_argument("--weights", type=Path, help="folder for 16 GiB (1b: 3) of weights, kept [weights, in --out]")
    options = parser.parse_args(argv)
    pythons = dict(options.peer)
    for name, peer in PEERS.items():
        if why := peer.missing(pythons.get(name, sys.executable)):
            print(f"left out: {why}" if not options.dry else f"a server of ours stands in: {why}", file=sys.stderr)
    words: list[object] = ["--shape", options.shape, *(f"--peer={name}={python}" for name, python in pythons.items())]
    words += [] if options.weights is None else ["--weights", options.weights.resolve()]
    return run_catalogue(SIDE_BY_SIDE, parser, options, words=words)


def _pair(text: str) -> tuple[str, str]:
    """NAME=PYTHON. Raises argparse.ArgumentTypeError."""
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"{text!r} must read NAME=PYTHON, with a NAME of {', '.join(PEERS)}")
    return name, python


if __name__ == "__main__":
    sys.exit(main())
