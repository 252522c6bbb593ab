"""`spaceserve bench sizing`: what one node and many of them serve, and how many routers they need, by the simulator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from space_eval import simulate_flags as read
from space_eval.bench_facts import commit
from space_eval.bench_limits import Limits
from space_eval.flag_values import whole
from space_eval.simulate_plan import PRECISION
from space_eval.simulate_router import RouterCost
from space_eval.simulate_worker import Speculation
from space_eval.sizing_fleet import MARGIN, MOST_BUSY, fleets
from space_eval.sizing_node import NODES
from space_eval.sizing_report import facts, record, table

ROUTER = RouterCost(3e-3, 75e-6)
"""Processor seconds of a request and of a piece of its answer: `spaceserve bench streams --streams 100,1000 --workers 8
--tokens 150` on 2 cores x86-64 shared with other work, commit 8ef5f94 (2.1 to 4.1 ms, 72 to 103 µs)."""

ABOUT = f"""\
How it is found: the highest rate that one worker holds within --slo for --share of the requests, to {PRECISION:.0%};
then the most workers that one router carries with at most {MOST_BUSY:.0%} of a core, each worker at {MARGIN:.0%} of
that rate; then so many such cells side by side.
Where a router cannot carry even one, each worker has one and gets what that can carry.

What is real and what is made up: see `spaceserve bench simulate --help`. Steps of h200 and h100 are computed from data
sheets, those of the CPUs were measured; what a router takes was measured on a CPU. Nothing here was served by 8 nodes.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a table, 1 where nothing keeps the limits or a file cannot be written, 2 for flags."""
    options = _parser().parse_args(argv)
    node = NODES[options.node]
    changes = {
        "limits": options.slo and ",".join(f"{name}={seconds:g}s" for name, seconds in options.slo.seconds),
        "prompt_tokens": options.prompt_tokens and options.prompt_tokens.form,
        "output_tokens": options.output_tokens and options.output_tokens.form,
        "num_workers": options.workers,
        "max_sequences": options.max_sequences,
        "seconds": options.duration,
    }
    node = replace(node, **{name: value for name, value in changes.items() if value is not None})
    scenario = node.scenario(options.router_cost, options.seed).arm(options.speculation)
    known = facts(node, scenario, options.share)
    print("\n".join(known.values()))
    try:
        found = fleets(scenario, options.share, node.num_workers, options.nodes, _say)
    except ValueError as error:
        _say(str(error))
        return 1
    print("\n" + table(found))
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"facts": {**known, "commit": commit()}, "fleets": record(found)}, indent=1)
            (options.out / f"{options.node}.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            _say(f"{options.out} cannot be written: {error.strerror or error}.")
            return 1
        _say(f"wrote {options.out}/{options.node}.json")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench sizing",
        description="Simulates one router and its workers within limits, and says what one node and many serve.",
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = "; ".join(f"{name}: {node.what}" for name, node in NODES.items())
    parser.add_argument("--node", choices=NODES, default="h200", help=f"{kinds} [h200]")
    parser.add_argument("--nodes", type=_nodes, default=(1, 8, 100), metavar="N[,N...]", help="[1,8,100]")
    parser.add_argument("--workers", type=whole, metavar="N", help="of a node [that of --node]")
    parser.add_argument("--max-sequences", type=whole, metavar="N", help="running at once on a worker [the same]")
    parser.add_argument("--slo", type=read.of(Limits.parse), metavar="LIMITS", help="ttft=1s,itl=30ms [the same]")
    parser.add_argument("--share", type=read.share, default=0.95, help="of requests that must keep all limits [0.95]")
    parser.add_argument("--prompt-tokens", type=read.lengths, metavar="LAW", help="lengths [the same]")
    parser.add_argument("--output-tokens", type=read.lengths, metavar="LAW", help="lengths of answers [the same]")
    parser.add_argument("--speculation", type=_way, default="auto", help="auto, off, or drafts per step [auto]")
    parser.add_argument(
        "--router-cost",
        type=read.router_cost,
        default=ROUTER,
        metavar="REQUEST,PIECE",
        help="processor time of a request and of a piece of its answer, as `bench streams` says [3ms,75us]",
    )
    parser.add_argument("--duration", type=read.duration, help="of a trial, in virtual time [that of --node]")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, lengths, texts, jitter [1]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write NODE.json there")
    return parser


def _nodes(text: str) -> tuple[int, ...]:
    return tuple(whole(word) for word in text.split(","))


def _way(text: str) -> Speculation:
    (way, *others) = read.arms(text)
    if others:
        raise argparse.ArgumentTypeError(f"must be one way; got {text!r}")
    return way


def _say(line: str) -> None:
    print(f"bench sizing: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
