"""Summarises rounds: medians with ranges, ratios with bounds, a swing in time; as table, JSON record and plots."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from space_server.speculation.synthetic_acceptance import label

from space_eval.bench.arms import Arm
from space_eval.bench.meters import JOULES_PER_KWH, DraftSample
from space_eval.bench.options import BenchSettings, Limits
from space_eval.bench.rounds import PrefixIsolation, Round, num_identical
from space_eval.bench.workload import Closed, LoadShape, Open, Swing
from space_eval.plots import Bar, bar_plot, line_plot
from space_eval.report import Ratio, Spread, markdown_table, percentile

PERCENTILES = (50, 90, 99)


@dataclass
class ArmSummary:
    """One arm under one load, over all rounds: a row of the table, and of report.json."""

    load: str
    num_streams: int | None  # the batch; None if it is not one number
    rate: float | None  # arrivals per second; open loop only
    arm: str
    speculation: str | int | None  # k, or "auto" and "off"; None: the server's default
    num_rounds: int
    num_requests: int
    prompt_tokens: float | None  # mean, as counted by the server
    output_tokens: float  # mean of complete answers
    tokens_per_second: Spread
    requests_per_second: Spread
    ratios: Mapping[str, Ratio]  # of tokens per second, within each round, to each baseline
    ratio: Ratio | None  # to the first baseline; None for that arm itself, and in open loop
    latency_ratios: Mapping[str, Ratio]  # of the mean complete answer, open loop only; below 1 is faster
    tokens_per_step: Spread | None
    drafts_per_step: Spread | None
    first_token_ms: Mapping[str, float]  # percentiles over all requests of all rounds
    token_gap_ms: Mapping[str, float]  # per token after the first event; an event's gap is divided by its tokens
    event_gap_ms: Mapping[str, float]  # between events
    request_ms: Mapping[str, float]  # complete answers
    goodput: Spread | None  # requests per second within the limits
    kept: float | None  # share of the requests within the limits
    errors: Mapping[str, int]  # by status
    late_ms: float  # p99 of the client's own delay in sending
    cpu_shares: Mapping[str, float]  # processor seconds per second: medians over the rounds
    identical: str | None = None  # answers equal to the first arm's, of the comparable ones; None without any
    phases: Mapping[str, Mapping[str, Ratio]] = field(default_factory=dict)  # of a swing: low and high, by arm
    watts: Spread | None = None  # of all devices with a counter; None without any
    joules_per_token: Spread | None = None  # per generated token, including prefill
    grams_per_million_tokens: Spread | None = None  # CO2e, at the given carbon intensity


@dataclass(frozen=True)
class BenchResult:
    """All figures of a run."""

    rows: Sequence[ArmSummary]
    timelines: Mapping[str, Sequence[SwingTimeline]]  # of swings, by load


def summarize(settings: BenchSettings, arms: Sequence[Arm], rounds: Sequence[Sequence[Sequence[Round]]]) -> BenchResult:
    """Summarise `rounds`, [shape][round][arm]."""
    same_prompts = PrefixIsolation.of(arms).same_prompts
    limits, grams = settings.limits, settings.carbon_intensity
    rows: list[ArmSummary] = []
    swings: dict[str, Sequence[SwingTimeline]] = {}
    for shape, of_shape in zip(settings.shapes, rounds, strict=True):
        rows += summaries(shape, of_shape, arms, same_prompts=same_prompts, limits=limits, grams=grams)
        if isinstance(shape, Swing):
            swings[shape.name] = timelines(shape, of_shape)
    return BenchResult(rows, swings)


def summaries(
    shape: LoadShape,
    rounds: Sequence[Sequence[Round]],
    arms: Sequence[Arm],
    *,
    same_prompts: bool = True,
    limits: Limits | None = None,
    grams: float | None = None,
) -> list[ArmSummary]:
    """Return one row per arm. `rounds`: [round][arm]. `same_prompts`: the arms' answers can be compared. `grams`: of
    CO2e per kWh.
    """
    by_arm = list(zip(*rounds, strict=True))
    rows = []
    for place, (arm, own) in enumerate(zip(arms, by_arm, strict=True)):
        bases = {other.name: by_arm[base] for base, other in enumerate(arms[:place]) if other.is_baseline}
        row = _summary(shape, arm, own, bases, limits, grams)
        if same_prompts:
            counts = [num_identical(*pair) for pair in zip(by_arm[0], own, strict=True)]
            same, num = (sum(column) for column in zip(*counts, strict=True))
            row.identical = f"{same}/{num}" if num else None
        rows.append(row)
    return rows


def _ratios(
    own: Sequence[Round], bases: Mapping[str, Sequence[Round]], figure: Callable[[Round], float]
) -> dict[str, Ratio]:
    """Return the ratio of a figure to each baseline's in the same round, by the baseline's name."""
    ratios = {}
    for name, base in bases.items():
        pairs = [(figure(one), figure(other), one.start) for one, other in zip(own, base, strict=True)]
        known = [(mine / other, start) for mine, other, start in pairs if mine >= 0 and other > 0]  # excludes nan
        if known:
            ratios[name] = Ratio.of(*map(list, zip(*known, strict=True)))
    return ratios


def _summary(
    shape: LoadShape,
    arm: Arm,
    rounds: Sequence[Round],
    bases: Mapping[str, Sequence[Round]],
    limits: Limits | None,
    grams: float | None,
) -> ArmSummary:
    """Summarise one arm's rounds. Arrivals fix the throughput of an open loop, so only its latency is compared."""
    is_open = isinstance(shape, Open)
    ratios = {} if is_open else _ratios(rounds, bases, lambda one: one.tokens_per_second)
    every = [exchange for one in rounds for exchange in one.exchanges]
    answered = [exchange for exchange in every if exchange.events]
    whole = [exchange for exchange in answered if exchange.finished]
    prompts = _known(exchange.num_prompt_tokens for exchange in every)
    statuses = sorted({status for one in rounds for status in one.errors})
    joules = _known(one.joules_per_token for one in rounds)
    return ArmSummary(
        load=shape.name,
        num_streams=shape.num_streams if isinstance(shape, Closed) else None,
        rate=statistics.median(len(one.exchanges) / one.seconds for one in rounds) if is_open else None,
        arm=arm.name,
        speculation=arm.speculation,
        num_rounds=len(rounds),
        num_requests=len(every),
        prompt_tokens=statistics.fmean(prompts) if prompts else None,
        output_tokens=statistics.fmean([exchange.num_tokens for exchange in whole]) if whole else 0.0,
        tokens_per_second=Spread.of([one.tokens_per_second for one in rounds]),
        requests_per_second=Spread.of([one.num_finished / one.seconds for one in rounds]),
        ratios=ratios,
        ratio=next(iter(ratios.values()), None),
        latency_ratios=_ratios(rounds, bases, lambda one: one.request_seconds) if is_open else {},
        tokens_per_step=_spread(one.tokens_per_step for one in rounds),
        drafts_per_step=_spread(one.drafts_per_step for one in rounds),
        first_token_ms=_percentiles([exchange.first_token_seconds for exchange in answered]),
        token_gap_ms=_percentiles([gap for exchange in answered for gap in exchange.token_gaps]),
        event_gap_ms=_percentiles([gap for exchange in answered for gap in exchange.event_gaps]),
        request_ms=_percentiles([exchange.seconds for exchange in whole]),
        goodput=None if limits is None else Spread.of([limits.num_kept(one.exchanges) / one.seconds for one in rounds]),
        kept=None if limits is None else limits.num_kept(every) / len(every),
        errors={status: sum(one.errors.get(status, 0) for one in rounds) for status in statuses},
        late_ms=1000 * percentile([exchange.late for exchange in every], 0.99),
        cpu_shares={name: statistics.median(one.cpu_shares[name] for one in rounds) for name in rounds[0].cpu_shares},
        phases={name: half_ratios(shape, rounds, bases[name]) for name in ratios} if isinstance(shape, Swing) else {},
        watts=_spread(one.watts for one in rounds),
        joules_per_token=_spread(joules),
        grams_per_million_tokens=None
        if grams is None
        else _spread([1e6 * one / JOULES_PER_KWH * grams for one in joules]),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = _known(values)
    return Spread.of(known) if known else None


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": 1000 * percentile(seconds, share / 100) for share in PERCENTILES} if seconds else {}


NOTES = (
    "tokens/s, tokens/step: median (min–max) over the rounds.",
    "ratio: tokens/s over another arm's within the same round; median (95 % bootstrap bounds of it).",
    "time: the mean whole answer over another arm's within the same round; below 1 is faster.",
    "ms: p50/p90/p99 over all requests; per token: the gap before an event, shared among its tokens; "
    "silence: the gap before an event, whatever it carries.",
    "J/token: energy of the server's devices, other programs' included, over generated tokens; median (min–max).",
)

Cell = Callable[[ArmSummary], str]


def _columns(rows: Sequence[ArmSummary]) -> dict[str, Cell]:
    """Return the function of each column that formats a row; "–" or "" if the row has no such figure."""
    baselines = list(dict.fromkeys(name for row in rows for name in row.ratios))
    latencies = list(dict.fromkeys(name for row in rows for name in row.latency_ratios))
    return {
        "load": lambda row: row.load,
        "arm": lambda row: row.arm,
        "tokens/s": lambda row: row.tokens_per_second.shown(0 if row.tokens_per_second.median >= 100 else 1),
        **{f"ratio to {name}": _ratio_cell("ratios", name) for name in baselines},
        **{f"time to {name}'s": _ratio_cell("latency_ratios", name) for name in latencies},
        "tokens/step": lambda row: _shown(row.tokens_per_step, 2),
        "drafts/step": lambda row: "–" if row.drafts_per_step is None else f"{row.drafts_per_step.median:.2f}",
        "first ms": lambda row: _joined(row.first_token_ms, 0),
        "per token ms": lambda row: _joined(row.token_gap_ms, 2),
        "silence ms": lambda row: _joined(row.event_gap_ms, 1),
        "whole ms": lambda row: _joined(row.request_ms, 0),
        "requests/s": lambda row: row.requests_per_second.shown(2),
        "goodput/s": lambda row: _shown(row.goodput, 2),
        "kept": lambda row: "–" if row.kept is None else f"{row.kept:.0%}",
        "errors": lambda row: " ".join(f"{status}×{count}" for status, count in row.errors.items()) or "–",
        "late ms": lambda row: "–" if row.rate is None else f"{row.late_ms:.1f}",
        "CPU": lambda row: " ".join(f"{name} {share:.2f}" for name, share in row.cpu_shares.items()) or "–",
        "W": lambda row: _shown(row.watts, 1),
        "J/token": lambda row: _shown(row.joules_per_token, 4),
        "g CO2e/M tokens": lambda row: _shown(row.grams_per_million_tokens, 1),
        "same": lambda row: row.identical or "–",
    }


def _ratio_cell(field_name: str, baseline: str) -> Cell:
    return lambda row: _shown(getattr(row, field_name).get(baseline), 3)


def _shown(figure: Spread | None, digits: int) -> str:
    return "–" if figure is None else figure.shown(digits)


def _joined(values: Mapping[str, float], digits: int) -> str:
    return "/".join(f"{value:.{digits}f}" for value in values.values()) or "–"


def cells(rows: Sequence[ArmSummary]) -> list[list[str]]:
    """Return the table, header first, without empty columns."""
    columns = {name: [cell(row) for row in rows] for name, cell in _columns(rows).items()}
    shown = {name: column for name, column in columns.items() if any(cell not in ("–", "") for cell in column)}
    return [list(shown), *map(list, zip(*shown.values(), strict=True))]


def table(rows: Sequence[ArmSummary]) -> str:
    """Return the rows as an aligned text table."""
    lines = cells(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, "", *phase_lines(rows), *NOTES])


