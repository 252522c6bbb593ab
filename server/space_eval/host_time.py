"""`spaceserve bench host-time`: what a step of the worker takes besides model computation, by batch and layout.

Host time is everything between the ends of two steps that is not model computation: planning, packing rows, the
attention plan, the laws of the rows, the verdict, where drafts come from, moving the sequences on, building the report,
handing it to the event loop, and (in processor time) serialising it there. Model computation is what is spent inside
the network, its heads, the draft head, and tensor work over the vocabulary (processors, noise, choice, candidates).
The worker runs as it is served, behind its conversation, without the socket. The clock is the stepping thread's
processor time, which other programs on the machine do not lengthen, or with --clock wall the wall's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from space_common.garbage import collect_seldom
from space_model.loading.load import load_model
from space_model.model_error import ModelError
from space_server.machine.host_memory import keep_freed_memory

from space_eval.bench.facts import commit, machine
from space_eval.host_time_run import PARTS, Cell, Clock, HostSeconds, HostTimeError, run_cell
from space_eval.plots import PlotError, histogram_plot

BOUNDS_MS = {1: 0.3, 64: 1.5}
"""What host time of a step is to stay below, by batch."""

CLOCKS: dict[str, Clock] = {"processor": time.thread_time, "wall": time.perf_counter}

Found = dict[Cell, list[HostSeconds]]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 1 where host time is above its bound and --check is given, 2 for flags."""
    options = _parser().parse_args(argv)
    try:
        found = _measure(options)
        record = _record(options, found)
        print(markdown(record))
        if options.out is not None:
            _write(options.out, record, found)
    except (HostTimeError, ModelError, PlotError) as error:
        print(f"spaceserve bench host-time: {error}", file=sys.stderr)
        return 2
    return int(options.check and any(row["within"] is False for row in record["rows"]))


def _measure(options: argparse.Namespace) -> Found:
    """All cells in turn, as often as there are rounds: a machine that gets slower slows all of them."""
    keep_freed_memory()  # these two as the worker process does
    model = load_model(options.model, dtype=options.dtype, num_threads=options.num_threads)
    collect_seldom()
    layouts = [0] if model.facts.num_masks == 0 else options.drafts
    cells = [Cell(batch, k, options.temperature) for batch in options.batches for k in layouts]
    found: Found = {cell: [] for cell in cells}
    for number in range(options.rounds):
        for cell in cells:
            print(f"round {number + 1}/{options.rounds}: batch {cell.batch}, {cell.layout}", file=sys.stderr)
            found[cell] += run_cell(model, cell, num_steps=options.steps, seed=number, clock=CLOCKS[options.clock])
    return found


def _record(options: argparse.Namespace, found: Found) -> dict[str, Any]:
    facts = {
        "model": options.model,
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
        "threads": options.num_threads,
        "clock": options.clock,
        "temperature": options.temperature,
        "steps": options.steps * options.rounds,
    }
    return {"facts": facts, "rows": [_row(cell, steps) for cell, steps in found.items()]}


def _row(cell: Cell, steps: Sequence[HostSeconds]) -> dict[str, Any]:
    """Milliseconds: medians of the whole and of each part, and the 90th percentile of the whole."""
    host = 1e3 * np.array([step.host for step in steps])
    bound = BOUNDS_MS.get(cell.batch)
    median = float(np.median(host))
    return {
        **asdict(cell),
        "layout": cell.layout,
        "host_ms": median,
        "host_p90_ms": float(np.percentile(host, 90)),
        "bound_ms": bound,
        "within": None if bound is None else median < bound,
        "parts_ms": {part: 1e3 * float(np.median([getattr(step, part) for step in steps])) for part in PARTS},
        "computed_ms": 1e3 * float(np.median([step.computed for step in steps])),
        "steps_ms": [round(float(value), 4) for value in host],
    }


def markdown(record: dict[str, Any]) -> str:
    """The facts, then a table: medians in milliseconds."""
    lines = [(__doc__ or "").partition("\n\n")[2].strip(), ""]
    lines += [f"{name}: {value}  " for name, value in record["facts"].items()]
    lines += ["", "Medians of steps, ms:", ""]
    heads = ("batch", "layout", "host", "p90", "bound", *(part.replace("_", " ") for part in PARTS), "computation")
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in record["rows"]:
        bound = "–" if row["bound_ms"] is None else f"{row['bound_ms']:g}"
        cells = [row["batch"], row["layout"], f"{row['host_ms']:.3f}", f"{row['host_p90_ms']:.3f}", bound]
        cells += [f"{row['parts_ms'][part]:.3f}" for part in PARTS]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, f"{row['computed_ms']:.2f}"]) + " |")
    return "\n".join(lines) + "\n"


def _write(folder: Path, record: dict[str, Any], found: Found) -> None:
    """host-time.json, host-time.md and a histogram for each batch."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for batch in dict.fromkeys(cell.batch for cell in found):
        values = {
            cell.layout: [1e3 * step.host for step in steps] for cell, steps in found.items() if cell.batch == batch
        }
        name = f"host-time-batch-{batch}.png"
        histogram_plot(
            folder / name,
            values,
            title=f"Host time of a step, batch {batch}",
            x="ms",
            level=BOUNDS_MS.get(batch),
            note=f"{record['facts']['model']}, {record['facts']['machine']}, commit {record['facts']['commit']}; "
            "dashed: the bound; the last bar holds all that is longer",
        )
        pictures.append(f"![host time, batch {batch}]({name})")
    (folder / "host-time.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    text = "# Host time of a step\n\n" + markdown(record) + "\n" + "\n".join(pictures) + "\n"
    (folder / "host-time.md").write_text(text, encoding="utf-8")
    print(f"written to {folder}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench host-time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="a folder, a hub id, or `demo` (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of weights, keys and values (default: %(default)s)")
    parser.add_argument("--batches", type=_numbers(1), default=(1, 8, 64), help="sequences [1,8,64]")
    parser.add_argument(
        "--drafts", type=_numbers(0), default=(0, 2, 5), help="drafts per sequence, all groups whole; 0: plain [0,2,5]"
    )
    parser.add_argument("--steps", type=_number(1), default=40, help="decode steps of each cell and round [40]")
    parser.add_argument("--rounds", type=_number(1), default=3, help="times that all cells are run in turn [3]")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all sequences; 0: greedy (default: 0)")
    parser.add_argument("--num-threads", type=_number(1), default=1, help="threads of one product (default: 1)")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="processor", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for host-time.json, .md and histograms")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a median is above its bound")
    return parser


def _number(least: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}; got {text!r}")
        return int(text)

    return parse


def _numbers(least: int) -> Any:
    def parse(text: str) -> tuple[int, ...]:
        return tuple(_number(least)(word.strip()) for word in text.split(","))

    return parse


if __name__ == "__main__":
    sys.exit(main())
