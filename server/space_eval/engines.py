"""`spaceserve bench engines`: several inference engines side by side in one run, on the same weights and prompts.

Each engine runs in a process of its own, in an interpreter that has it; ours, transformers, and whoever is named.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import ModelError
from space_server.speculation.synthetic_acceptance import label, parse_chances
from tokenizers import Tokenizer
from tqdm import tqdm

from space_eval.bench.facts import commit, machine
from space_eval.engines_point import Point
from space_eval.engines_process import BUILT_IN, OURS, EngineFailed, EngineProcess, EngineSpec
from space_eval.engines_report import ModelResult, PointResult, to_markdown, write
from space_eval.engines_rounds import measure
from space_eval.flag_values import whole
from space_eval.prompts import long_text

TRANSFORMERS = "transformers"
CHANCES = (".78", ".57")

_EPILOG = """\
examples:
  spaceserve bench engines                                   the embedded model: ours and transformers
  spaceserve bench engines --engine openvino=venvs/openvino/bin/python --engine llama.cpp=venvs/llama/bin/python \\
    --converted converted --model demo --model llama-125m --out engines

An engine's own format is looked for under --converted: openvino/NAME (a folder, made by optimum-cli) and
llama.cpp/NAME.gguf (written when it is missing), where NAME is the model's folder's. The room's README says how the
interpreters are made. --drive NAME=FILE adds an engine of your own: FILE is as those in space_eval/engine_drives.
"""


class FlagError(ValueError):
    """A flag that cannot be used; the message names flag, value and cure."""


@dataclass(frozen=True)
class Settings:
    """What is compared."""

    models: Sequence[str]
    specs: Sequence[EngineSpec]
    points: Sequence[Point]
    chances: Sequence[tuple[float, ...]]
    num_rounds: int
    point_seconds: float
    num_threads: int
    dtype: str
    converted: Path
    out: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 1 where an engine failed, 2 for unusable flags or models."""
    options = _parser().parse_args(argv)
    try:
        settings = _settings(options)
        results = [_measure(model, settings) for model in settings.models]
    except (FlagError, ModelError) as error:
        return _fail(2, str(error))
    facts = _facts(settings)
    print(to_markdown(facts, results))
    if settings.out is not None:
        try:
            files = write(settings.out, facts, results)
        except OSError as error:
            return _fail(1, f"{settings.out} cannot be written: {error.strerror or error}.")
        for file in files:
            print(f"spaceserve bench engines: wrote {file}", file=sys.stderr)
    return 1 if any(_failures(result) for result in results) else 0


def _measure(model: str, settings: Settings) -> ModelResult:
    checkpoint = Checkpoint.open(model)
    name = "demo" if model == "demo" else checkpoint.folder.resolve().name
    prompts = {point: prompts_of(checkpoint, point) for point in settings.points}
    most = max(settings.points, key=lambda point: point.num_sequences).num_sequences
    own = bool((checkpoint.config.get("space") or {}).get("acceptance"))
    common: dict[str, Any] = {
        "checkpoint": str(checkpoint.folder),
        "dtype": settings.dtype,
        "threads": settings.num_threads,
        "most_sequences": most,
        "most_ids": max(point.prompt_tokens + point.new_tokens for point in settings.points),
        "synthetic_acceptance": settings.chances,
        "own_drafts": own,
    }
    engines: dict[str, dict[str, Any]] = {}
    running: list[EngineProcess] = []
    results: list[PointResult] = []
    with ExitStack() as stack:
        for spec in settings.specs:
            converted = {"converted": str(settings.converted / spec.name / name)}
            try:
                engine = EngineProcess(
                    spec, common | converted, num_threads=settings.num_threads, log=_log(settings.out, name, spec)
                )
            except EngineFailed as error:
                engines[spec.name] = {"failure": str(error)}
                print(f"spaceserve bench engines: {name}: {error}", file=sys.stderr)
                continue
            running.append(stack.enter_context(engine))
            engines[spec.name] = dict(engine.facts)
        num_turns = len(settings.points) * settings.num_rounds * sum(len(engine.arms) for engine in running)
        with tqdm(total=num_turns, desc=name, unit="turn", file=sys.stderr, disable=None) as progress:
            for point in settings.points:
                cells = measure(
                    running,
                    point,
                    prompts[point],
                    num_rounds=settings.num_rounds,
                    seconds=settings.point_seconds,
                    turned=progress.update,
                )
                ours = next((engine for engine in running if engine.spec.name == OURS), None)
                bounds = ours.bounds(point) if ours is not None and not point.is_prefill else {}
                for cell in cells:
                    if cell.engine == OURS:
                        cell.bound = bounds.get(cell.arm)
                results.append(PointResult(point, cells))
        for engine in running:
            engines[engine.spec.name]["resident_mib"] = engine.resident_mib
    return ModelResult(name, engines, results)


