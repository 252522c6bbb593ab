"""The load of a round: its requests, redrawn for every round, and the pattern in which they arrive."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from space_common.http_client import HttpError

from space_eval.bench.arms import LoadRequest
from space_eval.data import FIELDS, json_lines, load_prompts, text_of
from space_eval.flags import RecordError


@dataclass(frozen=True)
class Workload:
    """Generates the requests of a round."""

    recorded: Sequence[Recorded]  # used in turn
    output_tokens: Lengths
    prompt_tokens: Lengths | None = None  # None: each prompt as it is
    text: str = ""  # source of prompts of a given length
    ids: Sequence[int] = ()  # `text` as token ids, for prompts of exact length; empty: text is sent
    characters_per_token: float = 4.0  # as English has; used if the server has no /tokenize
    seed: int = 1

    @property
    def has_given_lengths(self) -> bool:
        """Whether any prompt has a given length."""
        return self.prompt_tokens is not None or any(one.text is None for one in self.recorded)

    @property
    def max_output_tokens(self) -> int:
        return max([self.output_tokens.high, *(one.output_tokens or 1 for one in self.recorded)])

    def requests(self, round_number: int, rate: float | None = None, *, mark: str = "") -> Iterator[LoadRequest]:
        """Yield requests endlessly. `rate`: Poisson arrivals per second; None: arrivals of the file, if it has any.

        `mark`: prefix of every text prompt, so that a server without salts has no cached prefix of it.
        """
        source = random.Random(f"{self.seed} {round_number}")
        clock = 0.0
        for number in itertools.count():
            one = self.recorded[number % len(self.recorded)]
            output_tokens = one.output_tokens or self.output_tokens.draw(source)
            prompt = self._prompt(one, source, mark and f"{mark}.{number}\n")
            if rate is not None:
                clock += source.expovariate(rate)
            elif one.arrival is not None:
                clock = one.arrival - (self.recorded[0].arrival or 0.0) + self._length * (number // len(self.recorded))
            yield LoadRequest(number, prompt, output_tokens, clock)

    @property
    def _length(self) -> float:
        """Seconds from one pass over the file to the next: its duration plus one mean gap."""
        first, last = self.recorded[0].arrival or 0.0, self.recorded[-1].arrival or 0.0
        return (last - first) * len(self.recorded) / max(1, len(self.recorded) - 1)

    def _prompt(self, one: Recorded, source: random.Random, mark: str) -> str | tuple[int, ...]:
        length = None if one.text is not None and self.prompt_tokens is None else one.prompt_tokens
        if length is None and self.prompt_tokens is not None:
            length = self.prompt_tokens.draw(source)
        if length is None:
            return mark + (one.text or "")
        if self.ids:
            start = source.randrange(len(self.ids))
            return tuple(self.ids[(start + place) % len(self.ids)] for place in range(length))
        num_characters = max(1, round(length * self.characters_per_token) - len(mark))
        start = source.randrange(len(self.text))
        return mark + (self.text[start:] + self.text * (num_characters // len(self.text) + 1))[:num_characters]


FORMS = "N, uniform:LOW:HIGH, normal:MEAN:SPREAD[:LOW:HIGH] or lognormal:MEDIAN:SIGMA[:LOW:HIGH]"
_NUM_PARAMETERS = {"fixed": (1,), "uniform": (2,), "normal": (2, 4), "lognormal": (2, 4)}


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, from `low` to `high`.

    normal: mean and standard deviation. lognormal: median, and standard deviation of the logarithm. Values are clamped
    to the bounds; the default upper bound is 4 standard deviations.
    """

    form: str  # as given by the user
    distribution: str
    parameters: tuple[float, ...]
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse a distribution. Raises ValueError, which lists the known forms."""
        name, *rest = text.split(":") if ":" in text else ("fixed", text)
        try:
            given = [float(part) for part in rest]
        except ValueError:
            given = []
        if len(given) not in _NUM_PARAMETERS.get(name, ()) or not all(map(math.isfinite, given)):
            raise ValueError(f"{text!r} is no length: give {FORMS}.")
        has_spread = name in ("normal", "lognormal")
        bounds = given[2:] if has_spread else given
        low, high = (min(bounds), max(bounds)) if bounds else (1.0, _four_deviations(name, *given))
        if low < 1 or any(bound != int(bound) for bound in bounds) or given[0] < 1 or given[-1] < 0:
            raise ValueError(f"{text!r}: lengths are whole numbers of at least 1. Give {FORMS}.")
        if bounds != sorted(bounds):
            raise ValueError(f"{text!r}: the lower bound {bounds[0]:g} is above the upper one, {bounds[1]:g}.")
        if has_spread and given[1] < 0:
            raise ValueError(f"{text!r}: the spread must be at least 0; got {given[1]:g}.")
        return cls(text, name, tuple(given), int(low), int(high))

    def draw(self, source: random.Random) -> int:
        """Draw the next length."""
        first, second, *_ = (*self.parameters, 0.0)
        match self.distribution:
            case "uniform":
                drawn: float = source.randint(int(first), int(second))
            case "normal":
                drawn = source.gauss(first, second)
            case "lognormal":
                drawn = source.lognormvariate(math.log(first), second)
            case _:
                drawn = first
        return min(max(round(drawn), self.low), self.high)


def _four_deviations(name: str, mean: float, spread: float) -> float:
    return math.ceil(mean + 4 * spread if name == "normal" else mean * math.exp(4 * min(spread, 5.0)))


PROMPT_LENGTHS = ("prompt_tokens", "input_length")
OUTPUT_LENGTHS = ("output_tokens", "max_tokens", "output_length")


@dataclass(frozen=True)
class Recorded:
    """One line of a workload file."""

    text: str | None  # None: only its length is given
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    arrival: float | None = None  # seconds after the first


def load_recorded(path: Path) -> list[Recorded]:
    """Read the lines of `path`; a file that does not end in .jsonl is one prompt. Raises RecordError.

    A line has a text (`prompt`, `question`, `turns`, ...) or a length (`prompt_tokens`, `input_length`), and may have
    the answer's (`output_tokens`, `max_tokens`, `output_length`) and an arrival: `arrival` in seconds, or `timestamp`
    in milliseconds, as published traces have it.
    """
    if path.suffix != ".jsonl" or not path.is_file():
        return [Recorded(text) for text in load_prompts(path)]
    recorded = [_recorded(record, f"{path}:{number}") for number, record in json_lines(path)]
    if not recorded:
        raise RecordError(f"{path} holds no request. Give at least one JSON line with `prompt` or `prompt_tokens`.")
    arrivals = [one.arrival for one in recorded if one.arrival is not None]
    if arrivals and len(arrivals) < len(recorded):
        raise RecordError(f"{path}: {len(arrivals)} of {len(recorded)} lines have an arrival; give all or none.")
    if arrivals != sorted(arrivals):
        raise RecordError(f"{path}: its arrivals do not ascend. Sort its lines by arrival.")
    return recorded


def _recorded(record: Mapping[str, Any], where: str) -> Recorded:
    text, prompt_tokens = text_of(record), _length(record, PROMPT_LENGTHS, where)
    if text is None and prompt_tokens is None:
        raise RecordError(f"{where} has none of the fields turns, {', '.join((*FIELDS, *PROMPT_LENGTHS))}.")
    return Recorded(text, prompt_tokens, _length(record, OUTPUT_LENGTHS, where), _arrival(record, where))


def _length(record: Mapping[str, Any], names: tuple[str, ...], where: str) -> int | None:
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        return None
    value = record[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RecordError(f"{where}: `{name}` must be a whole number of at least 1; it is {value!r}.")
    return value


def _arrival(record: Mapping[str, Any], where: str) -> float | None:
    name, unit = ("arrival", 1.0) if "arrival" in record else ("timestamp", 0.001)
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise RecordError(f"{where}: `{name}` must be a number of at least 0; it is {value!r}.")
    return float(value) * unit


Send = Callable[[LoadRequest, float | None], Awaitable[None]]
"""Sends a request and waits for its end; the number is its due time after the round's start (None: now)."""


