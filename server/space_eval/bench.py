"""`spaceserve bench`: throughput and latency under load, of any OpenAI or TGI endpoint, with and without drafts.

Every round is a comparison: the same requests to each arm, in turn first and last, so that a machine that gets slower
in between slows all of them. A ratio is always of one round.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from space_eval.bench_arms import Side, arms, check_window, processes, sides, tokenized
from space_eval.bench_facts import decree, facts
from space_eval.bench_measure import Measured, Plan, figures, shown, take
from space_eval.bench_options import BenchError, Settings, parse
from space_eval.bench_plots import draw
from space_eval.bench_prompts import built_in, long_text
from space_eval.bench_report import markdown, record, table
from space_eval.bench_round import Round
from space_eval.bench_server import ServerError, unwind_when_told_to_end
from space_eval.load_arm import Arm
from space_eval.load_client import LoadError
from space_eval.load_file import Recorded, load_recorded
from space_eval.load_work import Work
from space_eval.plots import PlotError
from space_eval.prompts import PromptError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "engines": ("space_eval.engines", "other inference engines beside ours, in one run on the same weights"),
    "edge": ("space_eval.edge", "one core and 1 GiB: are all texts exact, and what does the server take"),
    "memory": ("space_eval.memory_table", "what SPACE takes in memory, beside a server with a draft model"),
    "overhead": ("space_eval.overhead", "what masks cost: step time by rows, and the batch at which they stop paying"),
    "make-model": (
        "space_eval.make_model",
        "a checkpoint with random weights, to measure a size that one has no model of",
    ),
    "product": ("space_eval.product", "the CPU's product of few rows, beside memory's speed and torch's own"),
    "host-time": ("space_eval.host_time", "what a step costs the host beside the model, by part"),
    "streams": ("space_eval.streams", "what one router adds and costs, from one stream to a thousand"),
    "scheduler": ("space_eval.scheduler_cost", "what a step costs the router, by requests that wait and by pages"),
}
"""What may follow `spaceserve bench`: a module, loaded when asked for, whose `main(argv)` gives the exit code."""

MOVED = {
    "simulate": "in a checkout, tests/simulation holds the scheduler and the controller in virtual time",
    "sizing": "`spaceserve bench --rate … --slo …` measures what a server holds",
    "soak": "in a checkout: `make soak FLAGS=…`",
}
"""Commands that were removed, and what to use instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 1 where a server failed, 2 for unusable flags."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in MOVED:
        print(f"spaceserve bench {given[0]} was removed; {MOVED[given[0]]}", file=sys.stderr)
        return 2
    if given and given[0] in COMMANDS:
        status: int = importlib.import_module(COMMANDS[given[0]][0]).main(given[1:])
        return status
    try:
        settings, serve_flags = parse(given, _commands())
        work = _work(settings)
        starts: list[Start] = []
        for number in range(settings.num_starts):
            with ExitStack() as stack:
                found = sides(settings, serve_flags, stack, _say, number)
                starts.append(asyncio.run(_start(settings, work, found, number)))
    except (BenchError, PromptError) as error:
        _say(str(error))
        return 2
    except (LoadError, ServerError) as error:
        _say(str(error))
        return 1
    measured, made = _told(settings, starts)
    made["facts"]["serve_flags"] = serve_flags
    if settings.out is not None:
        return _write(settings.out, measured, made)
    return 0


@dataclass(frozen=True)
class Start:
    """What one start of the servers was, and brought."""

    arms: Sequence[Arm]
    infos: Mapping[str, Mapping[str, Any]]  # by server
    work: Work
    plan: Plan
    rounds: list[list[list[Round]]]  # by shape and round, every arm's


async def _start(settings: Settings, work: Work, found: Sequence[Side], number: int) -> Start:
    sides_of, infos, baselines = await arms(settings, found)
    check_window(work, sides_of)
    work = await tokenized(work, sides_of)
    plan = Plan(
        shapes=settings.shapes,
        num_rounds=settings.num_rounds,
        num_requests=settings.num_requests,
        seconds=settings.duration,
        num_warm_up=settings.num_warm_up,
        limits=settings.limits,
        baselines=baselines,
        carbon_intensity=settings.carbon_intensity,
        num_starts=settings.num_starts,
    )
    return Start(sides_of, infos, work, plan, await take(sides_of, work, plan, processes(found), number))


