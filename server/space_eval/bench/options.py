"""The flags of `spaceserve bench`, durations, and goodput limits."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from space_eval.bench.arms import APIS, Exchange
from space_eval.bench.workload import FORMS, Closed, Lengths, LoadShape, Open, Swing
from space_eval.flags import FlagError, check_out, number_in, whole, whole_from

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
                                                          lengths drawn at random

How to read it: an arm is a server, or a server with and without drafts. In a round every arm answers the same requests;
the arm that begins changes from round to round, and a ratio is always of one round, so that a machine that gets slower
slows both sides of it. The bounds beside a ratio are those of the median (95 %, bootstrap over
rounds; of several starts over these first).
Prefix caches are kept out: with spaceserve each round has a salt of its own, elsewhere each prompt begins with a line
of its own. Answers of one length end together and their successors' prompts are read together, which drafts undo:
compare throughput with --output-tokens uniform:LOW:HIGH. Quote no figure without the facts
that the record has: machine, commit, model, streams and k.
"""


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a measurement. `None`: chosen by the servers found."""

    urls: tuple[tuple[str, str], ...] = ()  # (name, address); empty: a server is started
    model: str = "demo"
    plain_server: bool = False
    num_starts: int = 1
    api: str = "openai"
    served_model: str | None = None
    concurrency: tuple[int, ...] = (1, 8, 32)
    rate: tuple[float | None, ...] = ()  # None: arrivals of the file
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
    cacert: Path | None = None
    carbon_intensity: float | None = None  # grams of CO2e per kWh
    out: Path | None = None

    @property
    def shapes(self) -> list[LoadShape]:
        if self.swing is not None:
            return [self.swing]
        if self.rate:
            return [Open(rate) for rate in self.rate]
        return [Closed(num_streams) for num_streams in self.concurrency]

    def requests_of(self, shape: LoadShape) -> int | None:
        """Return the requests of a round; None if time ends it."""
        return None if self.duration is not None else self.num_requests or shape.default_requests

    def seconds_of(self, shape: LoadShape) -> float | None:
        """Return the duration of a round; None if the number of requests ends it."""
        return shape.default_seconds if self.duration is None and self.num_requests is None else self.duration

    def warm_up_of(self, shape: LoadShape) -> int:
        """Return the warm-up requests of each arm before the first round."""
        return shape.warm_up_streams if self.num_warm_up is None else self.num_warm_up


_SMOKE: Mapping[str, Any] = {"concurrency": (1, 4), "num_rounds": 1, "output_tokens": Lengths.parse("16")}


def parse(argv: Sequence[str], commands: str) -> tuple[BenchSettings, list[str]]:
    """Return the settings, and the `serve` flags after `--`. `commands`: text at the end of the help."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    options = _parser(commands).parse_args(argv[:cut])
    given = {
        one.name: value for one in fields(BenchSettings) if (value := getattr(options, one.name, None)) is not None
    }
    preset = _SMOKE if options.smoke else {}
    settings = BenchSettings(**{**preset, **given, "urls": tuple(options.urls or ())})
    serve_flags = list(argv[cut + 1 :])
    if settings.urls and serve_flags:
        raise FlagError("Flags behind `--` are for a server that is started here; leave them out, or leave out --url.")
    if settings.urls and settings.num_starts > 1:
        raise FlagError("--starts: only servers that are started here can be started again; leave out --url.")
    if settings.urls and settings.plain_server:
        raise FlagError("--plain-server starts the same model without drafts; give --model, and leave out --url.")
    if settings.rate == (None,) and settings.prompts is None:
        raise FlagError("--rate file takes the arrivals of --prompts FILE; give a JSONL file with `arrival` seconds.")
    if settings.swing is not None and settings.num_requests is not None:
        raise FlagError("--requests: a swing ends with time; give --duration instead.")
    if len(settings.urls) > 1 and (settings.control or len(settings.speculation) > 1):
        flag = "--control" if settings.control else "--speculation with several values"
        raise FlagError(f"{flag} is about one server; give one --url, or --model.")
    names = [name for name, _ in settings.urls]
    if len(set(names)) < len(names):
        raise FlagError(f"--url: two servers are called {names[-1]!r}; give each its own NAME=http://…")
    if settings.out is not None:
        check_out(settings.out)  # now, and not when everything has been measured
    return settings, serve_flags


