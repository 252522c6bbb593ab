"""Rounds as figures: medians with their ranges, ratios with their bounds; a table to read and a record to keep."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from space_eval.bench_energy import JOULES_PER_KWH
from space_eval.bench_limits import Limits
from space_eval.bench_round import Round, compared
from space_eval.bench_statistics import Ratio, percentile
from space_eval.load_shape import Closed, Open, Shape

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
    """One arm under one load, over all rounds."""

    load: str
    num_streams: int | None  # the batch; None where it is not one number
    rate: float | None  # requests per second that came; open loop only
    arm: str
    speculation: str | int | None  # k, or who chooses it; None: the server's default
    num_rounds: int
    num_requests: int
    prompt_tokens: float | None  # mean, as the server counts
    output_tokens: float  # mean of the answers that came whole
    tokens_per_second: Spread
    requests_per_second: Spread
    ratios: Mapping[str, Ratio]  # of tokens per second, within each round, to each arm that is compared with
    ratio: Ratio | None  # to the first of them; None for that arm itself, and in open loop
    latency_ratios: Mapping[str, Ratio]  # of the mean whole answer, open loop only; below 1 is faster
    tokens_per_step: Spread | None
    drafts_per_step: Spread | None
    first_token_ms: Mapping[str, float]  # percentiles over all requests of all rounds
    token_gap_ms: Mapping[str, float]  # per token after the first event, an event's gap shared among its tokens
    event_gap_ms: Mapping[str, float]  # between events, whatever they carry
    request_ms: Mapping[str, float]  # answers that came whole
    goodput: Spread | None  # requests per second within the limits
    kept: float | None  # share of the requests within the limits
    errors: Mapping[str, int]  # by status
    late_ms: float  # p99 of the time by which the client itself sent late
    cpu_shares: Mapping[str, float]  # processor seconds per second: medians over the rounds
    identical: str | None  # answers equal to the first arm's, of those that can be compared; None of none
    phases: Mapping[str, Mapping[str, Ratio]] = field(default_factory=dict)  # of a swing: low and high, by arm
    watts: Spread | None = None  # of all devices that the server counts; None of none
    joules_per_token: Spread | None = None  # generated, the reading of prompts included
    grams_per_million_tokens: Spread | None = None  # CO2e, at the carbon intensity that was given


def rows(
    shape: Shape,
    rounds: Sequence[Sequence[Round]],
    speculation: Sequence[str | int | None],
    *,
    baselines: int = 1,
    same_work: bool = True,
    limits: Limits | None = None,
    carbon_intensity: float | None = None,
) -> list[Row]:
    """One row for each arm. `rounds`: in each round, every arm's, in the arms' order; the `baselines` first arms are
    compared with. `same_work`: the arms were asked the same, and their answers can be compared. `carbon_intensity`:
    grams of CO2e for a kWh.
    """
    made = []
    for place, by_round in enumerate(zip(*rounds, strict=True)):
        is_open = isinstance(shape, Open)  # throughput is what came, whatever the arm: only latency says anything
        ratios = {} if is_open else _ratios(rounds, place, baselines, "tokens_per_second")
        latency_ratios = _ratios(rounds, place, baselines, "request_seconds") if is_open else {}
        firsts = [one[0] for one in rounds]
        identical = _identical(firsts, by_round) if same_work else None
        row = _row(shape, by_round, speculation[place], ratios, latency_ratios, identical, limits)
        made.append(_with_energy(row, by_round, carbon_intensity))
    return made


def _with_energy(row: Row, rounds: Sequence[Round], carbon_intensity: float | None) -> Row:
    joules = [one.joules_per_token for one in rounds]
    grams = [] if carbon_intensity is None else [one for one in joules if one is not None]
    return replace(
        row,
        watts=_spread([one.watts for one in rounds]),
        joules_per_token=_spread(joules),
        grams_per_million_tokens=_spread([1e6 * one / JOULES_PER_KWH * (carbon_intensity or 0.0) for one in grams]),
    )


def _identical(firsts: Sequence[Round], others: Sequence[Round]) -> str | None:
    """`equal/compared`; None where nothing can be compared."""
    found = [compared(*pair) for pair in zip(firsts, others, strict=True)]
    same, num = (sum(counts) for counts in zip(*found, strict=True))
    return f"{same}/{num}" if num else None


def _ratios(rounds: Sequence[Sequence[Round]], place: int, baselines: int, what: str) -> dict[str, Ratio]:
    """Of the attribute `what` to each baseline before `place`, by the baseline's name."""
    made = {}
    for base in range(min(baselines, place)):
        pairs = [(getattr(one[place], what), getattr(one[base], what), one[place].start) for one in rounds]
        known = [(mine / other, start) for mine, other, start in pairs if mine >= 0 and other > 0]  # neither is nan
        if known:
            made[rounds[0][base].arm] = Ratio.of(*map(list, zip(*known, strict=True)))
    return made


