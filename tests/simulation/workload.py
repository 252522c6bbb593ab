"""Requests as they come, and their texts without words: how long each is, which drafts are accepted."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from space_kernels.sampling.noise import request_key
from space_router.engine.request.request import SamplingOptions, ValidRequest

VOCABULARY = 1 << 30  # token ids: so many that two texts share none unless they share a prefix on purpose

EOS = VOCABULARY - 1
_HALF = VOCABULARY // 2

_NUM_UNIFORMS = 1 << 16
_MIX = 0x9E3779B97F4A7C15


class SimulatedText(NamedTuple):
    """One choice of a request, as the model would write it."""

    first: int  # id of its position 0; the others count up from it
    length: int  # tokens of the answer; the last one is EOS
    chances: tuple[float, ...]  # acceptance of the draft of mask depth 1, 2, … if all before it are accepted
    offset: int  # where its uniforms begin


@dataclass(frozen=True)
class DepthAcceptance:
    """Acceptance by mask depth, and how much single texts differ from it by a shift of all log-odds."""

    chances: tuple[float, ...]  # p_1, p_2, …
    spread: float = 0.0  # standard deviation of the shift, in log-odds

    def draw(self, source: random.Random) -> tuple[float, ...]:
        """The chances of one text."""
        shift = source.gauss(0.0, self.spread) if self.spread else 0.0
        return tuple(_shifted(p, shift) for p in self.chances)


def _shifted(chance: float, shift: float) -> float:
    if not shift or not 0.0 < chance < 1.0:
        return chance
    return 1.0 / (1.0 + math.exp(-math.log(chance / (1.0 - chance)) - shift))


class TextLibrary:
    """All texts, by the noise key of their request.

    Whether a draft is accepted depends on text and position alone: it is the same in every run, whatever was drafted
    and when.
    """

    def __init__(self, acceptance: DepthAcceptance, seed: int) -> None:
        self.acceptance = acceptance
        self._seed = seed
        self._texts: dict[int, SimulatedText] = {}
        source = random.Random(f"uniforms {seed}")
        self._uniforms = array("f", (source.random() for _ in range(_NUM_UNIFORMS)))

    def write(self, seed: int, choice: int, length: int) -> SimulatedText:
        """Add the text that the request with this seed will get."""
        key = request_key(seed, choice)
        source = random.Random(key ^ self._seed)
        text = SimulatedText(
            first=key * _MIX % _HALF,
            length=length,
            chances=self.acceptance.draw(source),
            offset=source.randrange(_NUM_UNIFORMS),
        )
        self._texts[key] = text
        return text

    def text(self, key: int) -> SimulatedText:
        return self._texts[key]

    def num_accepted(self, text: SimulatedText, position: int, first_depth: int, num_drafts: int) -> int:
        """How many of the drafts for `position`, … are accepted; they come from masks `first_depth`, …"""
        chances, uniforms, at = text.chances, self._uniforms, text.offset + position
        deepest, depth = len(chances), first_depth - 1
        for number in range(num_drafts):
            if uniforms[(at + number) % _NUM_UNIFORMS] >= chances[min(depth + number, deepest - 1)]:
                return number
        return num_drafts

    @staticmethod
    def ids(text: SimulatedText, begin: int, end: int) -> list[int]:
        """Ids of the answer, tokens [begin, end)."""
        ids = list(range(text.first + begin, text.first + end))
        if begin < text.length <= end:
            ids[text.length - 1 - begin] = EOS
        return ids


def prompt_ids(number: int, length: int, prefix: Sequence[int] = ()) -> tuple[int, ...]:
    """The prompt of request `number`: a prefix that others share, then ids of its own."""
    first = _HALF + number * _MIX % (_HALF // 2)
    return (*prefix, *range(first, first + length - len(prefix)))


def prefix_ids(number: int, length: int) -> tuple[int, ...]:
    """A prefix that many prompts share."""
    first = _HALF + _HALF // 2 + number * _MIX % (_HALF // 4)
    return tuple(range(first, first + length))


class Arrivals(Protocol):
    """When requests come, whatever the server does: ascending seconds without end."""

    def times(self, source: random.Random) -> Iterator[float]: ...


@dataclass(frozen=True)
class Poisson:
    """`rate` requests a second, each independent of the others."""

    rate: float

    def times(self, source: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += source.expovariate(self.rate)
            yield now


@dataclass(frozen=True)
class OnOff:
    """Poisson for `on` seconds, nothing for `off` seconds, and again."""

    rate: float  # while it is on
    on: float
    off: float

    def times(self, source: random.Random) -> Iterator[float]:
        for busy in Poisson(self.rate).times(source):
            yield busy + busy // self.on * self.off


@dataclass(frozen=True)
class Replay:
    """At given times; after the last one the recording begins anew."""

    seconds: tuple[float, ...]

    def times(self, source: random.Random) -> Iterator[float]:
        first, last = self.seconds[0], self.seconds[-1]
        turn = (last - first) * len(self.seconds) / max(1, len(self.seconds) - 1) or 1.0
        for number in itertools.count():
            yield from (number * turn + second - first for second in self.seconds)


@dataclass(frozen=True)
class ClosedLoop:
    """`high` clients, each of which sends its next request when the last one has ended.

    With `low`, only so many are on in every other `period`, the first included; the rest is cut off then.
    """

    high: int
    low: int | None = None  # None: always `high`
    period: float = 1.0  # seconds

    def concurrency(self, now: float) -> int:
        """Clients that are on."""
        return self.low if self.low is not None and int(now / self.period) % 2 == 0 else self.high


@dataclass(frozen=True)
class Uniform:
    """Lengths from `low` to `high` tokens, all equally likely."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True)
