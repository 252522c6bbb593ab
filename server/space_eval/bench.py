"""`spaceserve bench`: tokens per second and latency of a server under concurrent streams, with and without drafts.

Every round is a pair: the same requests once with plain decoding and once speculating, in turn first and second, so
that a machine that gets slower in between slows both. A ratio is always of one pair.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from space_eval.bench_facts import facts
from space_eval.bench_prompts import built_in
from space_eval.bench_report import Row, record, rows, table
from space_eval.bench_round import Load, Round, run_round
from space_eval.bench_server import ServerError, ServerProcess, cpu_seconds
from space_eval.load_client import Endpoint, LoadError, get_json
from space_eval.prompts import PromptError, load_prompts

PLAIN = "off"

COMMANDS: Mapping[str, tuple[str, str]] = {
    "overhead": ("space_eval.overhead", "what masks cost: step time by rows, and the batch at which they stop paying"),
    "simulate": ("space_eval.simulate", "the scheduler and controller against measured cost, at any scale, in seconds"),
}
"""What may follow `spaceserve bench`: a module, loaded when asked for, whose `main(argv)` gives the exit code."""

_EXAMPLES = """\
examples:
  spaceserve bench --smoke                                the embedded model, a few seconds: does it work at all?
  spaceserve bench --concurrency 1,8,32,64                the embedded model, started here and stopped again
  spaceserve bench --model PATH --temperature 0.8 --prompts humaneval.jsonl -- --num-threads 2 --kv-memory 1GiB
                                                          what follows `--` are flags of `spaceserve serve`
  spaceserve bench --url http://127.0.0.1:8080            a server that runs already; leave it otherwise idle

