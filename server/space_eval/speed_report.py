"""Plain against SPACE, and transformers' assisted generation beside them: tables, a record and a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_eval.bench_report import Spread
from space_eval.plots import Bar, bar_plot
from space_eval.speed_decoding import PLAIN, Answer

OURS = "ours"
"""The runtime that is not transformers'."""

HEAD = (
    "| T | k | tokens/step | rows/step | speed-up | decode only | not looping | ms/token plain | ms/token SPACE "
    "| looping | same text |"
)
RIVAL_HEAD = (
    "| how | runtime | tokens per pass of the base | passes of the base | other passes | over its own plain decoding "
    "| ms/token | ms/token, its plain | extra weights | extra KV | same text |"
)


@dataclass(frozen=True)
class SpeedRow:
    """One temperature and k over all prompts. Ranges are over the rounds, each a pair with plain decoding."""

    temperature: float
    k: int
    num_prompts: int
    num_tokens: int  # emitted, in one round
    tokens_per_step: float
    rows_per_step: float
    speedup: Spread  # tokens per second over plain decoding's, prompt included
    decode_speedup: Spread  # without the prompt
    speedup_not_looping: Spread | None  # None where all outputs loop
    plain_ms_per_token: Spread
    space_ms_per_token: Spread
    looping: float  # share of prompts
    num_identical: int  # texts equal to plain decoding's

    @classmethod
    def of(cls, temperature: float, k: int, pairs: Sequence[Mapping[int, Answer]]) -> SpeedRow:
        """From what each prompt gave: its answers by k, plain decoding's among them."""
        space = [pair[k] for pair in pairs]
        plain = [pair[PLAIN] for pair in pairs]
        steady = [pair for pair in pairs if not pair[k].is_looping]
        num_steps = sum(answer.num_steps for answer in space)
        return cls(
            temperature=temperature,
            k=k,
            num_prompts=len(pairs),
            num_tokens=sum(len(answer.ids) for answer in space),
            tokens_per_step=_ratio(sum(answer.num_decoded for answer in space), num_steps),
            rows_per_step=_ratio(sum(answer.num_rows for answer in space), num_steps),
            speedup=_over(_rates(space), _rates(plain)),
            decode_speedup=_over(_rates(space, decode_only=True), _rates(plain, decode_only=True)),
            speedup_not_looping=_over(_rates([p[k] for p in steady]), _rates([p[PLAIN] for p in steady]))
            if steady
            else None,
            plain_ms_per_token=_ms(plain),
            space_ms_per_token=_ms(space),
            looping=1 - len(steady) / len(pairs),
            num_identical=sum(one.ids == other.ids for one, other in zip(space, plain, strict=True)),
        )


@dataclass(frozen=True)
class RivalRow:
    """One way of drafting: ours, or one of transformers'. What it needs beside the base, and what it gains."""

    name: str
    runtime: str
    num_prompts: int
    tokens_per_pass: float  # ids emitted per forward pass of the base, the prompt's pass included in both
    num_passes: int  # of the base, in one round
    num_other_passes: int  # of a draft model, in one round
    accepted_share: float  # of drafts; nan where their number is not known
    speedup: Spread  # over plain decoding of the same runtime, prompt included
    ms_per_token: Spread
    plain_ms_per_token: Spread
    extra_weight_bytes: int
    extra_kv_bytes: int  # at the longest prompt and answer
    num_identical: int  # texts equal to plain decoding's of the same runtime


def _rates(answers: Sequence[Answer], *, decode_only: bool = False) -> list[float]:
    """Tokens per second of each round, over all answers."""
    num_tokens = sum(answer.num_decoded if decode_only else len(answer.ids) for answer in answers)
    times = [answer.decode_seconds if decode_only else answer.seconds for answer in answers]
    return [_ratio(num_tokens, sum(seconds)) for seconds in zip(*times, strict=True)]


def _ms(answers: Sequence[Answer]) -> Spread:
    return Spread.of([1000 / rate for rate in _rates(answers)])


