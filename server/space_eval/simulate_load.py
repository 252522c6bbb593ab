"""What the simulated clients ask for, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from space_router.engine.request import Sampling, ValidRequest

from space_eval.load_file import Recorded
from space_eval.load_lengths import Lengths
from space_eval.simulate_text import EOS, prefix_ids, prompt_ids


class LoadFlagError(ValueError):
    """A flag of the load that cannot be read; the message has the form."""


@dataclass(frozen=True)
class Poisson:
    """So many a second, each independent of the others."""

    rate: float

    @property
    def name(self) -> str:
        return f"{self.rate:g} requests a second, Poisson"

    def times(self, source: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += source.expovariate(self.rate)
            yield now


@dataclass(frozen=True)
class OnOff:
    """Poisson for `on` seconds, nobody for `off`, and again."""

    rate: float  # while it is on
    on: float
    off: float

    @property
    def name(self) -> str:
        return f"{self.rate:g} requests a second for {self.on:g} s, none for {self.off:g} s, and again"

    def times(self, source: random.Random) -> Iterator[float]:
        for busy in Poisson(self.rate).times(source):
            yield busy + busy // self.on * self.off


class Arrivals(Protocol):
    """When requests come, whatever the server does: ascending seconds."""

    @property
    def name(self) -> str: ...

    def times(self, source: random.Random) -> Iterator[float]: ...


@dataclass(frozen=True)
class AsRecorded:
    """At the times of a file, which begins anew after its end."""

    seconds: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{len(self.seconds)} arrivals of a file"

    def times(self, source: random.Random) -> Iterator[float]:
        first, last = self.seconds[0], self.seconds[-1]
        turn = (last - first) * len(self.seconds) / max(1, len(self.seconds) - 1) or 1.0
        for number in itertools.count():
            yield from (number * turn + second - first for second in self.seconds)


@dataclass(frozen=True)
class Streams:
    """Each of `high` takes the next request when it is done with one; every other `period` only `low` of them do, and
    the rest is cut off.
    """

    high: int
    low: int | None = None  # None: always all
    period: float = 1.0  # seconds

    @property
    def name(self) -> str:
        if self.low is None:
            return f"{self.high} stream" + "s" * (self.high > 1)
        return f"{self.low} and {self.high} streams in turn, {self.period:g} s each"

    def wanted(self, now: float) -> int:
        """Streams that are on; the low half first."""
        return self.low if self.low is not None and int(now / self.period) % 2 == 0 else self.high


@dataclass(frozen=True)
class Prefixes:
    """Texts that prompts begin with: system prompts, documents."""

    count: int
    length: int  # ids
    share: float = 1.0  # of the requests that begin with one; prefix i is 1/i as frequent as the first

    @classmethod
    def parse(cls, text: str) -> Prefixes:
        """`COUNT:LENGTH[:SHARE]`. Raises LoadFlagError."""
        form = f"{text!r} is no set of prefixes: give COUNT:LENGTH[:SHARE], such as 8:512:0.9"
        count, _, rest = text.partition(":")
        length, _, share = rest.partition(":")
        try:
            made = cls(int(count), int(length), float(share or 1.0))
        except ValueError:
            raise LoadFlagError(form) from None
        if made.count < 1 or made.length < 1 or not 0.0 < made.share <= 1.0:
            raise LoadFlagError(form)
        return made


@dataclass(frozen=True)
class Shares:
    """Values, and how often each is drawn."""

    values: tuple[str, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Shares:
        """`a=3,b=1`; `a,b` is drawn evenly. Raises LoadFlagError."""
        values, weights = [], []
        for part in text.split(","):
            value, _, weight = part.partition("=")
            try:
                weights.append(float(weight or 1.0))
            except ValueError:
                weights.append(0.0)
            if not value or not 0.0 < weights[-1] < 1e9:
                raise LoadFlagError(f"{text!r}: give VALUE[=WEIGHT],… with weights above 0, such as a=3,b=1")
            values.append(value)
        return cls(tuple(values), tuple(weights))

    @property
    def form(self) -> str:
        return ",".join(f"{value}={weight:g}" for value, weight in zip(self.values, self.weights, strict=True))

    def draw(self, source: random.Random) -> str:
        return source.choices(self.values, self.weights)[0] if len(self.values) > 1 else self.values[0]


@dataclass(frozen=True)
class Ask:
    """One request of the load, with all its choices."""

    number: int
    arrives: float  # seconds; of a stream's request 0: it comes when the stream is free
    prompt_ids: tuple[int, ...]
    num_output: int  # ids of each answer, the end included
    max_tokens: int
    num_choices: int = 1
    priority: int = 0
    key: str = ""
    temperature: float = 1.0
    leaves_after: int | None = None  # ids, after which its reader goes away

    def request(self, choice: int) -> ValidRequest:
        return ValidRequest(
            request_id=f"{self.number}.{choice}",
            prompt_ids=self.prompt_ids,
            sampling=Sampling(seed=self.number, choice=choice, temperature=self.temperature),
            max_tokens=self.max_tokens,
            eos_ids=(EOS,) if self.max_tokens > self.num_output else (),
            priority=self.priority,
            key=self.key,
        )


@dataclass(frozen=True)
class Work:
    """The requests: the same for every arm, whatever becomes of the ones before."""

    arrivals: Arrivals | Streams
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths.parse("lognormal:256:0.8:16:4096"))
    output_tokens: Lengths = field(default_factory=lambda: Lengths.parse("lognormal:128:0.6:4:1024"))
    max_tokens: int | None = None  # what clients ask for; None: just what they get
    prefixes: Prefixes | None = None
    priorities: Shares = Shares(("0",), (1.0,))
    keys: Shares = Shares(("",), (1.0,))
    choices: Shares = Shares(("1",), (1.0,))
    cancelled: float = 0.0  # share of requests whose reader leaves within the answer
    temperature: float = 1.0  # 0: greedy
    recorded: Sequence[Recorded] = ()  # lengths, in turn; empty: drawn
    seed: int = 1

    def asks(self) -> Iterator[Ask]:
        """Without end, in the order in which they come."""
        times = None if isinstance(self.arrivals, Streams) else self.arrivals.times(random.Random(f"{self.seed} when"))
        source = random.Random(f"{self.seed} what")
        for number in itertools.count():
            arrives = next(times) if times is not None else 0.0
            one = self.recorded[number % len(self.recorded)] if self.recorded else None
            num_prompt = (one and one.prompt_tokens) or self.prompt_tokens.draw(source)
            num_output = (one and one.output_tokens) or self.output_tokens.draw(source)
            prefix = self._prefix(source)
            leaves = source.randint(1, num_output) if source.random() < self.cancelled else None
            yield Ask(
                number=number,
                arrives=arrives,
                prompt_ids=prompt_ids(number, len(prefix) + num_prompt, prefix),
                num_output=num_output,
                max_tokens=max(num_output, self.max_tokens or 0),
                num_choices=int(self.choices.draw(source)),
                priority=int(self.priorities.draw(source)),
                key=self.keys.draw(source),
                temperature=self.temperature,
                leaves_after=leaves,
            )

    def _prefix(self, source: random.Random) -> tuple[int, ...]:
        if self.prefixes is None or source.random() >= self.prefixes.share:
            return ()
        count = self.prefixes.count
        number = source.choices(range(count), [1.0 / (1 + i) for i in range(count)])[0]
        return prefix_ids(number, self.prefixes.length)

    @property
    def name(self) -> str:
        lengths = (
            f"lengths of {len(self.recorded)} recorded requests"
            if self.recorded
            else f"prompts {self.prompt_tokens.form}, answers {self.output_tokens.form} tokens"
        )
        parts = [self.arrivals.name, lengths]
        if self.prefixes is not None:
            parts.append(
                f"{self.prefixes.share:.0%} with one of {self.prefixes.count} prefixes of {self.prefixes.length}"
            )
        for what, shares in (("keys", self.keys), ("priorities", self.priorities), ("choices", self.choices)):
            if len(shares.values) > 1 or (what == "choices" and shares.values != ("1",)):
                parts.append(f"{what} {shares.form}")
        if not self.temperature:
            parts.append("greedy")
        if self.cancelled:
            parts.append(f"{self.cancelled:.0%} left by their readers")
        return "; ".join(parts)
