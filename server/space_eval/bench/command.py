"""`spaceserve bench`: throughput and latency under load, of any OpenAI or TGI endpoint, with and without drafts.

Every round is a comparison: the same requests to each arm, in turn first and last, so that a machine that gets slower
in between slows all of them. A ratio is always of one round.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from space_common.http_client import Endpoint, HttpError
from space_common.process import ServerError, ServerProcess, cpu_seconds

from space_eval.bench.arms import APIS, Arm, find, token_ids
from space_eval.bench.options import BenchSettings, parse
from space_eval.bench.report import BenchResult, draw, markdown, record, summarize, synthetic_acceptance_label, table
from space_eval.bench.rounds import LoadRun, Round
from space_eval.bench.workload import Recorded, Workload, load_recorded
from space_eval.data import built_in, long_text
from space_eval.flags import EvalError, FlagError, read_api_key
from space_eval.plots import PlotError
from space_eval.report import facts

COMMANDS: Mapping[str, tuple[str, str]] = {
    "make-model": (
        "space_model.make_model",
        "a checkpoint with random weights, to measure a size that one has no model of",
    )
}
"""Subcommands of `spaceserve bench`: a module, imported on use, whose `main(argv)` returns the exit code."""

IN_A_CHECKOUT = "in a checkout, `.venv/bin/python tests/perf %s` measures this"
MOVED = {
    "edge": IN_A_CHECKOUT % "edge",
    "engines": IN_A_CHECKOUT % "engines",
    "host-time": IN_A_CHECKOUT % "host-time",
    "memory": IN_A_CHECKOUT % "memory",
    "overhead": IN_A_CHECKOUT % "overhead",
    "product": IN_A_CHECKOUT % "matmul",
    "scheduler": IN_A_CHECKOUT % "scheduler",
    "simulate": "in a checkout, tests/simulation holds the scheduler and the controller in virtual time",
    "sizing": "`spaceserve bench --rate … --slo …` measures what a server holds",
    "soak": "in a checkout: `make soak FLAGS=…`",
    "streams": IN_A_CHECKOUT % "streams",
}
"""Commands that were removed, and what to use instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 after a measurement, 1 if a server failed, 2 for unusable flags."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in MOVED:
        print(f"spaceserve bench {given[0]} was removed; {MOVED[given[0]]}", file=sys.stderr)
        return 2
    if given and given[0] in COMMANDS:
        status: int = importlib.import_module(COMMANDS[given[0]][0]).main(given[1:])
        return status
    try:
        settings, serve_flags = parse(given, _commands())
        work = _workload(settings)
        starts: list[Start] = []
        for number in range(settings.num_starts):
            with ExitStack() as stack:
                servers = targets(settings, serve_flags, stack, number)
                starts.append(asyncio.run(_measure(settings, work, servers, number)))
    except EvalError as error:
        _log(str(error))
        return 2
    except (HttpError, ServerError) as error:
        _log(str(error))
        return 1
    _report(settings, serve_flags, starts)
    return 0


PLAIN = "off"
CONTROL = "off again"
PLAIN_SERVER = "plain server"


@dataclass(frozen=True)
class Target:
    """A measured server, and its process if it was started here."""

    name: str
    url: str
    process: ServerProcess | None = None


def targets(settings: BenchSettings, serve_flags: Sequence[str], stack: ExitStack, start: int = 0) -> list[Target]:
    """Return the servers, starting them if needed for the `start`-th time; `stack` stops them. Raises ServerError."""
    if settings.urls:
        return [Target(name, url) for name, url in settings.urls]
    flags = ["--model", settings.model, *serve_flags]
    wanted = {settings.model: (flags, "")}
    if settings.plain_server:
        wanted[PLAIN_SERVER] = ([*flags, "--port", "0", "--speculation", PLAIN], " that never speculates")
    started: dict[str, Target] = {}
    for name in list(wanted)[:: -1 if start % 2 else 1]:  # alternate the order
        words, what = wanted[name]
        _log(f"starting a server for {settings.model}{what}")
        server = stack.enter_context(ServerProcess(words))
        started[name] = Target(name, server.url, server)
    return [started[name] for name in wanted]