The prefix cache is kept out of it: each round has a salt of its own, so that every prompt is computed. The record
(--out) has the machine, the commit, the model, the batch (streams) and k; quote no figure without them.
"""


class BenchError(ValueError):
    """Flags that cannot be used; the message names flag, value and cure."""


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    concurrency: tuple[int, ...]  # numbers of streams at once
    num_rounds: int  # pairs
    num_requests: int | None  # per round; None: two for each stream
    max_tokens: int
    temperature: float
    seed: int
    speculation: str | int  # of the speculating half
    prompts: Path | None


NORMAL = Settings((1, 8, 32), 4, None, 128, 0.0, 1, "auto", None)
SMOKE = Settings((1, 4), 1, None, 16, 0.0, 1, "auto", None)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 1 where the server failed, 2 for unusable flags."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in COMMANDS:
        status: int = importlib.import_module(COMMANDS[given[0]][0]).main(given[1:])
        return status
    options, serve_flags = _options(given)
    try:
        settings = _settings(options)
        api_key = _api_key(options.api_key_file)
        with ExitStack() as stack:
            server: ServerProcess | None = None
            if options.url is None:
                _say(f"starting a server for {options.model}")
                server = stack.enter_context(ServerProcess(["--model", options.model, *serve_flags]))
            elif serve_flags:
                raise BenchError(
                    "Flags behind `--` are for a server that is started here; leave them out, or leave out --url."
                )
            endpoint = Endpoint.parse(server.url if server is not None else options.url, api_key)
            made = asyncio.run(measure(endpoint, settings, _processes(server)))
    except (BenchError, PromptError) as error:
        _say(str(error))
        return 2
    except (LoadError, ServerError) as error:
        _say(str(error))
        return 1
    made["facts"]["serve_flags"] = serve_flags
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        _say(f"record: {options.out}")
    return 0


async def measure(
    endpoint: Endpoint, settings: Settings, cpu_seconds: Callable[[], Mapping[str, float]]
) -> dict[str, Any]:
    """The record of all rounds; the table goes to stdout. Raises BenchError, PromptError, LoadError."""
    info = await get_json(endpoint, "/info")
    window = info.get("max_total_tokens")
    if window is None:
        raise LoadError("The server is not ready: it does not know its model yet.")
    if settings.max_tokens >= window:
        raise BenchError(f"--max-tokens is {settings.max_tokens}; it must be below the model's window of {window}.")
    texts = built_in() if settings.prompts is None else load_prompts(settings.prompts)
    load = Load(
        prompts=[prompt.text for prompt in texts],
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        truncate_prompt_tokens=window - settings.max_tokens,
    )
    found: list[Row] = []
    total = sum(2 * (settings.num_rounds + 1) * _num_requests(settings, streams) for streams in settings.concurrency)
    with tqdm(total=total, unit="request", file=sys.stderr, disable=None) as progress:

        async def one(streams: int, speculation: str | int, name: str) -> Round:
            progress.set_description(f"{streams} streams, speculation {speculation}, {name}")
            made = await run_round(
                endpoint,
                load,
                num_streams=streams,
                num_requests=_num_requests(settings, streams),
                speculation=speculation,
                salt=f"bench {os.getpid()} {streams} {speculation} {name}",
                cpu_seconds=cpu_seconds,
            )
            progress.update(len(made.exchanges))
            return made

        for streams in settings.concurrency:
            for speculation in (PLAIN, settings.speculation):
                await one(streams, speculation, "warm-up")
            pairs: list[tuple[Round, Round]] = []
            for number in range(settings.num_rounds):
                name = f"round {number + 1}/{settings.num_rounds}"
                if number % 2:
                    fast = await one(streams, settings.speculation, name)
                    pairs.append((await one(streams, PLAIN, name), fast))
                else:
                    plain = await one(streams, PLAIN, name)
                    pairs.append((plain, await one(streams, settings.speculation, name)))
            found += rows(streams, pairs)
    known = facts(info)
    print(f"{known['id']} {known['dtype']} on {known['device_type']}; {known['machine']}; commit {known['commit']}")
    print(f"{settings.max_tokens} tokens per answer, temperature {settings.temperature:g}, {len(texts)} prompts\n")
    print(table(found))
    shown = {**asdict(settings), "prompts": None if settings.prompts is None else settings.prompts.name}
    return record(known, shown, found)


def _num_requests(settings: Settings, streams: int) -> int:
    return 2 * streams if settings.num_requests is None else settings.num_requests


def _processes(server: ServerProcess | None) -> Callable[[], Mapping[str, float]]:
    """Processor seconds so far by process; none of a server that runs elsewhere."""

    def used() -> Mapping[str, float]:
        if server is None:
            return {}
        workers = sum(cpu_seconds(pid) for pid in server.worker_pids())
        return {"router": cpu_seconds(server.pid), "workers": workers, "client": cpu_seconds(os.getpid())}

    return used


def _settings(options: argparse.Namespace) -> Settings:
    preset = SMOKE if options.smoke else NORMAL
    given = {name: value for name in asdict(preset) if (value := getattr(options, name)) is not None}
    return Settings(**{**{name: getattr(preset, name) for name in asdict(preset)}, **given})


def _api_key(file: Path | None) -> str | None:
    """The first key of a file; keys are never given on the command line, where every process can read them."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise BenchError(f"--api-key-file {file}: there is no key in it.") from None


def _commands() -> str:
    lines = [f"  spaceserve bench {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["\nother benchmarks, each with a --help of its own:", *lines])


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and those of `serve` behind `--`."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="spaceserve bench",
        description=(__doc__ or "").partition(":")[2].strip(),
        epilog=_EXAMPLES + _commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a running server; its address, such as http://127.0.0.1:8080")
    where.add_argument("--model", default="demo", help="start a server for this model and stop it [default: demo]")
    parser.add_argument(
        "--concurrency", type=_numbers, metavar="N[,N...]", help="streams at once, one after the other [1,8,32]"
    )
    parser.add_argument("--rounds", dest="num_rounds", type=_number, metavar="N", help="pairs of rounds [4]")
    parser.add_argument(
        "--requests", dest="num_requests", type=_number, metavar="N", help="requests per round [two for each stream]"
    )
    parser.add_argument("--max-tokens", type=_number, metavar="N", help="tokens of each answer, exactly [128]")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="0 is greedy; requests are seeded [0]")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the first request; others count up [1]")
    parser.add_argument(
        "--speculation", type=_speculation, metavar="auto|K", help="of the half that is compared with plain [auto]"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL (prompt, question, turns) or text [built-in function heads]"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file whose first word is the server's key")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record as JSON")
    parser.add_argument("--smoke", action="store_true", help="a few seconds: 1 and 4 streams, 1 pair, 16 tokens")
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 2; got {text!r}")
    return value


def _speculation(text: str) -> str | int:
    return text if text == "auto" else _number(text)


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
