"""Draw docker/grafana/spaceserve.json without a Grafana: each panel's own queries, asked of a Prometheus.

    python tests/dashboard/draw.py http://127.0.0.1:9090 START END OUT.png    (seconds since 1970)

Places, titles, units and legends are the file's; lines and colours are matplotlib's.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

DASHBOARD = Path(__file__).parents[2] / "docker/grafana/spaceserve.json"
BACK, CARD, INK, FAINT = "#111217", "#181b1f", "#ccccdc", "#2c3036"
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#8ab8ff", "#e0b400", "#c4162a"]
UNITS = {"s": ("s", 1.0), "watt": ("W", 1.0), "joule": ("J", 1.0), "massg": ("g", 1.0), "percentunit": ("%", 100.0)}
ROW_INCHES, COLUMN_INCHES = 0.36, 0.62


def main(url: str, start: float, end: float, out: Path) -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = pyplot.figure(figsize=(24 * COLUMN_INCHES, rows * ROW_INCHES), facecolor=BACK)
    with httpx.Client(base_url=url, timeout=60) as prometheus:
        for panel in board["panels"]:
            place = panel["gridPos"]
            left, top, width = place["x"] / 24, 1 - place["y"] / rows, place["w"] / 24
            if panel["type"] == "row":
                figure.text(0.006, top - 0.8 / rows, f"⌄ {panel['title']}", color=INK, fontsize=11, weight="bold")
                continue
            card = figure.add_axes(
                (left + 0.003, top - (place["h"] - 0.15) / rows, width - 0.006, (place["h"] - 0.3) / rows)
            )
            card.set_facecolor(CARD)
            card.set(xticks=[], yticks=[])
            for spine in card.spines.values():
                spine.set_color(FAINT)
            card.text(0.02, 1 - 0.55 / place["h"], panel["title"], color=INK, fontsize=9, va="center", weight="bold")
            _draw(card, panel, place["h"], prometheus, start, end)
    figure.savefig(out, dpi=70, facecolor=BACK)


def _draw(card: Axes, panel: dict[str, Any], height: int, prometheus: httpx.Client, start: float, end: float) -> None:
    unit, scale = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], ("", 1.0))
    series = _series(panel, prometheus, start, end)
    if panel["type"] == "stat":
        value = series[0][1][-1][1] * scale if series else None
        shown = "no data" if value is None else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        card.text(0.5, 0.36, shown.strip(), color=COLOURS[0], fontsize=20, ha="center", va="center")
        return
    axes = card.inset_axes((0.10, 2.1 / height, 0.87, 1 - 3.3 / height))
    axes.set_facecolor(CARD)
    axes.tick_params(colors=INK, labelsize=7, length=0)
    axes.grid(color=FAINT, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if panel["type"] == "bargauge":
        _bars(axes, series)
        return
    below = None
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    for number, (name, points) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        times, values = [time - start for time, _ in points], [value * scale for _, value in points]
        if stacked:
            known = dict(zip(times, values, strict=True))
            grid = list(range(int(end - start) + 1))
            low = below or [0.0] * len(grid)
            high = [bottom + known.get(float(time), 0.0) for bottom, time in zip(low, grid, strict=True)]
            axes.fill_between(grid, low, high, color=colour, alpha=0.35, linewidth=0)
            axes.plot(grid, high, color=colour, linewidth=1, label=name)
            below = high
        else:
            axes.plot(times, values, color=colour, linewidth=1.2, label=name)
    axes.set_xlim(0, end - start)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:.0f} s"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {unit}".strip()))
    if series:
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.06, -0.16), ncols=5, fontsize=7, labelcolor=INK, frameon=False,
            columnspacing=1.0, handlelength=1.2,
        )  # fmt: skip
    else:
        axes.text(0.5, 0.5, "no data", color=INK, ha="center", transform=axes.transAxes)


def _bars(axes: Axes, series: list[tuple[str, list[tuple[float, float]]]]) -> None:
    """Buckets of a histogram, each without those below it, as Grafana shows `format: heatmap`."""
    last = sorted((float(name), points[-1][1]) for name, points in series)
    names, before, bars = [], 0.0, []
    for bound, value in last:
        names.append("more" if bound == float("inf") else f"{bound:g}")
        bars.append(value - before)
        before = value
    axes.bar(range(len(bars)), bars, color=COLOURS[0], alpha=0.8)
    axes.set_xticks(range(len(names)), names)


def _series(
    panel: dict[str, Any], prometheus: httpx.Client, start: float, end: float
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Name and points of each series; what is not a number is left out, and a series without any number too."""
    found = []
    known = {"$__rate_interval": "15s", "$__range": f"{end - start:.0f}s", "$instance": ".*", "$carbon": "400"}
    for target in panel["targets"]:
        query = target["expr"]
        for name, value in known.items():
            query = query.replace(name, value)
        asked = {"query": query, "start": start, "end": end, "step": 1}
        answer = prometheus.get("/api/v1/query_range", params=asked).raise_for_status().json()
        for series in answer["data"]["result"]:
            points = [(float(time), float(value)) for time, value in series["values"] if value != "NaN"]
            labels = series["metric"]
            legend = target["legendFormat"]
            for label in re.findall(r"\{\{(\w+)\}\}", legend):
                legend = legend.replace("{{" + label + "}}", labels.get(label, ""))
            if points:
                found.append((legend, points))
    return found


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
