"""Paired rounds as figures: medians with their ranges, a table to read and a record to keep."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from space_eval.bench_round import Round, num_identical, percentile

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """The middle of several rounds, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True)
class Row:
    """One number of streams with one kind of speculation, over all rounds."""

    num_streams: int  # the batch
    speculation: str | int  # k, or who chooses it
    tokens_per_second: Spread
    ratio: Spread | None  # to the other half of each pair, plain decoding; None for plain decoding itself
    tokens_per_step: Spread | None
    first_token_ms: Mapping[str, float]  # percentiles over all requests of all rounds
    token_gap_ms: Mapping[str, float]  # per token after the first event
    cpu_shares: Mapping[str, float]  # processor seconds per second: medians over the rounds
    identical: str  # requests whose ids equal those of the other half of the pair, of all


def rows(num_streams: int, pairs: Sequence[tuple[Round, Round]]) -> list[Row]:
    """Two rows from pairs of (plain, speculating) rounds."""
    same = sum(num_identical(*pair) for pair in pairs)
    identical = f"{same}/{sum(len(plain.exchanges) for plain, _ in pairs)}"
    ratio = Spread.of([fast.tokens_per_second / plain.tokens_per_second for plain, fast in pairs])
    plain, fast = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return [_row(num_streams, plain, None, identical), _row(num_streams, fast, ratio, identical)]


def _row(num_streams: int, rounds: Sequence[Round], ratio: Spread | None, identical: str) -> Row:
    exchanges = [exchange for one in rounds for exchange in one.exchanges]
    per_step = [rate for one in rounds if (rate := one.tokens_per_step) is not None]
    return Row(
        num_streams=num_streams,
        speculation=rounds[0].speculation,
        tokens_per_second=Spread.of([one.tokens_per_second for one in rounds]),
        ratio=ratio,
        tokens_per_step=Spread.of(per_step) if per_step else None,
        first_token_ms=_percentiles([exchange.first_token_seconds for exchange in exchanges]),
        token_gap_ms=_percentiles([gap for exchange in exchanges for gap in exchange.token_gaps]),
        cpu_shares={name: statistics.median(one.cpu_shares[name] for one in rounds) for name in rounds[0].cpu_shares},
        identical=identical,
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": 1000 * percentile(seconds, share / 100) for share in PERCENTILES}


def table(rows: Sequence[Row]) -> str:
    """All rows in columns of even width."""
    head = [
        "streams",
        "speculation",
        "tokens/s",
        "ratio",
        "tokens/step",
        "first ms",
        "per token ms",
        "CPU",
        "same",
    ]
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    notes = [
        "tokens/s, ratio, tokens/step: median (min–max) over the rounds; ratio to plain decoding within each pair.",
        "ms: p50/p90/p99 over all requests; per token: the gap before an event, shared among its tokens.",
        "CPU: processor seconds per second. same: answers equal to plain decoding's.",
    ]
    return "\n".join([*shown, "", *notes])


def _cells(row: Row) -> list[str]:
    cpu = " ".join(f"{name} {share:.2f}" for name, share in row.cpu_shares.items())
    return [
        str(row.num_streams),
        str(row.speculation),
        row.tokens_per_second.shown(0),
        "1" if row.ratio is None else row.ratio.shown(2),
        "–" if row.tokens_per_step is None else row.tokens_per_step.shown(2),
        "/".join(f"{value:.0f}" for value in row.first_token_ms.values()),
        "/".join(f"{value:.2f}" for value in row.token_gap_ms.values()),
        cpu or "–",
        row.identical,
    ]


def record(facts: Mapping[str, Any], load: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything, for the JSON file."""
    return {"facts": dict(facts), "load": dict(load), "rows": [asdict(row) for row in rows]}
