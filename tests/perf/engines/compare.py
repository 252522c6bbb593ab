"""Several inference engines in one run, on the same weights, prompts and threads: decoding by batch, and prefill.

Each engine runs in a process of its own, in an interpreter that has it: spaceserve (plain, and with synthetic
acceptance beside the most that it can bring) and transformers here; others by --engine NAME=PYTHON; a server that is
already running, of any engine, by --server NAME=URL (ours, plain and with drafts: --without spaceserve --server
spaceserve=URL). OpenVINO's format is read from CONVERTED/openvino/MODEL (a folder made by optimum-cli), ONNX Runtime's
from CONVERTED/onnxruntime/MODEL (made by its model builder), llama.cpp's from CONVERTED/llama.cpp/MODEL.gguf (written
when it is missing). --driver NAME=FILE adds an engine: FILE is like those in tests/perf/engines/drivers.

A --model that is a GGUF file is computed in its own few bits: by ours, llama.cpp and OpenVINO from that file, and by
OpenVINO and ONNX Runtime from CONVERTED as well, where a format of their own may be faster.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from space_common.worker.settings import parse_chances
from space_eval.acceptance.generation import encode_conversations
from space_eval.data import load_conversations, long_text
from space_eval.flags import whole_from
from space_eval.report import Ratio
from space_model.checkpoint.checkpoint import Checkpoint
from space_server.speculation.synthetic_acceptance import label
from tokenizers import Tokenizer

from perf.engines.gguf_llama import write_gguf
from perf.engines.process import DRIVERS, Answer, EngineFailed, EngineProcess, EngineSpec, Point
from perf.harness import PerfError, Report, log, numbers, table, take_turns

OURS, TRANSFORMERS, LLAMA, ONNX = "spaceserve", "transformers", "llama.cpp", "onnxruntime"
BUILT_IN: Mapping[str, Path] = {
    OURS: DRIVERS / "spaceserve_driver.py",
    "openvino": DRIVERS / "openvino_driver.py",
    TRANSFORMERS: DRIVERS / "transformers_driver.py",
    LLAMA: DRIVERS / "llama_cpp_driver.py",
    ONNX: DRIVERS / "onnxruntime_driver.py",
}
CHANCES = (".78", ".57")
TIE = 0.15  # differences below this share are called level: machines with neighbours vary by as much from run to run

NOTES = """\
Tokens per second, medians over the rounds. In a round every arm of every engine had its turn on the same prompts, each
other round in reverse order. A batch is timed from the moment at which all of its sequences have their first token to
the one at which the first has all of them; a prefill until its only new token, of a prompt of its own in each turn.
Greedy; ends of text are ignored, and every answer had the asked length. Engines take and give ids in their own process,
without HTTP or text, except servers. Between turns they are idle.

Ratios are to the best of the other engines at that point, each of one round: median, 95 % bootstrap bounds. Below 15 %
a difference is called level. Bound: plain decoding's rate times E / cost of the layout whose expected tokens per
measured second are best, by the cost of whole steps as measured at the start of this run and by its own steps.

Same ids: the share of an arm's ids up to the first that differs from our plain decoding's, over all sequences. Engines
round differently, and texts of random weights part for good at the first tie: near 1 proves the same model, small
values prove nothing."""


class Engine(Protocol):
    """What answers: `EngineProcess`."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def arms(self) -> Sequence[str]:
        """Its ways to decode."""

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> None:
        """Warm up."""

    def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
        """One turn."""