def prompts_of(checkpoint: Checkpoint, point: Point) -> list[list[int]]:
    """Parts of a long text, all different and equally long. Raises FlagError."""
    file = checkpoint.folder / "tokenizer.json"
    if not file.is_file():
        raise FlagError(f"{file} does not exist. Save the tokenizer in its fast form, or run spaceserve convert.")
    window = int(checkpoint.config["max_position_embeddings"])
    if point.prompt_tokens + point.new_tokens > window:
        raise FlagError(
            f"{point.prompt_tokens} prompt tokens and {point.new_tokens} new ones exceed the window of {window} of "
            f"{checkpoint.name}. Ask for fewer by --prompt-tokens, --prefill-tokens or --new-tokens."
        )
    ids: list[int] = Tokenizer.from_file(str(file)).encode(long_text(), add_special_tokens=False).ids
    if len(ids) < point.prompt_tokens + point.num_sequences:
        raise FlagError(
            f"{point.num_sequences} prompts of {point.prompt_tokens} tokens need a longer text than there is "
            f"({len(ids)} tokens). Ask for shorter ones."
        )
    apart = (len(ids) - point.prompt_tokens) // point.num_sequences
    return [ids[n * apart :][: point.prompt_tokens] for n in range(point.num_sequences)]


def _failures(result: ModelResult) -> bool:
    started = any("failure" in said for said in result.engines.values())
    return started or any(cell.failure is not None for r in result.points for cell in r.cells)


def _log(out: Path | None, model: str, spec: EngineSpec) -> Path | None:
    if out is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    return out / f"{model}-{spec.name}.log"


def _facts(settings: Settings) -> Mapping[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "threads": settings.num_threads,
        "dtype": settings.dtype,
        "load": "; ".join(
            f"{p.name}: {p.num_sequences} × {p.prompt_tokens} prompt tokens, {p.new_tokens} new"
            for p in settings.points
        ),
        "rounds": f"{settings.num_rounds}; none begins once a point has taken {settings.point_seconds:g} s",
        "drafts": "; ".join(label(chances) for chances in settings.chances) or "own",
    }


def _settings(options: argparse.Namespace) -> Settings:
    drives = dict(BUILT_IN) | {name: Path(file) for name, file in _pairs("--drive", options.drive).items()}
    pythons = {OURS: sys.executable, TRANSFORMERS: sys.executable} | _pairs("--engine", options.engine)
    unknown = [name for name in (*pythons, *options.without) if name not in drives]
    if unknown:
        raise FlagError(f"{unknown[0]!r} is no engine; known are {', '.join(drives)}. Add others by --drive NAME=FILE.")
    specs = [EngineSpec(name, python, drives[name]) for name, python in pythons.items() if name not in options.without]
    if not specs:
        raise FlagError("--without leaves no engine.")
    new_tokens = options.new_tokens * (len(options.batch) if len(options.new_tokens) == 1 else 1)
    if len(new_tokens) != len(options.batch) or min(new_tokens) < 2:
        raise FlagError(
            f"--new-tokens is {','.join(map(str, options.new_tokens))}; it must be one number of at least 2, or one "
            f"for each of the {len(options.batch)} batches."
        )
    points = [Point(batch, options.prompt_tokens, new) for batch, new in zip(options.batch, new_tokens, strict=True)]
    points += [Point(1, tokens, 1) for tokens in options.prefill_tokens]
    return Settings(
        models=options.model or ["demo"],
        specs=specs,
        points=points,
        chances=[parse_chances(text) for text in CHANCES] if options.synthetic else [],
        num_rounds=options.rounds,
        point_seconds=options.point_seconds,
        num_threads=options.threads,
        dtype=options.dtype,
        converted=options.converted,
        out=options.out,
    )


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name or not value:
            raise FlagError(f"{flag} is {text!r}; it must read NAME={'PYTHON' if flag == '--engine' else 'FILE'}.")
        pairs[name] = value
    return pairs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench engines",
        description="Several engines in one run: decoding after the prompt by batch, and reading a prompt, in tokens "
        "per second; ours plain and with drafts that come true by decree, beside the most that these can bring.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", action="append", help="folder of a checkpoint, hub id, or demo; repeatable [demo]")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"an engine, and the interpreter that has it: {', '.join(BUILT_IN)}; repeatable",
    )
    parser.add_argument("--drive", action="append", default=[], metavar="NAME=FILE", help="what drives another engine")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave one out; repeatable")
    parser.add_argument("--converted", type=Path, default=Path("converted"), help="other formats' folder [converted]")
    parser.add_argument("--batch", type=_numbers, default=[1, 8, 32], metavar="B,…", help="sequences [1,8,32]")
    parser.add_argument("--prompt-tokens", type=whole, default=128, help="before decoding is timed [128]")
    parser.add_argument(
        "--new-tokens", type=_numbers, default=[128, 64, 48], metavar="N,…", help="for each of the batches [128,64,48]"
    )
    parser.add_argument(
        "--prefill-tokens", type=_numbers, default=[512], metavar="N,…", help="of prompts that are timed [512]"
    )
    parser.add_argument("--no-synthetic", dest="synthetic", action="store_false", help="no drafts by decree")
    parser.add_argument("--rounds", type=whole, default=5, help="in which all take turns [5]")
    parser.add_argument("--point-seconds", type=float, default=120.0, help="after which no round begins [120]")
    parser.add_argument("--threads", type=whole, default=2, help="of every engine [2]")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of all [bfloat16]")
    parser.add_argument("--out", type=Path, help="folder for engines.json, engines.md and logs [table only]")
    return parser


def _numbers(text: str) -> list[int]:
    return [whole(word.strip()) for word in text.split(",")]


def _fail(status: int, reason: str) -> int:
    print(f"spaceserve bench engines: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
