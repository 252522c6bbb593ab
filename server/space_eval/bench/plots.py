"""Plots of a load: ratios by streams, latency, and a swing over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from space_eval.bench.report import ArmSummary, BenchResult, SwingTimeline
from space_eval.plots import Bar, bar_plot, line_plot


def draw(folder: Path, result: BenchResult, note: str) -> list[str]:
    """Draw the plots. Return the file names. Raises PlotError."""
    rows = result.rows
    made = [path.name for path in (_ratios(folder, rows, note),) if path is not None]
    closed = [row for row in rows if row.num_streams is not None]
    opened = [row for row in rows if row.rate is not None]
    for what, name in (("first token", "first_token"), ("per token", "per_token")):
        if closed:
            made.append(_by_streams(folder / f"{name}.png", closed, what, note))
        if opened:
            made.append(_by_rate(folder / f"{name}_by_rate.png", opened, what, note))
    for load, moments in result.timelines.items():
        made += _swing(folder, load, moments, note)
    return made


def _ratios(folder: Path, rows: Sequence[ArmSummary], note: str) -> Path | None:
    series: dict[str, dict[str, float | Bar]] = {}
    for row in rows:
        for name, ratio in row.ratios.items():
            group = str(row.num_streams or row.load)
            series.setdefault(f"{row.arm} / {name}", {})[group] = Bar(ratio.median, ratio.low, ratio.high)
    if not series:
        return None
    return bar_plot(
        folder / "ratio.png",
        series,
        title="Throughput ratio, 95 % bootstrap bounds",
        x="streams at once",
        y="tokens/s over the other arm's",
        level=1.0,
        digits=3,
        note=note,
    )


def _figures(row: ArmSummary, what: str) -> Mapping[str, float]:
    return row.first_token_ms if what == "first token" else row.token_gap_ms


def _by_streams(path: Path, rows: Sequence[ArmSummary], what: str, note: str) -> str:
    series: dict[str, dict[str, float | Bar]] = {}
    for row in rows:
        if figures := _figures(row, what):
            bar = Bar(figures["p50"], figures["p50"], figures["p99"])
            series.setdefault(row.arm, {})[str(row.num_streams)] = bar
    title = f"Latency, {what}: half of all, and the line up to 99 %"
    bar_plot(path, series, title=title, x="streams at once", y="ms", digits=1, note=note)
    return path.name


def _by_rate(path: Path, rows: Sequence[ArmSummary], what: str, note: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for share in ("p50", "p99") if _figures(row, what) else ():
            series.setdefault(f"{row.arm}, {share}", []).append((row.rate or 0.0, _figures(row, what)[share]))
    series = {name: sorted(points) for name, points in series.items()}
    line_plot(path, series, title=f"Latency, {what}", x="requests per second that came", y="ms", note=note)
    return path.name


def _swing(folder: Path, load: str, moments: Sequence[SwingTimeline], note: str) -> list[str]:
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