@dataclass
class Cell:
    """One arm at one point."""

    engine: str
    arm: str
    rates: list[float] = field(default_factory=list)  # tokens per second, by round
    same_ids: float | None = None  # share of its ids until they differ from the first arm's
    bound: Mapping[str, float] | None = None  # the most that its drafts can bring
    failure: str | None = None

    @property
    def name(self) -> str:
        return f"{self.engine}: {self.arm}"

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class PointResult:
    """All arms at one point."""

    point: Point
    cells: Sequence[Cell]

    @property
    def best_other(self) -> Cell | None:
        """The fastest of the engines that are not ours, by its median."""
        others = [cell for cell in self.cells if cell.engine != OURS and cell.rates]
        return max(others, key=lambda cell: cell.rate, default=None)

    def against_best(self, cell: Cell) -> Ratio | None:
        """To the best other engine, each of one round."""
        best = self.best_other
        if best is None or not cell.rates:
            return None
        return Ratio.of([one / other for one, other in zip(cell.rates, best.rates, strict=False)])

    def bound_against_best(self, cell: Cell) -> float | None:
        """The most that its drafts could bring: plain decoding's median times the bound, over the best other's."""
        best = self.best_other
        plain = next((one for one in self.cells if one.engine == cell.engine and one.rates), None)
        if best is None or plain is None or cell.bound is None:
            return None
        return plain.rate * cell.bound["speed_up"] / best.rate


def rank(ratio: float) -> str:
    return "level" if 1 / (1 + TIE) < ratio < 1 + TIE else "ahead" if ratio > 1 else "behind"


def measure(
    engines: Sequence[Engine], point: Point, prompts: Sequence[Sequence[int]], *, num_rounds: int, seconds: float
) -> list[Cell]:
    """A cell for each arm. An arm that fails once is left out of the following rounds; the others go on."""
    lanes = [(engine, Cell(engine.spec.name, arm)) for engine in engines for arm in engine.arms]
    answers: dict[str, Answer] = {}
    for engine, cell in lanes:
        try:
            engine.prepare(cell.arm, prompts, point)
        except EngineFailed as error:
            cell.failure = f"{cell.engine}: {error}"
    num_turns = itertools.count(1)

    def turn(lane: tuple[Engine, Cell], number: int) -> None:
        engine, cell = lane
        if cell.failure is not None:
            return
        asked = turned(prompts, next(num_turns)) if point.is_prefill else prompts
        try:
            answer = engine.run(cell.arm, asked, point)
            cell.rates.append(answer.tokens_per_second(point))
            answers.setdefault(cell.name, answer)
        except EngineFailed as error:
            cell.failure, cell.rates = f"{cell.engine}: {error}", []

    take_turns(lanes, num_rounds, turn, seconds=seconds)
    cells = [cell for _, cell in lanes]
    first = next((answers[cell.name] for cell in cells if cell.name in answers), None)
    for cell in cells:
        if first is not None and cell.name in answers and not point.is_prefill:
            cell.same_ids = answers[cell.name].same_ids(first)
    return cells