# fmt: off
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
    _add(where, "--url", "[NAME=]URL", _url,
         "a running server, such as http://127.0.0.1:8080; may be given several times",
         dest="urls", action="append")
    where.add_argument("--model", help="start a server for this model and stop it [demo]")
    _switch(group, "--plain-server", "compare with a second server, started with --speculation off: slowing plain "
            "decoding cannot help")
    _add(group, "--starts", "N", whole,
         "start the servers so many times anew, --rounds on each: two of a kind differ "
         "for as long as they run [1]", dest="num_starts")
    group.add_argument("--api", choices=list(APIS), help="completions, chat completions or TGI [openai]")
    _add(group, "--served-model", "NAME", str, "`model` of every request [the first that is served]")
    _add(group, "--api-key-file", "FILE", Path, "file whose first word is the servers' key")
    _add(group, "--cacert", "FILE", Path,
         "with https, authorities that are trusted beside the system's, PEM [else: SSL_CERT_FILE]")
    _add(group, "--body", "JSON", _object, "fields of every request: '{\"ignore_eos\": true}'")
    _add(group, "--speculation", "auto|K[,...]", _speculations,
         "of each arm compared with plain, such as auto,1,3 [auto]; "
         "of several servers: sent to ours, one only [their default]")
    _switch(group, "--control", "measure plain decoding twice, on two arms: what their ratio lies off 1 is the "
            "machine's, not the drafts'")
    group = parser.add_argument_group("load")
    shape = group.add_mutually_exclusive_group()
    _add(shape, "--concurrency", "N[,N...]", _numbers, "closed loop: streams at once [1,8,32]")
    _add(shape, "--rate", "R[,R...]|file", _rates, "open loop: requests/s, Poisson; file: as --prompts says")
    _add(shape, "--swing", "LOW:HIGH:PERIOD", _checked(lambda text: Swing.parse(text, seconds_of)),
         "streams that swing between two numbers, such as 1:64:5s")
    _add(group, "--rounds", "N", whole, "of every arm, in turn [4]", dest="num_rounds")
    how_long = group.add_mutually_exclusive_group()
    _add(how_long, "--requests", "N", whole, "per round and arm [two for each stream]", dest="num_requests")
    _add(how_long, "--duration", "TIME", _checked(seconds_of),
         "of a round, such as 30s; in closed loop what still runs "
         "is cut off [open loop: 10s; swing: 6 periods]")
    _add(group, "--warm-up", "N", whole_from(0), "requests before [one for each stream]", dest="num_warm_up")
    lengths = _checked(Lengths.parse)
    words = f"of answers: {FORMS} [128]"
    group.add_argument("--output-tokens", "--max-tokens", metavar="LENGTHS", type=lengths, help=words)
    _add(group, "--prompt-tokens", "LENGTHS", lengths,
         "of prompts, cut from a long text; as token ids where the server "
         "tokenizes [each prompt as it is]")
    _add(group, "--prompts", "FILE", Path, "JSONL (prompt, question, turns; prompt_tokens, output_tokens, arrival) or "
         "text [function heads]")
    _add(group, "--temperature", "T", number_in(0, 2), "0 is greedy; requests are seeded [0]")
    _add(group, "--seed", "N", whole_from(0), "of lengths, arrivals and the first request [1]")
    _switch(group, "--stop-at-eos", "ours only: answers may end early [full length]")
    group = parser.add_argument_group("report")
    _add(group, "--slo", "LIMITS", _checked(Limits.parse),
         "goodput counts requests within ttft=…, itl=… (mean per token), gap=… (longest silence), e2e=…", dest="limits")
    _add(group, "--carbon-intensity", "G", number_in(0, 10_000, "grams of CO2e per kWh,"),
         "of your grid, in g CO2e per kWh: "
         "adds g CO2e per million tokens, where the server counts energy")
    _add(group, "--out", "FOLDER", Path, "report.json, report.md, plots; FILE.json: that alone")
    _switch(group, "--smoke", "a few seconds: 1 and 4 streams, 1 pair, 16 tokens")
    return parser
# fmt: on


def _add(
    group: argparse._ActionsContainer, flag: str, metavar: str, read: Callable[[str], Any], words: str, **more: Any
) -> None:
    group.add_argument(flag, metavar=metavar, type=read, help=words, **more)


def _switch(group: argparse._ActionsContainer, flag: str, words: str) -> None:
    """Add a switch whose default is None, so that presets do not override given flags."""
    group.add_argument(flag, action="store_const", const=True, help=words)


def _url(text: str) -> tuple[str, str]:
    """Parse name and address; the default name is the address."""
    named = re.fullmatch(r"([^=/:]+)=(.*)", text)
    return (named[1], named[2]) if named else (text, text)


def _checked(read: Callable[[str], Read]) -> Callable[[str], Read]:
    """Wrap `read` so that argparse shows its error message."""

    def checked(text: str) -> Read:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(whole, text.split(",")))


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


def _speculations(text: str) -> tuple[str | int, ...]:
    return tuple(dict.fromkeys(part if part == "auto" else whole(part) for part in text.split(",")))


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object; got {text!r}")
    return value


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NAMES = {"ttft": "to the first token", "itl": "per token after it, mean", "gap": "longest silence", "e2e": "whole"}


def seconds_of(text: str) -> float:
    """Parse `500ms`, `5s` or `2m`; a bare number is seconds. Raises ValueError."""
    number = text.rstrip("ushm")
    unit = text[len(number) :] or "s"
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < 1e9:
        raise ValueError(f"{text!r} is no duration: give one such as 500ms, 5s or 2m")
    return value


@dataclass(frozen=True)
class Limits:
    """Latency limits of goodput in seconds, by name, see NAMES."""

    seconds: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Parse `ttft=500ms,itl=50ms`. Raises ValueError."""
        found = []
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in NAMES:
                raise ValueError(f"{part!r} is no limit: give NAME=DURATION with {', '.join(NAMES)}")
            found.append((name, seconds_of(value)))
        return cls(tuple(found))

    def kept(self, exchange: Exchange) -> bool:
        """Return whether the answer is complete and within every limit."""
        if not exchange.finished or not exchange.events:
            return False
        taken = {
            "ttft": exchange.first_token_seconds,
            "itl": exchange.seconds_per_token,
            "gap": max(exchange.event_gaps, default=0.0),
            "e2e": exchange.seconds,
        }
        return all(taken[name] <= limit for name, limit in self.seconds)

    def num_kept(self, exchanges: Sequence[Exchange]) -> int:
        return sum(map(self.kept, exchanges))
