"""The flags of `spaceserve bench`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from space_eval.bench_limits import Limits, seconds_of
from space_eval.load_dialect import DIALECTS
from space_eval.load_lengths import FORMS, LengthError, Lengths
from space_eval.load_shape import Closed, Open, Shape, Swing

Read = TypeVar("Read")

_EXAMPLES = """\
examples:
  spaceserve bench --smoke                                the embedded model, a few seconds: does it work at all?
  spaceserve bench --concurrency 1,8,32,64 --rounds 20 --out bench
                                                          20 pairs with and without drafts; table, JSON and plots
  spaceserve bench --model PATH --plain-server -- --num-threads 2 --kv-memory 1GiB
                                                          also against a server that never speculates;
                                                          what follows `--` are flags of `spaceserve serve`
  spaceserve bench --plain-server --starts 5              both started five times: two processes of one server differ by
                                                          some percent, and each for as long as it runs
  spaceserve bench --control --speculation auto,1,2,3     plain decoding twice, which shows how sure the machine is, and
                                                          fixed numbers of drafts beside the controller's choice
  spaceserve bench --url http://127.0.0.1:8080            a server that runs already; leave it otherwise idle
  spaceserve bench --url ours=http://a:8080 --url other=http://b:8000 --body '{"ignore_eos": true}'
                                                          two servers, round by round in turn; ratios to the first
  spaceserve bench --rate 1,2,4,8 --duration 30s --slo ttft=500ms,itl=50ms
                                                          open loop: Poisson arrivals, latency and goodput over rate
  spaceserve bench --rate file --prompts trace.jsonl      arrivals and lengths as a trace has them
  spaceserve bench --swing 1:64:5s --out bench            1 and 64 streams in turn, 5 seconds each
  spaceserve bench --prompt-tokens uniform:32:512 --output-tokens lognormal:128:0.7:1:1024
                                                          lengths drawn by a law

How to read it: an arm is a server, or a server with and without drafts. In a round every arm answers the same requests;
the arm that begins changes from round to round, and a ratio is always of one round, so that a machine that gets slower
slows both sides of it. The bounds beside a ratio are those of the median (95 %, bootstrap over
rounds; of several starts over these first).
Prefix caches are kept out: with spaceserve each round has a salt of its own, elsewhere each prompt begins with a line
of its own. Answers of one length end together and their successors' prompts are read together, which drafts undo:
compare throughput with --output-tokens uniform:LOW:HIGH. Quote no figure without the facts
that the record has: machine, commit, model, streams and k.
"""


class BenchError(ValueError):
    """Flags that cannot be used; the message names flag, value and cure."""


@dataclass(frozen=True)
class Settings:
    """What is measured, and of whom. `None`: as it is best for what is found."""

    urls: tuple[tuple[str, str], ...] = ()  # (name, address); empty: a server is started
    model: str = "demo"
    plain_server: bool = False
    num_starts: int = 1
    api: str = "openai"
    served_model: str | None = None
    concurrency: tuple[int, ...] = (1, 8, 32)
    rate: tuple[float | None, ...] = ()  # None: as the file says
    swing: Swing | None = None
    num_rounds: int = 4
    num_requests: int | None = None
    duration: float | None = None  # seconds
    num_warm_up: int | None = None
    output_tokens: Lengths = field(default_factory=lambda: Lengths.parse("128"))
    prompt_tokens: Lengths | None = None
    temperature: float = 0.0
    seed: int = 1
    speculation: tuple[str | int, ...] = ()
    control: bool = False
    stop_at_eos: bool = False
    prompts: Path | None = None
    limits: Limits | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    api_key_file: Path | None = None
    carbon_intensity: float | None = None  # grams of CO2e for a kWh
    out: Path | None = None

    @property
    def shapes(self) -> list[Shape]:
        if self.swing is not None:
            return [self.swing]
        if self.rate:
            return [Open(rate) for rate in self.rate]
        return [Closed(num_streams) for num_streams in self.concurrency]


_SMOKE: Mapping[str, Any] = {"concurrency": (1, 4), "num_rounds": 1, "output_tokens": Lengths.parse("16")}


def parse(argv: Sequence[str], commands: str) -> tuple[Settings, list[str]]:
    """Our settings, and the flags for `serve` behind `--`. `commands`: the end of the help."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    options = _parser(commands).parse_args(argv[:cut])
    given = {one.name: value for one in fields(Settings) if (value := getattr(options, one.name, None)) is not None}
    settings = Settings(**{**(_SMOKE if options.smoke else {}), **given})
    serve_flags = list(argv[cut + 1 :])
    if settings.urls and serve_flags:
        raise BenchError("Flags behind `--` are for a server that is started here; leave them out, or leave out --url.")
    if settings.urls and settings.num_starts > 1:
        raise BenchError("--starts: only servers that are started here can be started again; leave out --url.")
    if settings.urls and settings.plain_server:
        raise BenchError("--plain-server starts the same model without drafts; give --model, and leave out --url.")
    if settings.rate == (None,) and settings.prompts is None:
        raise BenchError("--rate file takes the arrivals of --prompts FILE; give a JSONL file with `arrival` seconds.")
    if settings.swing is not None and settings.num_requests is not None:
        raise BenchError("--requests: a swing ends with time; give --duration instead.")
    if len(settings.urls) > 1 and (settings.control or len(settings.speculation) > 1):
        flag = "--control" if settings.control else "--speculation with several values"
        raise BenchError(f"{flag} is about one server; give one --url, or --model.")
    names = [name for name, _ in settings.urls]
    if len(set(names)) < len(names):
        raise BenchError(f"--url: two servers are called {names[-1]!r}; give each its own NAME=http://…")
    return settings, serve_flags