def phase_lines(rows: Sequence[ArmSummary]) -> list[str]:
    """Return the ratios in a swing's halves, one per line."""
    return [
        f"{row.arm} / {base}, {half} half: {ratio.shown()}"
        for row in rows
        for base, halves in row.phases.items()
        for half, ratio in halves.items()
    ]


def synthetic_acceptance_label(infos: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the label for every figure if a server accepts drafts at a synthetic rate, else ""."""
    rates = {name: info.get("synthetic_acceptance") for name, info in infos.items()}
    labels = {name: label(rate) for name, rate in rates.items() if rate}
    if len(infos) == 1:
        return "".join(labels.values())
    return "; ".join(f"{name}: {text}" for name, text in labels.items())


def record(facts: Mapping[str, Any], load: Mapping[str, Any], result: BenchResult) -> dict[str, Any]:
    """Return the content of the JSON file."""
    moments = {
        name: [asdict(one) | {"share_below": one.share_below} for one in lines]
        for name, lines in result.timelines.items()
    }
    rows = [asdict(row) for row in result.rows]
    return {"facts": dict(facts), "load": dict(load), "rows": rows, "moments": moments}


def markdown(record: Mapping[str, Any], rows: Sequence[ArmSummary], pictures: Sequence[str] = ()) -> str:
    """Return the record as a Markdown page."""
    head, *lines = cells(rows)
    synthetic = record["facts"].get("synthetic_acceptance")
    text = [f"# Load, {synthetic}" if synthetic else "# Load", ""]
    if synthetic:
        text += [
            "Drafts were accepted at a synthetic rate; `spaceserve bench --model demo` shows what trained masks reach.",
            "",
        ]
    facts = {name: value for name, value in record["facts"].items() if value not in (None, "", [], {})}
    text += [f"- {name}: {_in_words(value)}" for name, value in facts.items()]
    text += ["", "Load: " + "; ".join(f"{name} {_in_words(value)}" for name, value in record["load"].items()), ""]
    text += [markdown_table(head, lines)]
    text += [*(f"- {note}" for note in (*phase_lines(rows), *NOTES)), ""]
    text += [f"![{picture.removesuffix('.png')}]({picture})" for picture in pictures]
    return "\n".join(text) + "\n"


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


HALVES = ("low", "high")


@dataclass(frozen=True)
class SwingTimeline:
    """One arm's timeline: medians over the rounds."""

    arm: str
    seconds: tuple[float, ...]  # middle of each moment
    tokens_per_second: tuple[float, ...]
    ratios: tuple[float, ...]  # median over rounds of the ratio to the first arm; empty for that arm
    draft_lengths: tuple[tuple[float, float, float, float], ...]  # (seconds, median, lowest, highest) of the rounds
    draft_change: float | None  # mean change of the draft length between samples within a half; None without samples

    @property
    def share_below(self) -> float:
        """Share of moments in which more than half of the rounds were slower than the first arm."""
        return sum(ratio < 1 for ratio in self.ratios) / len(self.ratios) if self.ratios else 0.0


def timelines(swing: Swing, rounds: Sequence[Sequence[Round]]) -> list[SwingTimeline]:
    """Return the timeline of each arm. `rounds`: [round][arm]."""
    wide = swing.moment_seconds
    lines = [[one.timeline(wide) for one in arms] for arms in rounds]
    moments = range(min(len(line) for arms in lines for line in arms))
    made = []
    for place, first in enumerate(rounds[0]):
        own = [arms[place] for arms in rounds]
        ratios = []
        for moment in moments if place else ():
            pairs = [(arms[place][moment], arms[0][moment]) for arms in lines]
            ratios.append(statistics.median([mine / other if other else 1.0 for mine, other in pairs]))
        made.append(
            SwingTimeline(
                arm=first.arm,
                seconds=tuple((moment + 0.5) * wide for moment in moments),
                tokens_per_second=tuple(statistics.median(arms[place][m] for arms in lines) for m in moments),
                ratios=tuple(ratios),
                draft_lengths=_draft_lengths(wide, own),
                draft_change=_draft_change(swing, own),
            )
        )
    return made


def _draft_lengths(wide: float, rounds: Sequence[Round]) -> tuple[tuple[float, float, float, float], ...]:
    samples: dict[int, list[float]] = {}
    for one in rounds:
        for sample in one.drafts:
            samples.setdefault(round(sample.seconds / wide), []).append(sample.draft_length)
    return tuple(
        ((number - 0.5) * wide, statistics.median(lengths), min(lengths), max(lengths))
        for number, lengths in sorted(samples.items())
    )


def _draft_change(swing: Swing, rounds: Sequence[Round]) -> float | None:
    pairs = [pair for one in rounds for pair in itertools.pairwise(one.drafts)]
    middle = swing.moment_seconds / 2  # a sample covers the time before it

    def half(sample: DraftSample) -> int:
        return int((sample.seconds - middle) / swing.period)

    changes = [abs(b.draft_length - a.draft_length) for a, b in pairs if half(a) == half(b)]
    return statistics.fmean(changes) if changes else None


def half_ratios(swing: Swing, mine: Sequence[Round], others: Sequence[Round]) -> dict[str, Ratio]:
    """Return the ratios of tokens in all low and in all high halves to the other arm's in the same round."""
    found: dict[str, list[float]] = {name: [] for name in HALVES}
    for one, other in zip(mine, others, strict=True):
        for name, made, plain in zip(HALVES, _tokens(swing, one), _tokens(swing, other), strict=True):
            if plain:
                found[name].append(made / plain)
    return {name: Ratio.of(ratios) for name, ratios in found.items() if ratios}


def _tokens(swing: Swing, one: Round) -> tuple[int, int]:
    """Return the tokens in the low and in the high halves."""
    counts = [0, 0]
    for at, num_tokens in one.arrivals:
        counts[int(at / swing.period) % 2] += num_tokens
    return counts[0], counts[1]


def draw(folder: Path, result: BenchResult, note: str) -> list[str]:
    """Draw the plots. Return the file names. Raises PlotError."""
    rows = result.rows
    made = _plot_ratios(folder, rows, note)
    closed = [row for row in rows if row.num_streams is not None]
    opened = [row for row in rows if row.rate is not None]
    for what, name in (("first token", "first_token"), ("per token", "per_token")):
        if closed:
            made.append(_plot_by_streams(folder / f"{name}.png", closed, what, note))
        if opened:
            made.append(_plot_by_rate(folder / f"{name}_by_rate.png", opened, what, note))
    for load, moments in result.timelines.items():
        made += _plot_swing(folder, load, moments, note)
    return made


def _plot_ratios(folder: Path, rows: Sequence[ArmSummary], note: str) -> list[str]:
    series: dict[str, dict[str, float | Bar]] = {}
    for row in rows:
        for name, ratio in row.ratios.items():
            group = str(row.num_streams or row.load)
            series.setdefault(f"{row.arm} / {name}", {})[group] = Bar(ratio.median, ratio.low, ratio.high)
    path, title, y = folder / "ratio.png", "Throughput ratio, 95 % bootstrap bounds", "tokens/s over the other arm's"
    if series:
        bar_plot(path, series, title=title, x="streams at once", y=y, level=1.0, digits=3, note=note)
    return [path.name] if series else []


FIGURES: Mapping[str, Callable[[ArmSummary], Mapping[str, float]]] = {
    "first token": lambda row: row.first_token_ms,
    "per token": lambda row: row.token_gap_ms,
}


def _plot_by_streams(path: Path, rows: Sequence[ArmSummary], what: str, note: str) -> str:
    series: dict[str, dict[str, float | Bar]] = {}
    for row in rows:
        if figures := FIGURES[what](row):
            bar = Bar(figures["p50"], figures["p50"], figures["p99"])
            series.setdefault(row.arm, {})[str(row.num_streams)] = bar
    title = f"Latency, {what}: half of all, and the line up to 99 %"
    bar_plot(path, series, title=title, x="streams at once", y="ms", digits=1, note=note)
    return path.name


def _plot_by_rate(path: Path, rows: Sequence[ArmSummary], what: str, note: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for share in ("p50", "p99") if FIGURES[what](row) else ():
            series.setdefault(f"{row.arm}, {share}", []).append((row.rate or 0.0, FIGURES[what](row)[share]))
    series = {name: sorted(points) for name, points in series.items()}
    line_plot(path, series, title=f"Latency, {what}", x="requests per second that came", y="ms", note=note)
    return path.name


def _plot_swing(folder: Path, load: str, moments: Sequence[SwingTimeline], note: str) -> list[str]:
    speed = {one.arm: list(zip(one.seconds, one.tokens_per_second, strict=True)) for one in moments}
    made = [line_plot(folder / "swing.png", speed, title=f"Throughput, {load}", x="s", y="tokens/s", note=note)]
    ratios = {
        f"{one.arm} / {moments[0].arm}": list(zip(one.seconds, one.ratios, strict=True))
        for one in moments
        if one.ratios
    }
    if ratios:
        level = {"1": [(second, 1.0) for second in moments[0].seconds]}
        title = f"Throughput as a ratio, {load}"
        made.append(line_plot(folder / "swing_ratio.png", ratios | level, title=title, x="s", y="ratio", note=note))
    drafts = {one.arm: [(look[0], look[1]) for look in one.draft_lengths] for one in moments if one.draft_lengths}
    if drafts:
        bands = {one.arm: [(look[2], look[3]) for look in one.draft_lengths] for one in moments}
        path = folder / "drafts.png"
        title = f"Chosen draft length, {load}"
        made.append(line_plot(path, drafts, title=title, x="s", y="drafts per step", ranges=bands, note=note))
    return [path.name for path in made]