def _row(
    shape: Shape,
    rounds: Sequence[Round],
    speculation: str | int | None,
    ratios: Mapping[str, Ratio],
    latency_ratios: Mapping[str, Ratio],
    identical: str | None,
    limits: Limits | None,
) -> Row:
    every = [exchange for one in rounds for exchange in one.exchanges]
    answered = [exchange for exchange in every if exchange.pieces]
    whole = [exchange for exchange in answered if exchange.finished]
    prompts = [exchange.num_prompt_tokens for exchange in every if exchange.num_prompt_tokens is not None]
    statuses = sorted({status for one in rounds for status in one.errors})
    return Row(
        load=shape.name,
        num_streams=shape.num_streams if isinstance(shape, Closed) else None,
        rate=statistics.median(len(one.exchanges) / one.seconds for one in rounds) if isinstance(shape, Open) else None,
        arm=rounds[0].arm,
        speculation=speculation,
        num_rounds=len(rounds),
        num_requests=len(every),
        prompt_tokens=statistics.fmean(prompts) if prompts else None,
        output_tokens=statistics.fmean([exchange.num_tokens for exchange in whole]) if whole else 0.0,
        tokens_per_second=Spread.of([one.tokens_per_second for one in rounds]),
        requests_per_second=Spread.of([one.num_finished / one.seconds for one in rounds]),
        ratios=ratios,
        ratio=next(iter(ratios.values()), None),
        latency_ratios=latency_ratios,
        tokens_per_step=_spread([one.tokens_per_step for one in rounds]),
        drafts_per_step=_spread([one.drafts_per_step for one in rounds]),
        first_token_ms=_percentiles([exchange.first_token_seconds for exchange in answered]),
        token_gap_ms=_percentiles([gap for exchange in answered for gap in exchange.token_gaps]),
        event_gap_ms=_percentiles([gap for exchange in answered for gap in exchange.event_gaps]),
        request_ms=_percentiles([exchange.seconds for exchange in whole]),
        goodput=None if limits is None else Spread.of([limits.num_kept(one.exchanges) / one.seconds for one in rounds]),
        kept=None if limits is None else limits.num_kept(every) / len(every),
        errors={status: sum(one.errors.get(status, 0) for one in rounds) for status in statuses},
        late_ms=1000 * percentile([exchange.late for exchange in every], 0.99),
        cpu_shares={name: statistics.median(one.cpu_shares[name] for one in rounds) for name in rounds[0].cpu_shares},
        identical=identical,
    )


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": 1000 * percentile(seconds, share / 100) for share in PERCENTILES} if seconds else {}