def _parser(commands: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench",
        description="Load on any OpenAI or TGI endpoint: throughput and latency, with and without drafts, or of several"
        " servers side by side. Without --url a server is started here and stopped again.",
        epilog=_EXAMPLES + commands,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("servers")
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--url",
        dest="urls",
        action=_Urls,
        type=_url,
        metavar="[NAME=]URL",
        help="a running server, such as http://127.0.0.1:8080; may be given several times",
    )
    where.add_argument("--model", help="start a server for this model and stop it [demo]")
    group.add_argument(
        "--plain-server",
        action="store_const",
        const=True,
        help="compare with a second server, started with --speculation off: slowing plain decoding cannot help",
    )
    group.add_argument(
        "--starts", dest="num_starts", type=_number, metavar="N",
        help="start the servers so many times anew, --rounds on each: two of a kind differ for as long as they run [1]",
    )  # fmt: skip
    group.add_argument("--api", choices=list(DIALECTS), help="completions, chat completions or TGI [openai]")
    group.add_argument("--served-model", metavar="NAME", help="`model` of every request [the first that is served]")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="file whose first word is the servers' key")
    group.add_argument("--body", type=_object, metavar="JSON", help="fields of every request: '{\"ignore_eos\": true}'")
    group.add_argument(
        "--speculation",
        type=_speculations,
        metavar="auto|K[,...]",
        help="of each arm compared with plain, such as auto,1,3 [auto]; of several servers: said to ours, one only"
        " [their default]",
    )
    group.add_argument(
        "--control",
        action="store_const",
        const=True,
        help="measure plain decoding twice, on two arms: what their ratio lies off 1 is the machine's, not the drafts'",
    )
    group = parser.add_argument_group("load")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--concurrency", type=_numbers, metavar="N[,N...]", help="closed loop: streams at once [1,8,32]")
    shape.add_argument(
        "--rate", type=_rates, metavar="R[,R...]|file", help="open loop: requests/s, Poisson; file: as --prompts says"
    )
    shape.add_argument(
        "--swing", type=_told(lambda text: Swing.parse(text, seconds_of)), metavar="LOW:HIGH:PERIOD",
        help="streams that swing between two numbers, such as 1:64:5s",
    )  # fmt: skip
    group.add_argument("--rounds", dest="num_rounds", type=_number, metavar="N", help="of every arm, in turn [4]")
    how_long = group.add_mutually_exclusive_group()
    how_long.add_argument(
        "--requests", dest="num_requests", type=_number, metavar="N", help="per round and arm [two for each stream]"
    )
    how_long.add_argument(
        "--duration",
        type=_told(seconds_of),
        metavar="TIME",
        help="of a round, such as 30s; in closed loop what still runs is cut off [open loop: 10s; swing: 6 periods]",
    )
    group.add_argument(
        "--warm-up", dest="num_warm_up", type=_count, metavar="N", help="requests before [one for each stream]"
    )
    group.add_argument(
        "--output-tokens",
        "--max-tokens",
        type=_told(Lengths.parse),
        metavar="LENGTHS",
        help=f"of answers: {FORMS} [128]",
    )
    group.add_argument(
        "--prompt-tokens", type=_told(Lengths.parse), metavar="LENGTHS",
        help="of prompts, cut from a long text; as token ids where the server tokenizes [each prompt as it is]",
    )  # fmt: skip
    group.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="JSONL (prompt, question, turns; prompt_tokens, output_tokens, arrival) or text [function heads]",
    )  # fmt: skip
    group.add_argument("--temperature", type=_temperature, metavar="T", help="0 is greedy; requests are seeded [0]")
    group.add_argument("--seed", type=_count, metavar="N", help="of lengths, arrivals and the first request [1]")
    group.add_argument(
        "--stop-at-eos", action="store_const", const=True, help="ours only: answers may end early [full length]"
    )
    group = parser.add_argument_group("report")
    group.add_argument(
        "--slo", dest="limits", type=_told(Limits.parse), metavar="LIMITS",
        help="goodput counts requests within ttft=…, itl=… (mean per token), gap=… (longest silence), e2e=…",
    )  # fmt: skip
    group.add_argument(
        "--carbon-intensity", type=_grams, metavar="G", help="of your grid, in g CO2e per kWh: adds g CO2e per million "
        "tokens, where the server counts energy"
    )  # fmt: skip
    group.add_argument(
        "--out", type=Path, metavar="FOLDER", help="report.json, report.md, plots; FILE.json: that alone"
    )
    group.add_argument("--smoke", action="store_true", help="a few seconds: 1 and 4 streams, 1 pair, 16 tokens")
    return parser


class _Urls(argparse.Action):
    """Gathers what is given several times into a tuple."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.urls = (*(namespace.urls or ()), values)


def _url(text: str) -> tuple[str, str]:
    """Name and address; without a name it is the address itself."""
    named = re.fullmatch(r"([^=/:]+)=(.*)", text)
    return (named[1], named[2]) if named else (text, text)


def _told(read: Callable[[str], Read]) -> Callable[[str], Read]:
    """`read`, whose own words argparse then shows."""

    def told(text: str) -> Read:
        try:
            return read(text)
        except (LengthError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return told


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0; got {text!r}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


def _rates(text: str) -> tuple[float | None, ...]:
    if text == "file":
        return (None,)
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"must be numbers above 0, in requests per second, or `file`; got {text!r}")
    return rates


def _grams(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"must be grams of CO2e per kWh, from 0 to 10000; got {text!r}")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 2; got {text!r}")
    return value


def _speculations(text: str) -> tuple[str | int, ...]:
    return tuple(dict.fromkeys(part if part == "auto" else _number(part) for part in text.split(",")))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object; got {text!r}")
    return value