@dataclass(frozen=True)
class Closed:
    """Closed loop: each of `num_streams` streams sends its next request when the previous one is done."""

    num_streams: int
    default_seconds: ClassVar[None] = None  # the number of requests ends a round

    @property
    def name(self) -> str:
        return f"{self.num_streams} stream" + "s" * (self.num_streams > 1)

    @property
    def default_requests(self) -> int:
        return 2 * self.num_streams

    @property
    def warm_up_streams(self) -> int:
        """Concurrent requests before the first round."""
        return self.num_streams

    async def run(self, requests: Iterator[LoadRequest], send: Send, seconds: float | None) -> None:
        """Run until `requests` are done, or for `seconds`, then cancel running requests. Raises HttpError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), _first_failure(), asyncio.TaskGroup() as group:
                for _ in range(self.num_streams):
                    group.create_task(_stream(requests, send))


@dataclass(frozen=True)
class Open:
    """Open loop: requests are sent when due, regardless of the server. Failed ones are counted; the round continues."""

    rate: float | None  # per second, Poisson; None: arrivals of the file
    default_requests: ClassVar[None] = None
    default_seconds: ClassVar[float] = 10.0  # a few hundred requests at common rates
    warm_up_streams: ClassVar[int] = 4

    @property
    def name(self) -> str:
        return "as recorded" if self.rate is None else f"{self.rate:g}/s"

    async def run(self, requests: Iterator[LoadRequest], send: Send, seconds: float | None) -> None:
        """Send arrivals for `seconds`, then wait for all of them."""
        clock = asyncio.get_running_loop().time
        begun = clock()

        async def send_one(request: LoadRequest) -> None:
            with suppress(HttpError):  # recorded in its exchange
                await send(request, request.arrival)

        async with asyncio.TaskGroup() as group:
            for request in requests:
                if seconds is not None and request.arrival >= seconds:
                    break
                await asyncio.sleep(max(0.0, begun + request.arrival - clock()))
                group.create_task(send_one(request))


@dataclass(frozen=True)
class Swing:
    """Alternates `low` and `high` streams, `period` seconds each; surplus streams are cancelled."""

    low: int
    high: int
    period: float
    default_requests: ClassVar[None] = None

    @property
    def name(self) -> str:
        return f"{self.low}–{self.high} streams every {self.period:g} s"

    @property
    def default_seconds(self) -> float:
        return 6 * self.period

    @property
    def warm_up_streams(self) -> int:
        return self.high

    @property
    def moment_seconds(self) -> float:
        """Seconds per point of a timeline: 1, or less if a half is short."""
        return min(1.0, self.period / 4)

    @classmethod
    def parse(cls, text: str, seconds_of: Callable[[str], float]) -> Swing:
        """Parse `1:64:5s`. Raises ValueError."""
        parts = text.split(":")
        if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()) or not 0 < int(parts[0]) < int(parts[1]):
            raise ValueError(f"{text!r} is no swing: give LOW:HIGH:PERIOD, such as 1:64:5s")
        return cls(int(parts[0]), int(parts[1]), seconds_of(parts[2]))

    async def run(self, requests: Iterator[LoadRequest], send: Send, seconds: float | None) -> None:
        """Run for `seconds` (required), the low half first."""
        clock = asyncio.get_running_loop().time
        begun, number = clock(), 0
        end = begun + (2 * self.period if seconds is None else seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end), _first_failure(), asyncio.TaskGroup() as group:
                for _ in range(self.low):
                    group.create_task(_stream(requests, send))
                while True:
                    number += 1
                    await asyncio.sleep(begun + number * self.period - clock())
                    if number % 2:
                        extra = [group.create_task(_stream(requests, send)) for _ in range(self.high - self.low)]
                    else:
                        for task in extra:
                            task.cancel()


LoadShape = Closed | Open | Swing
"""The arrival pattern of a round. `default_requests`, `default_seconds`: what ends a round if no flag says."""


async def _stream(requests: Iterator[LoadRequest], send: Send) -> None:
    for request in requests:
        await send(request, None)


@asynccontextmanager
async def _first_failure() -> AsyncIterator[None]:
    """Raise the first failure of an exception group."""
    try:
        yield
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