async def find_arms(settings: BenchSettings, servers: Sequence[Target]) -> tuple[list[Arm], dict[str, dict[str, Any]]]:
    """Return the arms in order, and their servers' /info by name. Raises HttpError, FlagError.

    A single spaceserve gives several arms: plain, with a control plain again, and each speculation setting.
    """
    arms: list[Arm] = []
    infos: dict[str, dict[str, Any]] = {}
    for server in servers:
        arm = Arm(
            name=server.name,
            endpoint=Endpoint.parse(server.url, read_api_key(settings.api_key_file), settings.cacert),
            api=APIS[settings.api],
            temperature=settings.temperature,
            seed=settings.seed,
            model=settings.served_model,
            speculation=next(iter(settings.speculation), None),
            ignore_eos=not settings.stop_at_eos,
            fields=settings.body,
            is_baseline=not arms,
        )
        arm, infos[server.name] = await find(arm)
        arms.append(arm)
    first, *others = arms
    if settings.urls and (others or not first.is_spaceserve):
        return arms, infos
    modes: list[tuple[str, str | int]] = [(PLAIN, PLAIN)]
    if settings.control:
        modes.append((CONTROL, PLAIN))
    modes += [(mode if isinstance(mode, str) else f"k {mode}", mode) for mode in settings.speculation or ("auto",)]
    own = [replace(first, name=name, speculation=mode, is_baseline=name == PLAIN) for name, mode in modes]
    return [*(replace(other, speculation=PLAIN, is_baseline=True) for other in others), *own], infos


def cpu_counter(servers: Sequence[Target], arm: Arm) -> Callable[[], Mapping[str, float]]:
    """Return a counter of CPU seconds by process of an arm's server; it is empty for a remote server."""
    local = [server.process for server in servers if server.process is not None]
    process = next((one for one in local if Endpoint.parse(one.url).port == arm.endpoint.port), None)
    if process is None:
        return dict
    return lambda: {
        "router": cpu_seconds(process.pid),
        "workers": sum(cpu_seconds(pid) for pid in process.worker_pids()),
        "client": cpu_seconds(os.getpid()),
    }


async def tokenized(work: Workload, arms: Sequence[Arm]) -> Workload:
    """Make prompts of given length: token ids if all arms' servers tokenize alike, else text of about that length."""
    if not work.has_given_lengths:
        return work
    by_server = {arm.endpoint: await token_ids(arm.endpoint, work.text) for arm in arms}
    ids = by_server[arms[0].endpoint]
    if ids is None:
        return work
    shared = len(by_server) < len(arms) and not all(arm.is_spaceserve for arm in arms)  # unsalted: only text is marked
    takes_ids = all(arm.api.name == "openai" for arm in arms) and all(other == ids for other in by_server.values())
    work = replace(work, characters_per_token=len(work.text) / len(ids))
    return replace(work, ids=ids) if takes_ids and not shared else work


def check_window(work: Workload, arms: Sequence[Arm]) -> None:
    """Raise FlagError if the longest answer does not fit an arm's window."""
    for arm in arms:
        if arm.window is not None and work.max_output_tokens >= arm.window:
            raise FlagError(
                f"--output-tokens is up to {work.max_output_tokens}; it must be below the model's window of "
                f"{arm.window}."
            )


@dataclass(frozen=True)
class Start:
    """Measurements of one start of the servers."""

    arms: Sequence[Arm]
    infos: Mapping[str, Mapping[str, Any]]  # by server
    work: Workload
    rounds: list[list[list[Round]]]  # [shape][round][arm]


async def _measure(settings: BenchSettings, work: Workload, servers: Sequence[Target], number: int) -> Start:
    arms, infos = await find_arms(settings, servers)
    check_window(work, arms)
    work = await tokenized(work, arms)
    run = LoadRun(settings, arms, work, lambda arm: cpu_counter(servers, arm), number)
    return Start(arms, infos, work, await run.measure())


def _workload(settings: BenchSettings) -> Workload:
    """Raises EvalError."""
    recorded = list(map(Recorded, built_in())) if settings.prompts is None else load_recorded(settings.prompts)
    if settings.rate == (None,) and recorded[0].arrival is None:
        raise FlagError(f"--rate file: {settings.prompts} has no `arrival` (seconds) nor `timestamp` (milliseconds).")
    texts = [] if settings.prompts is None else [one.text for one in recorded if one.text]
    return Workload(
        recorded=recorded,
        output_tokens=settings.output_tokens,
        prompt_tokens=settings.prompt_tokens,
        text="\n".join(texts) or long_text(),
        seed=settings.seed,
    )