def turned(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the prompts with their first `count` ids at the end, so that no turn meets another's in a prefix cache."""
    return [[*ids[count % len(ids) :], *ids[: count % len(ids)]] for ids in prompts]


def prompts_of(checkpoint: Checkpoint, point: Point) -> list[list[int]]:
    """Parts of a long text, all different and equally long. Raises PerfError."""
    file = checkpoint.folder / "tokenizer.json"
    if not file.is_file():
        raise PerfError(f"{file} does not exist. Save the tokenizer in its fast form, or run spaceserve convert.")
    window = int(checkpoint.config["max_position_embeddings"])
    if point.prompt_tokens + point.new_tokens > window:
        raise PerfError(
            f"{point.prompt_tokens} prompt tokens and {point.new_tokens} new ones exceed the window of {window} of "
            f"{checkpoint.name}. Ask for fewer by --prompt-tokens, --prefill-tokens or --new-tokens."
        )
    ids: list[int] = Tokenizer.from_file(str(file)).encode(long_text(), add_special_tokens=False).ids
    if len(ids) < point.prompt_tokens + point.num_sequences:
        raise PerfError(
            f"{point.num_sequences} prompts of {point.prompt_tokens} tokens need a longer text than there is "
            f"({len(ids)} tokens). Ask for shorter ones."
        )
    apart = (len(ids) - point.prompt_tokens) // point.num_sequences
    return [ids[n * apart :][: point.prompt_tokens] for n in range(point.num_sequences)]


def chats_of(model: str, checkpoint: Checkpoint, options: argparse.Namespace) -> list[list[int]]:
    """Ids of the first turns in `options.prompts`, through the chat template, of at most --prompt-tokens."""
    window = int(checkpoint.config["max_position_embeddings"])
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    conversations = load_conversations(options.prompts)
    most = {"window": window, "max_tokens": max(options.new_tokens)}
    found = encode_conversations(model, tokenizer, conversations, "always", **most)
    return [ids for ids in found if len(ids) <= options.prompt_tokens]


def chats_at(point: Point, chats: Sequence[list[int]], file: Path) -> list[list[int]]:
    """So many of them. Raises PerfError if there are too few."""
    if len(chats) < point.num_sequences:
        raise PerfError(
            f"{file} has {len(chats)} prompts of at most {point.prompt_tokens} tokens; {point.name} needs "
            f"{point.num_sequences}. Raise --prompt-tokens."
        )
    return [list(ids) for ids in chats[: point.num_sequences]]


@dataclass(frozen=True)
class ModelResult:
    """All points of one model."""

    name: str
    engines: Mapping[str, dict[str, Any]]  # by name: its facts, or its `failure`
    points: Sequence[PointResult]


def compare(
    model: str, specs: Sequence[EngineSpec], points: Sequence[Point], options: argparse.Namespace
) -> ModelResult:
    """All engines on one model. Raises PerfError, ModelError."""
    checkpoint = Checkpoint.open(model)
    name = "demo" if model == "demo" else checkpoint.folder.resolve().name
    file = None if checkpoint.gguf is None else Path(checkpoint.gguf.path)
    if file is not None:
        name = file.stem
    prompts = {point: prompts_of(checkpoint, point) for point in points}
    if options.prompts is not None:
        chats = chats_of(model, checkpoint, options)
        prompts |= {point: chats_at(point, chats, options.prompts) for point in points if not point.is_prefill}
    common: dict[str, Any] = {
        "checkpoint": model if file is not None else str(checkpoint.folder),
        "gguf": None if file is None else str(file),
        "weights": "plain" if file is None else "gguf",
        "dtype": options.dtype,
        "threads": options.threads,
        "most_sequences": max(point.num_sequences for point in points),
        "most_ids": max(point.prompt_tokens + point.new_tokens for point in points),
        "synthetic_acceptance": [parse_chances(text) for text in CHANCES] if options.synthetic else [],
        "own_drafts": bool((checkpoint.config.get("space") or {}).get("acceptance")),
    }
    engines: dict[str, dict[str, Any]] = {}
    running: list[EngineProcess] = []
    results: list[PointResult] = []
    with ExitStack() as stack:
        for spec in specs:
            converted = options.converted / spec.name / name
            settings = {**common, "converted": str(converted), "url": spec.url}
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
            written = None if options.out is None else options.out / f"{name}-{spec.name}.log"
            try:
                if spec.name == LLAMA and file is None and not (gguf := Path(f"{converted}.gguf")).is_file():
                    write_gguf(checkpoint.folder, gguf)
                engine = EngineProcess(spec, settings, num_threads=options.threads, log=written)
            except (EngineFailed, ValueError) as error:
                engines[spec.name] = {"failure": str(error)}
                log(f"{name}: {spec.name}: {error}")
                continue
            running.append(stack.enter_context(engine))
            engines[spec.name] = dict(engine.facts)
        for point in points:
            log(f"{name}: {point.name}")
            cells = measure(running, point, prompts[point], num_rounds=options.rounds, seconds=options.point_seconds)
            ours = next((engine for engine in running if engine.spec.name == OURS), None)
            bounds: Mapping[str, Mapping[str, float]] = {}
            if ours is not None and not point.is_prefill and not ours.facts.get("is_remote"):
                bounds = ours.bounds(point)
            for cell in cells:
                cell.bound = bounds.get(cell.arm) if cell.engine == OURS else None
            results.append(PointResult(point, cells))
        for engine in running:
            engines[engine.spec.name]["resident_mib"] = engine.resident_mib
    return ModelResult(name, engines, results)


def run(options: argparse.Namespace) -> Report:
    specs, points = specs_of(options), points_of(options)
    results = [compare(model, specs, points, options) for model in options.model or ["demo"]]
    facts = {
        "threads": options.threads,
        "dtype": options.dtype,
        "load": "; ".join(
            f"{p.name}: {p.num_sequences} × {p.prompt_tokens} prompt tokens, {p.new_tokens} new" for p in points
        ),
        "prompts": "a long text" if options.prompts is None else f"{options.prompts.name}, through the chat template",
        "rounds": f"{options.rounds}; none begins once a point has taken {options.point_seconds:g} s",
        "drafts": "; ".join(label(parse_chances(text)) for text in CHANCES) if options.synthetic else "own",
    }
    return report(facts, results)


def report(facts: Mapping[str, object], results: Sequence[ModelResult]) -> Report:
    """Per model: rates, ratios of ours to the best other engine, and what each engine is."""
    tables, failures = [], []
    for result in results:
        tables += [f"## {result.name}\n", _rates(result), _ratios(result), _engines(result)]
        failures += [
            f"{result.name}: {name}: {of['failure']}" for name, of in result.engines.items() if "failure" in of
        ]
        failures += [f"{r.point.name}: {cell.failure}" for r in result.points for cell in r.cells if cell.failure]
    return Report("Engines side by side", NOTES, tables, {"models": [_record(r) for r in results]}, facts, failures)


def _rates(result: ModelResult) -> str:
    points = result.points
    rounds = [max((len(cell.rates) for cell in r.cells), default=0) for r in points]
    head = ["tokens/s", *(f"{r.point.name} (rounds: {n})" for r, n in zip(points, rounds, strict=True)), "same ids"]
    rows = []
    for number, cell in enumerate(points[0].cells):
        shown = []
        for one, best in ((r.cells[number], r.best_other) for r in points):
            rate = "failed" if not one.rates else f"{one.rate:.4g}" if one.rate < 1000 else f"{one.rate:.0f}"
            shown.append(f"**{rate}**" if one is best else rate)
        same = [one.same_ids for one in (r.cells[number] for r in points) if one.same_ids is not None]
        rows.append((cell.name, *shown, f"{statistics.fmean(same):.2f}" if same else "–"))
    return table(head, rows)


def _ratios(result: ModelResult) -> str:
    rows = []
    for r in result.points:
        for cell in r.cells:
            ratio, best = r.against_best(cell), r.best_other
            if cell.engine != OURS or ratio is None or best is None:
                continue
            bound, parts = r.bound_against_best(cell), ["–"] * 4
            if bound is not None and (b := cell.bound) is not None:
                parts = [f"{bound:.2f}", f"{b['tokens_per_step']:.2f}", f"{b['num_rows']:.1f}", f"{b['cost']:.2f}"]
            rows.append((cell.arm, r.point.name, best.name, ratio.shown(), rank(ratio.median), *parts))
    return table(("ours", "point", "best other", "ratio to it", "", "bound", "E", "rows", "cost"), rows)


def _engines(result: ModelResult) -> str:
    rows = []
    for name, of in result.engines.items():
        if "failure" in of:
            rows.append((name, "–", "–", f"not measured: {of['failure']}", "–"))
            continue
        memory = "–" if of["resident_mib"] is None else f"{of['resident_mib']:.0f} MiB"
        rows.append((name, of["version"], memory, of["settings"], of["lacks"]))
    return table(("engine", "version", "most memory", "settings", "what its figures leave out"), rows)


def _record(result: ModelResult) -> dict[str, Any]:
    points = []
    for r in result.points:
        cells = []
        for cell in r.cells:
            ratio = r.against_best(cell)
            more = {"against_best": ratio and asdict(ratio), "bound_against_best": r.bound_against_best(cell)}
            cells.append(asdict(cell) | more)
        best = r.best_other
        points.append({"name": r.point.name, **asdict(r.point), "best_other": best and best.name, "cells": cells})
    return {"name": result.name, "engines": result.engines, "points": points}


def specs_of(options: argparse.Namespace) -> list[EngineSpec]:
    """Which engines, in order. Raises PerfError."""
    drivers = dict(BUILT_IN) | {name: Path(file) for name, file in _pairs("--driver", options.driver).items()}
    pythons = {OURS: sys.executable, TRANSFORMERS: sys.executable} | _pairs("--engine", options.engine)
    unknown = [name for name in (*pythons, *options.without) if name not in drivers]
    if unknown:
        raise PerfError(
            f"{unknown[0]!r} is no engine; known are {', '.join(drivers)}. Add others by --driver NAME=FILE."
        )
    specs = [EngineSpec(name, python, drivers[name]) for name, python in pythons.items() if name not in options.without]
    specs += [
        EngineSpec(name, sys.executable, DRIVERS / "openai_driver.py", url)
        for name, url in _pairs("--server", options.server).items()
    ]
    if not specs:
        raise PerfError("--without leaves no engine.")
    return specs


def points_of(options: argparse.Namespace) -> list[Point]:
    """The batches, then the prefills. Raises PerfError."""
    new_tokens = options.new_tokens * (len(options.batch) if len(options.new_tokens) == 1 else 1)
    if len(new_tokens) != len(options.batch) or min(new_tokens) < 2:
        raise PerfError(
            f"--new-tokens is {','.join(map(str, options.new_tokens))}; it must be one number of at least 2, or one "
            f"for each of the {len(options.batch)} batches."
        )
    points = [Point(batch, options.prompt_tokens, new) for batch, new in zip(options.batch, new_tokens, strict=True)]
    return points + [Point(1, tokens, 1) for tokens in options.prefill_tokens]


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name or not value:
            what = {"--engine": "PYTHON", "--server": "URL"}.get(flag, "FILE")
            raise PerfError(f"{flag} is {text!r}; it must read NAME={what}.")
        pairs[name] = value
    return pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", action="append", help="folder of a checkpoint, hub id, or demo; repeatable [demo]")
    add("--engine", action="append", default=[], metavar="NAME=PYTHON",
        help=f"an engine, and the interpreter that has it: {', '.join(BUILT_IN)}; repeatable")  # fmt: skip
    add("--server", action="append", default=[], metavar="NAME=URL", help="a running OpenAI-compatible server")
    add("--driver", action="append", default=[], metavar="NAME=FILE", help="what drives another engine")
    add("--without", action="append", default=[], metavar="NAME", help="leave one out; repeatable")
    add("--converted", type=Path, default=Path("converted"), help="other formats' folder [converted]")
    add("--batch", type=numbers(1), default=[1, 8, 32], metavar="B,…", help="sequences [1,8,32]")
    add("--prompt-tokens", type=whole_from(1), default=128, help="before decoding is timed [128]")
    add("--prompts", type=Path, metavar="FILE",
        help="JSON lines of questions to decode from, through the chat template, instead of a long text")  # fmt: skip
    add("--new-tokens", type=numbers(1), default=[128, 64, 48], metavar="N,…", help="for each batch [128,64,48]")
    add("--prefill-tokens", type=numbers(1), default=[512], metavar="N,…", help="of prompts that are timed [512]")
    add("--no-synthetic", dest="synthetic", action="store_false", help="without synthetic acceptance")
    add("--rounds", type=whole_from(1), default=5, help="in which all take turns [5]")
    add("--point-seconds", type=float, default=120.0, help="after which no round begins [120]")
    add("--threads", type=whole_from(1), default=2, help="of every engine [2]")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of all [bfloat16]")