NOTES = (
    "tokens/s, tokens/step: median (min–max) over the rounds.",
    "ratio: tokens/s over another arm's within the same round; median (95 % bootstrap bounds of it).",
    "time: the mean whole answer over another arm's within the same round; below 1 is faster.",
    "ms: p50/p90/p99 over all requests; per token: the gap before an event, shared among its tokens; "
    "silence: the gap before an event, whatever it carries.",
    "J/token: what the server's devices drew, whoever used them, over generated tokens; median (min–max).",
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table, its head first; a column that says nothing anywhere is left out."""
    baselines = list(dict.fromkeys(name for row in rows for name in row.ratios))
    latencies = list(dict.fromkeys(name for row in rows for name in row.latency_ratios))
    columns = [
        "load",
        "arm",
        "tokens/s",
        *(f"ratio to {name}" for name in baselines),
        *(f"time to {name}'s" for name in latencies),
        "tokens/step",
        "drafts/step",
        "first ms",
        "per token ms",
        "silence ms",
        "whole ms",
        "requests/s",
        "goodput/s",
        "kept",
        "errors",
        "late ms",
        "CPU",
        "W",
        "J/token",
        "g CO2e/M tokens",
        "same",
    ]
    lines = [_cells(row, baselines, latencies) for row in rows]
    shown = [place for place in range(len(columns)) if any(line[place] not in ("–", "") for line in lines)]
    return [[line[place] for place in shown] for line in [columns, *lines]]


def _cells(row: Row, baselines: Sequence[str], latencies: Sequence[str]) -> list[str]:
    is_open = row.rate is not None
    return [
        row.load,
        row.arm,
        row.tokens_per_second.shown(0 if row.tokens_per_second.median >= 100 else 1),
        *(row.ratios[name].shown() if name in row.ratios else "–" for name in baselines),
        *(row.latency_ratios[name].shown() if name in row.latency_ratios else "–" for name in latencies),
        "–" if row.tokens_per_step is None else row.tokens_per_step.shown(2),
        "–" if row.drafts_per_step is None else f"{row.drafts_per_step.median:.2f}",
        _joined(row.first_token_ms, 0),
        _joined(row.token_gap_ms, 2),
        _joined(row.event_gap_ms, 1),
        _joined(row.request_ms, 0),
        row.requests_per_second.shown(2),
        "–" if row.goodput is None else row.goodput.shown(2),
        "–" if row.kept is None else f"{row.kept:.0%}",
        " ".join(f"{status}×{count}" for status, count in row.errors.items()) or "–",
        f"{row.late_ms:.1f}" if is_open else "–",
        " ".join(f"{name} {share:.2f}" for name, share in row.cpu_shares.items()) or "–",
        "–" if row.watts is None else row.watts.shown(1),
        "–" if row.joules_per_token is None else row.joules_per_token.shown(4),
        "–" if row.grams_per_million_tokens is None else row.grams_per_million_tokens.shown(1),
        "–" if row.identical is None else row.identical,
    ]


def _joined(values: Mapping[str, float], digits: int) -> str:
    return "/".join(f"{value:.{digits}f}" for value in values.values()) or "–"


def table(rows: Sequence[Row]) -> str:
    """All rows in columns of even width."""
    lines = cells(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, "", *phase_lines(rows), *NOTES])


def phase_lines(rows: Sequence[Row]) -> list[str]:
    """What a swing's halves say."""
    return [
        f"{row.arm} / {base}, {half} half: {ratio.shown()}"
        for row in rows
        for base, halves in row.phases.items()
        for half, ratio in halves.items()
    ]


def record(facts: Mapping[str, Any], load: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything, for the JSON file."""
    return {"facts": dict(facts), "load": dict(load), "rows": [asdict(row) for row in rows]}


def markdown(made: Mapping[str, Any], rows: Sequence[Row], pictures: Sequence[str] = ()) -> str:
    """The record as a page."""
    head, *lines = cells(rows)
    decree = made["facts"].get("synthetic_acceptance")
    text = [f"# Load, {decree}" if decree else "# Load", ""]
    if decree:
        text += ["Drafts came true by decree; what trained masks reach, `spaceserve bench --model demo` shows.", ""]
    text += [f"- {name}: {_shown(value)}" for name, value in made["facts"].items() if value not in (None, "", [], {})]
    text += ["", "Load: " + "; ".join(f"{name} {_shown(value)}" for name, value in made["load"].items()), ""]
    text += ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]
    text += ["", *(f"- {note}" for note in (*phase_lines(rows), *NOTES)), ""]
    text += [f"![{picture.removesuffix('.png')}]({picture})" for picture in pictures]
    return "\n".join(text) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
