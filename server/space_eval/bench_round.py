"""One round of load on one arm: what was asked, what came, and what it took."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from space_eval.bench_energy import metered
from space_eval.bench_watch import Watch, watched
from space_eval.load_arm import Arm
from space_eval.load_client import LoadError
from space_eval.load_dialect import Ask
from space_eval.load_exchange import Exchange
from space_eval.load_shape import Shape


@dataclass(frozen=True)
class Round:
    """What one round of one arm took."""

    arm: str
    seconds: float  # from the first request's begin to the last one's end, or to the cut
    exchanges: Sequence[Exchange]  # by request number
    cpu_shares: Mapping[str, float]  # processor seconds per second, by process
    watch: Sequence[Watch] = ()  # what the server's own figures said meanwhile
    watts: float | None = None  # what its devices drew; None where nothing is counted, or for too short a time
    start: int = 0  # of the servers, by number

    @property
    def answered(self) -> list[Exchange]:
        """Those of which something came."""
        return [exchange for exchange in self.exchanges if exchange.pieces]

    @property
    def num_tokens(self) -> int:
        """Tokens that came before the end."""
        return sum(
            piece.num_tokens
            for exchange in self.exchanges
            for piece in exchange.pieces
            if exchange.started + piece.seconds <= self.seconds
        )

    @property
    def num_finished(self) -> int:
        return sum(exchange.finished for exchange in self.exchanges)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def joules_per_token(self) -> float | None:
        """Of what came, the reading of prompts included."""
        return self.watts * self.seconds / self.num_tokens if self.watts is not None and self.num_tokens else None

    @property
    def request_seconds(self) -> float:
        """The mean of those that came whole; nan of none."""
        whole = [exchange.seconds for exchange in self.exchanges if exchange.finished]
        return sum(whole) / len(whole) if whole else math.nan

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by status."""
        failed = [exchange.error for exchange in self.exchanges if exchange.error is not None]
        return {status: failed.count(status) for status in sorted(set(failed))}

    @property
    def tokens_per_step(self) -> float | None:
        """Over all streams' decode steps; None where the server counts none."""
        told = [exchange.statistics for exchange in self.exchanges if exchange.statistics.get("steps")]
        steps = sum(int(one["steps"]) for one in told)
        return sum((one["tokens_per_step"] or 0.0) * one["steps"] for one in told) / steps if steps else None

    @property
    def drafts_per_step(self) -> float | None:
        """The mean chosen draft length; None where the server counts no steps."""
        told = [exchange.statistics for exchange in self.exchanges if exchange.statistics.get("steps")]
        steps = sum(int(one["steps"]) for one in told)
        return sum(int(one.get("drafted") or 0) for one in told) / steps if steps else None

    def timeline(self, width: float) -> list[float]:
        """Tokens per second in each `width` seconds from the begin; a rest shorter than that is left out."""
        counts = [0] * int(self.seconds / width + 1e-9)
        for exchange in self.exchanges:
            for piece in exchange.pieces:
                place = int((exchange.started + piece.seconds) / width)
                if place < len(counts):
                    counts[place] += piece.num_tokens
        return [count / width for count in counts]


async def run_round(
    arm: Arm,
    shape: Shape,
    asks: Iterator[Ask],
    *,
    salt: str | None,
    seconds: float | None = None,
    watch_every: float | None = None,
    cpu_seconds: Callable[[], Mapping[str, float]] = dict,
    done: Callable[[], object] = lambda: None,
) -> Round:
    """All of `asks` in `shape`, or for `seconds`. Raises LoadError if one fails and `shape` does not bear it.

    `watch_every`: seconds between looks at the server's figures. `done` is called after each request.
    """
    clock = asyncio.get_running_loop().time
    exchanges: list[Exchange] = []
    begun = 0.0

    async def send(ask: Ask, due: float | None) -> None:
        exchange = Exchange(started=clock() - begun if due is None else due)
        exchanges.append(exchange)
        try:
            await arm.answer(ask, salt, exchange, begun + exchange.started)
        finally:
            done()

    cpu_before = cpu_seconds()
    counting = metered(arm.endpoint if arm.counts_energy else None)
    async with watched(arm.endpoint, watch_every) as looks, counting as meter:
        begun = clock()
        await shape.run(asks, send, seconds)
        taken = clock() - begun
    if not any(exchange.pieces for exchange in exchanges):
        failed = {exchange.error for exchange in exchanges}
        raise LoadError(f"{arm.name}: none of {len(exchanges)} requests was answered ({', '.join(map(str, failed))}).")
    cpu_after = cpu_seconds()
    shares = {name: (cpu_after[name] - used) / taken for name, used in cpu_before.items()}
    return Round(arm.name, taken, exchanges, shares, looks, meter.watts)


def compared(ones: Round, others: Round) -> tuple[int, int]:
    """Requests whose ids are the same in both rounds, of those that came whole in both and whose ids are told."""
    pairs = zip(ones.exchanges, others.exchanges, strict=False)
    both = [(a.token_ids, b.token_ids) for a, b in pairs if a.finished and b.finished and a.token_ids and b.token_ids]
    return sum(a == b for a, b in both), len(both)
