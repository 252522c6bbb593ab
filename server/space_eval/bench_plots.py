"""The figures of a load: ratios by streams, latency, and a swing in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from space_eval.bench_report import Row
from space_eval.bench_swing import Moments
from space_eval.plots import Bar, bar_plot, line_plot


def draw(folder: Path, rows: Sequence[Row], timelines: Mapping[str, Sequence[Moments]], note: str) -> list[str]:
    """The names of the files. Raises PlotError."""
    made = [path.name for path in (_ratios(folder, rows, note),) if path is not None]
    closed = [row for row in rows if row.num_streams is not None]
    if closed:
        made.append(_latency(folder / "latency.png", closed, "streams at once", note))
    opened = [row for row in rows if row.rate is not None]
    if opened:
        made.append(_latency(folder / "latency_by_rate.png", opened, "requests per second that came", note))
    for load, moments in timelines.items():
        made += _swing(folder, load, moments, note)
    return made


def _ratios(folder: Path, rows: Sequence[Row], note: str) -> Path | None:
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
        title="Throughput as a ratio of rounds: median and 95 % bootstrap bounds",
        x="streams at once",
        y="tokens/s over the other arm's",
        level=1.0,
        digits=3,
        note=note,
    )


def _latency(path: Path, rows: Sequence[Row], x: str, note: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        across = row.num_streams if row.num_streams is not None else row.rate or 0.0
        for what, figures in (("first token", row.first_token_ms), ("per token", row.token_gap_ms)):
            for share in ("p50", "p99"):
                if share in figures:
                    series.setdefault(f"{row.arm}, {what} {share}", []).append((across, figures[share]))
    series = {name: sorted(points) for name, points in series.items()}
    line_plot(path, series, title="Latency", x=x, y="ms", log_x=True, note=note)
    return path.name


def _swing(folder: Path, load: str, moments: Sequence[Moments], note: str) -> list[str]:
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
    drafts = {one.arm: list(one.draft_lengths) for one in moments if one.draft_lengths}
    if drafts:
        title = f"Chosen draft length, {load}"
        made.append(line_plot(folder / "drafts.png", drafts, title=title, x="s", y="drafts per step, mean", note=note))
    return [path.name for path in made]