class SharedPrefixes:
    """Texts that prompts begin with: system prompts, documents."""

    count: int
    length: int  # tokens
    share: float = 1.0  # of the requests that begin with one; prefix i is 1/i as frequent as the first


@dataclass(frozen=True)
class Weighted:
    """Values, and how often each is drawn."""

    values: tuple[str, ...]
    weights: tuple[float, ...]

    def draw(self, source: random.Random) -> str:
        return source.choices(self.values, self.weights)[0] if len(self.values) > 1 else self.values[0]


@dataclass(frozen=True)
class ClientRequest:
    """One request with all its choices."""

    number: int
    arrives: float  # seconds; 0 in a closed loop, where it comes when its client is free
    prompt_ids: tuple[int, ...]
    num_output: int  # tokens of each answer, EOS included
    max_tokens: int
    num_choices: int = 1
    priority: int = 0
    key: str = ""
    leaves_after: int | None = None  # tokens, after which its reader disconnects

    def valid(self, choice: int) -> ValidRequest:
        return ValidRequest(
            request_id=f"{self.number}.{choice}", prompt_ids=self.prompt_ids,
            sampling=SamplingOptions(seed=self.number, choice=choice, temperature=1.0), max_tokens=self.max_tokens,
            eos_ids=(EOS,) if self.max_tokens > self.num_output else (), priority=self.priority, key=self.key,
        )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """The requests: the same in every run, whatever becomes of the ones before."""

    arrivals: Arrivals | ClosedLoop
    prompt_tokens: Uniform | Sequence[int]  # given: in turn, again and again
    output_tokens: Uniform | Sequence[int]
    max_tokens: int | None = None  # what clients ask for; None: just what they get
    prefixes: SharedPrefixes | None = None
    priorities: Weighted = Weighted(("0",), (1.0,))
    keys: Weighted = Weighted(("",), (1.0,))
    choices: Weighted = Weighted(("1",), (1.0,))
    cancelled: float = 0.0  # share of requests whose reader disconnects within the answer
    seed: int = 1

    def requests(self) -> Iterator[ClientRequest]:
        """Without end, in the order in which they come."""
        arrivals = None if isinstance(self.arrivals, ClosedLoop) else self.arrivals
        times = arrivals.times(random.Random(f"{self.seed} when")) if arrivals is not None else itertools.repeat(0.0)
        source = random.Random(f"{self.seed} what")
        for number, arrives in enumerate(times):
            num_prompt = _length(self.prompt_tokens, number, source)
            num_output = _length(self.output_tokens, number, source)
            prefix = self._prefix(source)
            leaves = source.randint(1, num_output) if source.random() < self.cancelled else None
            yield ClientRequest(
                number=number, arrives=arrives, prompt_ids=prompt_ids(number, len(prefix) + num_prompt, prefix),
                num_output=num_output, max_tokens=max(num_output, self.max_tokens or 0),
                num_choices=int(self.choices.draw(source)), priority=int(self.priorities.draw(source)),
                key=self.keys.draw(source), leaves_after=leaves,
            )  # fmt: skip

    def _prefix(self, source: random.Random) -> tuple[int, ...]:
        if self.prefixes is None or source.random() >= self.prefixes.share:
            return ()
        count = self.prefixes.count
        number = source.choices(range(count), [1.0 / (1 + i) for i in range(count)])[0]
        return prefix_ids(number, self.prefixes.length)


def _length(lengths: Uniform | Sequence[int], number: int, source: random.Random) -> int:
    return lengths.draw(source) if isinstance(lengths, Uniform) else lengths[number % len(lengths)]
