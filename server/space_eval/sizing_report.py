"""Fleets as a table and a record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from space_eval.simulate_figures import Figures
from space_eval.simulate_report import TITLE
from space_eval.simulate_run import Scenario
from space_eval.sizing_fleet import Fleet
from space_eval.sizing_node import Node

EVENT_BYTES, TOKEN_BYTES = 268, 4
"""Of an event of a streamed completion over HTTP (`spaceserve bench streams`), and of the text of a token in it."""

HEAD = (
    "nodes",
    "workers",
    "routers",
    "requests/s",
    "tokens/s",
    "streams at once",
    "TTFT p95",
    "ITL p95",
    "workers busy",
    "a router busy",
    "MB/s to clients",
    "MB/s to workers and back",
)


def facts(node: Node, scenario: Scenario, share: float) -> Mapping[str, str]:
    """What the figures follow from, a line each."""
    worker = scenario.worker
    lengths = f"prompts {node.prompt_tokens}, answers {node.output_tokens} tokens"
    return {
        "what": TITLE,
        "node": f"node: {node.what}; {node.num_workers} worker{'s' * (node.num_workers > 1)}, each {worker.num_blocks} "
        f"pages of {worker.block_size}, {worker.max_sequences} sequences, --speculation {worker.speculation}",
        "machine": f"machine: {scenario.machine.name}",
        "drafts": f"drafts come true: {scenario.acceptance.name}",
        "load": f"load: Poisson; {lengths}; {node.limits} kept by {share:.0%}; {node.seconds:g} s a trial, seed "
        f"{scenario.seed}",
        "router": f"router: {scenario.router.name}; {1e6 * scenario.link:g} µs to a worker",
    }


def row(fleet: Fleet) -> dict[str, float]:
    """The figures of a whole fleet, by the names of the table's columns."""
    cell = fleet.cell.figures
    tokens, pieces = cell.tokens_per_second, cell.num_pieces / cell.seconds
    return {
        "nodes": fleet.num_nodes,
        "workers": fleet.num_workers,
        "routers": fleet.num_routers,
        "requests/s": fleet.rate,
        "tokens/s": fleet.scale * tokens,
        "streams at once": fleet.scale * streams(cell),
        "TTFT p95": cell.latencies["ttft"]["p95"],
        "ITL p95": cell.latencies["itl"]["p95"],
        "workers busy": cell.busy,
        "a router busy": cell.router_busy,
        "MB/s to clients": fleet.scale * (EVENT_BYTES * pieces + TOKEN_BYTES * tokens) / 1e6,
        "MB/s to workers and back": fleet.scale * tokens * cell.link_bytes_per_token / 1e6,
    }


def streams(figures: Figures) -> float:
    """That run or wait, on average over the second half of a run."""
    late = figures.moments[len(figures.moments) // 2 :]
    return sum(moment.running + moment.queued for moment in late) / len(late) if late else math.nan


def table(found: Sequence[Fleet]) -> str:
    """As Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---:|" * len(HEAD)]
    for fleet in found:
        lines.append("| " + " | ".join(_shown(name, value) for name, value in row(fleet).items()) + " |")
    return "\n".join(lines)


def record(found: Sequence[Fleet]) -> list[dict[str, Any]]:
    return [{**row(fleet), "workers of the largest router": fleet.cell.num_workers} for fleet in found]


def _shown(name: str, value: float) -> str:
    if name in ("TTFT p95", "ITL p95"):
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.2f} s"
    if name.endswith("busy"):
        return f"{value:.0%}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
