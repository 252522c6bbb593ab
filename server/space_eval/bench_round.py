"""One round of load: so many streams at once, each taking the next prompt as soon as it is done with one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from space_eval.load_client import Endpoint, Exchange, stream_completion


@dataclass(frozen=True)
class Load:
    """What every round asks for."""

    prompts: Sequence[str]  # taken in turn
    max_tokens: int  # of each answer, exactly: EOS is ignored
    temperature: float
    seed: int  # of the first request; the others count up from it
    truncate_prompt_tokens: int  # the last so many tokens of a prompt are used

    def body(self, number: int, speculation: str | int, salt: str) -> dict[str, Any]:
        """Request `number` of a round. Another `salt` shares no prefix with it, so that every prompt is computed."""
        return {
            "prompt": self.prompts[number % len(self.prompts)],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": self.seed + number,
            "speculation": speculation,
            "cache_salt": salt,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }


@dataclass(frozen=True)
class Round:
    """What one round of one kind of speculation took."""

    speculation: str | int
    seconds: float  # from the first request's start to the last one's end
    exchanges: Sequence[Exchange]  # by request number
    cpu_shares: Mapping[str, float]  # processor seconds per second, by process

    @property
    def num_tokens(self) -> int:
        return sum(len(exchange.token_ids) for exchange in self.exchanges)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float | None:
        """Over all streams' decode steps; None where there was none."""
        steps = sum(int(exchange.statistics.get("steps", 0)) for exchange in self.exchanges)
        rates = [
            (exchange.statistics["tokens_per_step"] or 0.0) * exchange.statistics["steps"]
            for exchange in self.exchanges
            if "steps" in exchange.statistics
        ]
        return sum(rates) / steps if steps else None


async def run_round(
    endpoint: Endpoint,
    load: Load,
    *,
    num_streams: int,
    num_requests: int,
    speculation: str | int,
    salt: str,
    cpu_seconds: Callable[[], Mapping[str, float]],
) -> Round:
    """`num_requests` over `num_streams` connections at a time. Raises LoadError if one of them fails."""
    exchanges: list[Exchange | None] = [None] * num_requests
    numbers = iter(range(num_requests))

    async def stream() -> None:
        for number in numbers:
            exchanges[number] = await stream_completion(endpoint, load.body(number, speculation, salt))

    cpu_before = cpu_seconds()
    begun = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_streams, num_requests)):
                group.create_task(stream())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    seconds = time.perf_counter() - begun
    cpu_after = cpu_seconds()
    shares = {name: (cpu_after[name] - used) / seconds for name, used in cpu_before.items()}
    return Round(speculation, seconds, [one for one in exchanges if one is not None], shares)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def num_identical(ones: Round, others: Round) -> int:
    """Requests whose ids are the same in both rounds."""
    pairs = zip(ones.exchanges, others.exchanges, strict=True)
    return sum(one.token_ids == other.token_ids for one, other in pairs)