def _report(settings: BenchSettings, serve_flags: Sequence[str], starts: Sequence[Start]) -> None:
    """Print the table, and write the requested files."""
    first = starts[0]
    shapes = zip(*(start.rounds for start in starts), strict=True)
    result = summarize(settings, first.arms, [list(chain.from_iterable(rounds)) for rounds in shapes])
    known = facts(next(iter(first.infos.values())))
    known["synthetic_acceptance"] = synthetic_acceptance_label(first.infos)
    if len(first.infos) > 1:
        known["servers"] = {name: info.get("model_id") for name, info in first.infos.items()}
    known["serve_flags"] = list(serve_flags)
    _print(settings, known, first.work, result)
    if settings.out is not None:
        _write(settings.out, result, record(known, _load(settings, first.work), result))


def _load(settings: BenchSettings, work: Workload) -> dict[str, Any]:
    """Return the load's settings for the record."""
    names = ("num_starts", "num_rounds", "num_requests", "num_warm_up", "carbon_intensity", "api", "temperature")
    return {
        "shapes": [shape.name for shape in settings.shapes],
        **{name: getattr(settings, name) for name in names},
        "seconds": settings.duration,
        "num_prompts": len(work.recorded),
        "prompt_tokens": None if work.prompt_tokens is None else work.prompt_tokens.form,
        "output_tokens": work.output_tokens.form,
        "prompts_are": "token ids" if work.ids else "text",
        "seed": work.seed,
        "limits_seconds": None if settings.limits is None else dict(settings.limits.seconds),
    }


def _print(settings: BenchSettings, known: Mapping[str, Any], work: Workload, result: BenchResult) -> None:
    print(f"{known['id']} {known['dtype']} on {known['device_type']}; {known['machine']}; commit {known['commit']}")
    if work.prompt_tokens is None:
        prompts = f"{len(work.recorded)} prompts"
    else:
        prompts = f"prompts of {work.prompt_tokens.form} tokens, as {'token ids' if work.ids else 'text'}"
    often = f"; {settings.num_rounds} rounds on each of {settings.num_starts} starts" if settings.num_starts > 1 else ""
    lengths = f"{work.output_tokens.form} tokens per answer, {prompts}"
    print(f"{lengths}; temperature {settings.temperature:g}{often}\n")
    if known["synthetic_acceptance"]:
        print(f"{known['synthetic_acceptance']}\n")
    print(table(result.rows))
    if settings.carbon_intensity is not None and not any(row.joules_per_token for row in result.rows):
        _log(
            "--carbon-intensity: no energy was counted: the server has no sensor it may read (docker/README.md), or "
            "rounds are shorter than a second."
        )
    for name, (base, *others) in result.timelines.items():
        for one in others:
            print(f"{name}: {one.arm} is below {base.arm} in {one.share_below:.0%} of its moments.")
            if one.draft_change is not None:
                print(f"{name}: {one.arm}'s mean draft length changes by {one.draft_change:.2f} from look to look.")


def _write(out: Path, result: BenchResult, made: Mapping[str, Any]) -> None:
    """Write the record to a .json file, or the whole report to a folder."""
    text = json.dumps(made, indent=1) + "\n"
    if out.suffix == ".json":
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        _log(f"record: {out}")
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(text, encoding="utf-8")
    known = made["facts"]
    note = f"{known['id']} {known['dtype']}, {known['machine']}, commit {known['commit']}"
    note = "; ".join(filter(None, (known.get("synthetic_acceptance"), note)))
    pictures: list[str] = []
    try:
        pictures = draw(out, result, note)
    except PlotError as error:
        _log(f"no plots: {error}")
    (out / "report.md").write_text(markdown(made, result.rows, pictures), encoding="utf-8")
    _log(f"report: {', '.join(str(out / name) for name in ('report.md', 'report.json', *pictures))}")


def _commands() -> str:
    lines = [f"  spaceserve bench {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["\nother benchmarks, each with a --help of its own:", *lines])


def _log(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr)