def _over(rates: Sequence[float], others: Sequence[float]) -> Spread:
    return Spread.of([_ratio(rate, other) for rate, other in zip(rates, others, strict=True)])


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def to_markdown(rows: Sequence[SpeedRow], rivals: Sequence[RivalRow], facts: Mapping[str, object]) -> str:
    """The facts of the run, the tables, and what their columns mean."""
    lines = ["# Plain decoding against SPACE", ""]
    lines += [f"{name}: {value}  " for name, value in facts.items()]
    lines += ["", HEAD, "|" + "---|" * HEAD.count(" |")]
    for row in rows:
        steady = "–" if row.speedup_not_looping is None else f"{row.speedup_not_looping.median:.2f}"
        lines.append(
            f"| {row.temperature:g} | {row.k} | {row.tokens_per_step:.2f} | {row.rows_per_step:.1f} "
            f"| {row.speedup.shown(2)} | {row.decode_speedup.shown(2)} | {steady} "
            f"| {row.plain_ms_per_token.shown(2)} | {row.space_ms_per_token.shown(2)} | {row.looping:.0%} "
            f"| {row.num_identical}/{row.num_prompts} |"
        )
    lines += [
        "",
        "speed-up: tokens per second over plain decoding in the same round, prompt included: median (low–high).  ",
        "tokens/step and rows/step: of decode steps; the prompt's own pass does not count.  ",
        "not looping: the speed-up without outputs of which at least half of the 4-grams occurred earlier in them.",
    ]
    if rivals:
        lines += ["", "## Other ways of drafting", "", RIVAL_HEAD, "|" + "---|" * RIVAL_HEAD.count(" |")]
        for rival in rivals:
            lines.append(
                f"| {rival.name} | {rival.runtime} | {rival.tokens_per_pass:.2f} | {rival.num_passes} "
                f"| {rival.num_other_passes} | {rival.speedup.shown(2)} | {rival.ms_per_token.shown(2)} "
                f"| {rival.plain_ms_per_token.shown(2)} | {size(rival.extra_weight_bytes)} "
                f"| {size(rival.extra_kv_bytes)} | {rival.num_identical}/{rival.num_prompts} |"
            )
        lines += [
            "",
            "The runtimes differ: transformers' generation loop and our worker spend different time beside the model. "
            "So each ratio is over the plain decoding of its own runtime, and the absolute times stand beside it.  ",
            "tokens per pass: here the prompt's pass counts, for both. Greedy. extra KV: of the draft model at the "
            "longest prompt and answer; of SPACE the k+1 slots that a step writes ahead.",
        ]
    return "\n".join(lines) + "\n"


def size(num_bytes: int) -> str:
    """`10.0 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def write_speed(
    folder: Path, rows: Sequence[SpeedRow], rivals: Sequence[RivalRow], facts: Mapping[str, object]
) -> list[Path]:
    """speed.json, speed.md and speed.png; PlotError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "facts": dict(facts),
        "rows": [_without_nan(asdict(row)) for row in rows],
        "rivals": [_without_nan(asdict(rival)) for rival in rivals],
    }
    (folder / "speed.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "speed.md").write_text(to_markdown(rows, rivals, facts), encoding="utf-8")
    series: dict[str, dict[str, float | Bar]] = {}
    for row in rows:
        bar = Bar(row.speedup.median, row.speedup.low, row.speedup.high)
        series.setdefault(f"SPACE, temperature {row.temperature:g}", {})[f"k={row.k}"] = bar
    for rival in rivals:
        if rival.runtime != OURS:
            bar = Bar(rival.speedup.median, rival.speedup.low, rival.speedup.high)
            kind, _, draft = rival.name.partition(":")
            series.setdefault("transformers", {})[f"{kind}\n{Path(draft).name}" if draft else kind] = bar
    note = f"{facts.get('model', '')}: {facts.get('machine', '')}"
    figure = bar_plot(
        folder / "speed.png", series, title="Over plain decoding", y="times as fast", level=1.0, note=note
    )
    return [folder / "speed.json", folder / "speed.md", figure]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
