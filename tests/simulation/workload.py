"""What the simulated clients ask for, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from space_router.engine.request.request import SamplingOptions, ValidRequest

from simulation.texts import EOS, prefix_ids, prompt_ids


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
            request_id=f"{self.number}.{choice}",
            prompt_ids=self.prompt_ids,
            sampling=SamplingOptions(seed=self.number, choice=choice, temperature=1.0),
            max_tokens=self.max_tokens,
            eos_ids=(EOS,) if self.max_tokens > self.num_output else (),
            priority=self.priority,
            key=self.key,
        )


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
                number=number,
                arrives=arrives,
                prompt_ids=prompt_ids(number, len(prefix) + num_prompt, prefix),
                num_output=num_output,
                max_tokens=max(num_output, self.max_tokens or 0),
                num_choices=int(self.choices.draw(source)),
                priority=int(self.priorities.draw(source)),
                key=self.keys.draw(source),
                leaves_after=leaves,
            )

    def _prefix(self, source: random.Random) -> tuple[int, ...]:
        if self.prefixes is None or source.random() >= self.prefixes.share:
            return ()
        count = self.prefixes.count
        number = source.choices(range(count), [1.0 / (1 + i) for i in range(count)])[0]
        return prefix_ids(number, self.prefixes.length)


def _length(lengths: Uniform | Sequence[int], number: int, source: random.Random) -> int:
    return lengths.draw(source) if isinstance(lengths, Uniform) else lengths[number % len(lengths)]