def _told(settings: Settings, starts: Sequence[Start]) -> tuple[Measured, dict[str, Any]]:
    """The figures and their record; the table goes to stdout."""
    first = starts[0]
    infos, work, plan = first.infos, first.work, first.plan
    shapes = zip(*(start.rounds for start in starts), strict=True)
    measured = figures(first.arms, plan, [list(chain.from_iterable(rounds)) for rounds in shapes])
    known = facts(next(iter(infos.values())))
    known["synthetic_acceptance"] = decree(infos)
    if len(infos) > 1:
        known["servers"] = {name: info.get("model_id") for name, info in infos.items()}
    load = {**shown(plan, work), "api": settings.api, "temperature": settings.temperature}
    print(f"{known['id']} {known['dtype']} on {known['device_type']}; {known['machine']}; commit {known['commit']}")
    lengths = f"{work.output_tokens.form} tokens per answer, {_source(work)}"
    often = f"; {plan.num_rounds} rounds on each of {plan.num_starts} starts" if plan.num_starts > 1 else ""
    print(f"{lengths}; temperature {settings.temperature:g}{often}\n")
    if known["synthetic_acceptance"]:
        print(f"{known['synthetic_acceptance']}\n")
    print(table(measured.rows))
    if settings.carbon_intensity is not None and not any(row.joules_per_token for row in measured.rows):
        _say("--carbon-intensity: no energy was counted: the server has no sensor it may read (docker/README.md), or "
             "rounds are shorter than a second.")  # fmt: skip
    for name, moments in measured.moments.items():
        for one in moments[1:]:
            print(f"{name}: {one.arm} is below {moments[0].arm} in {one.share_below:.0%} of its moments.")
            if one.draft_change is not None:
                print(f"{name}: {one.arm}'s mean draft length changes by {one.draft_change:.2f} from look to look.")
    return measured, record(known, load, measured.rows) | {"moments": _moments(measured)}


def _moments(measured: Measured) -> dict[str, Any]:
    return {
        load: [
            {
                "arm": one.arm,
                "seconds": one.seconds,
                "tokens_per_second": one.tokens_per_second,
                "ratios": one.ratios,
                "share_below": one.share_below,
                "draft_lengths": one.draft_lengths,
                "draft_change": one.draft_change,
            }
            for one in moments
        ]
        for load, moments in measured.moments.items()
    }


def _source(work: Work) -> str:
    if work.prompt_tokens is None:
        return f"{len(work.recorded)} prompts"
    return f"prompts of {work.prompt_tokens.form} tokens, as {'token ids' if work.ids else 'text'}"


def _work(settings: Settings) -> Work:
    """Raises PromptError, BenchError."""
    if settings.prompts is None:
        recorded = [Recorded(prompt.text) for prompt in built_in()]
    else:
        recorded = load_recorded(settings.prompts)
    if settings.rate == (None,) and recorded[0].arrival is None:
        raise BenchError(f"--rate file: {settings.prompts} has no `arrival` (seconds) nor `timestamp` (milliseconds).")
    texts = [] if settings.prompts is None else [one.text for one in recorded if one.text]
    return Work(
        recorded=recorded,
        output_tokens=settings.output_tokens,
        prompt_tokens=settings.prompt_tokens,
        text="\n".join(texts) or long_text(),
        seed=settings.seed,
    )


def _write(out: Path, measured: Measured, made: Mapping[str, Any]) -> int:
    """The record alone into a .json file, else the whole report into a folder."""
    text = json.dumps(made, indent=1) + "\n"
    if out.suffix == ".json":
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        _say(f"record: {out}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(text, encoding="utf-8")
    known = made["facts"]
    note = f"{known['id']} {known['dtype']}, {known['machine']}, commit {known['commit']}"
    note = "; ".join(filter(None, (known.get("synthetic_acceptance"), note)))
    pictures: list[str] = []
    try:
        pictures = draw(out, measured.rows, measured.moments, note)
    except PlotError as error:
        _say(f"no plots: {error}")
    (out / "report.md").write_text(markdown(made, measured.rows, pictures), encoding="utf-8")
    _say(f"report: {', '.join(str(out / name) for name in ('report.md', 'report.json', *pictures))}")
    return 0


def _commands() -> str:
    lines = [f"  spaceserve bench {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["\nother benchmarks, each with a --help of its own:", *lines])


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr)


if __name__ == "__main__":
    unwind_when_told_to_end()
    sys.exit(main())
