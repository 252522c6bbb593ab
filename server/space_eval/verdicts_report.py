"""What a comparison of verification rules says: rows, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from space_eval.generation import Generation
from space_eval.measured import markdown_table
from space_eval.text_statistics import is_looping
from space_eval.verdict_rules import Rule
from space_eval.verdicts_step import Place

NOTES = """\
Total variation is ½ Σ |law of the first tokens under the rule - law of one token at a time|, by exact enumeration in
float64 (the coupling by exact integration over its noise): an exact rule shows rounding alone. The row of the worker's
own kernels counts sampled runs; beside it stands what an exact sampler of as many runs shows, mean ± standard
deviation. ± elsewhere is one standard error over texts. \
"""


@dataclass(frozen=True)
class ErrorRow:
    """How far a rule's law lies from decoding one token at a time."""

    case: str
    rule: str
    total_variation: float
    tokens_in_first_step: float | None  # enumerated; None where runs were sampled
    floor: float | None = None  # what an exact sampler shows, where runs were sampled
    deviation: float | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class DecodingRow:
    """One rule on the checkpoint. The prefill's token counts nowhere."""

    rule: str
    temperature: float
    max_drafts: int
    num_texts: int
    num_steps: int
    tokens_per_step: float
    standard_error: float  # of tokens per step, over texts
    tokens_per_step_not_looping: float
    looping: float  # share of texts
    reached: tuple[float, ...]  # of the steps with a draft at position 1, 2, …: share in which it stood

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class SamePlaces:
    """Rules compared where the same text had come to, so that no text differs: means over steps."""

    temperature: float
    max_drafts: int
    first_draft: dict[str, float]  # chance that the first draft stands, at the places of the coupling's texts
    token_wise: float  # accepted drafts of the same drawn drafts, at the places of the token-wise rule's texts
    block: float
    gain: float  # block - token-wise
    gain_error: float  # its standard error, over steps

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def decoding_row(rule: Rule, temperature: float, max_drafts: int, texts: Sequence[Generation]) -> DecodingRow:
    """One row from all texts of a rule."""
    steady = [text for text in texts if not is_looping(text.tokens)]
    mean, error = tokens_per_step(texts)
    reached = []
    for position in range(1, max_drafts + 1):
        laid_out = [step for text in texts for step in text.steps if step.num_drafted >= position]
        reached.append(_ratio(sum(step.num_accepted >= position for step in laid_out), len(laid_out)))
    return DecodingRow(
        rule=rule.value,
        temperature=temperature,
        max_drafts=max_drafts,
        num_texts=len(texts),
        num_steps=sum(len(text.steps) for text in texts),
        tokens_per_step=mean,
        standard_error=error,
        tokens_per_step_not_looping=tokens_per_step(steady)[0],
        looping=1.0 - _ratio(len(steady), len(texts)),
        reached=tuple(reached),
    )


def tokens_per_step(texts: Sequence[Generation]) -> tuple[float, float]:
    """Σ tokens / Σ steps, and its standard error with texts as the units (the ratio estimator's)."""
    pairs = [(text.num_decoded, len(text.steps)) for text in texts]
    num_steps = sum(steps for _, steps in pairs)
    mean = _ratio(sum(tokens for tokens, _ in pairs), num_steps)
    n = len(pairs)
    if n < 2:
        return mean, math.nan
    spread = sum((tokens - mean * steps) ** 2 for tokens, steps in pairs)
    return mean, math.sqrt(spread * n / (n - 1)) / num_steps


def same_places(temperature: float, max_drafts: int, served: Sequence[Place], drawn: Sequence[Place]) -> SamePlaces:
    """Means over the places of the coupling's texts, and of the token-wise rule's."""
    rules = (Rule.COUPLING, Rule.TOKEN_WISE, Rule.ARGMAX)
    first = {rule.value: _mean([place.first_draft[rule] for place in served]) for rule in rules}
    token_wise = [place.same_drafts[Rule.TOKEN_WISE] for place in drawn]
    block = [place.same_drafts[Rule.BLOCK] for place in drawn]
    gains = [b - t for b, t in zip(block, token_wise, strict=True)]
    gain, n = _mean(gains), len(gains)
    error = math.sqrt(sum((x - gain) ** 2 for x in gains) / (n * (n - 1))) if n > 1 else math.nan
    return SamePlaces(temperature, max_drafts, first, _mean(token_wise), _mean(block), gain, error)


def verdicts_markdown(errors: Sequence[ErrorRow], rows: Sequence[DecodingRow], places: Sequence[SamePlaces]) -> str:
    """Three tables."""
    parts = ["## Error on tiny vocabularies", "", markdown_table(*_error_cells(errors)), NOTES, ""]
    parts += ["## Decoding", "", markdown_table(*_decoding_cells(rows))]
    parts += ["## At the same places of the same texts", "", markdown_table(*_place_cells(places))]
    parts += [
        "First draft: its chance to stand, over drafts and noise, at every step of the coupling's texts; no rule "
    ]
    parts[-1] += "can exceed rejection's Σ min(p, q). Same drafts: mean accepted of k at every step of the token-wise "
    parts[-1] += "rule's texts, over the coins alone.\n"
    return "\n".join(parts)


def _error_cells(rows: Sequence[ErrorRow]) -> tuple[list[str], list[list[str]]]:
    cells = []
    for row in rows:
        error = f"{row.total_variation:.4f}" if row.total_variation > 1e-9 else f"{row.total_variation:.0e}"
        if row.floor is not None:
            error += f" (an exact sampler: {row.floor:.4f} ± {row.deviation:.4f})"
        tokens = "–" if row.tokens_in_first_step is None else f"{row.tokens_in_first_step:.3f}"
        cells.append([row.case, row.rule, error, tokens])
    return ["vocabulary", "rule", "total variation", "tokens in the first step"], cells


def _decoding_cells(rows: Sequence[DecodingRow]) -> tuple[list[str], list[list[str]]]:
    head = ["T", "k", "rule", "tokens/step", "not looping", "looping", "1, 2, … drafts stood", "texts", "steps"]
    return head, [
        [
            f"{row.temperature:g}",
            str(row.max_drafts),
            row.rule + (" (served)" if row.rule == Rule.COUPLING else ""),
            f"{row.tokens_per_step:.2f} ± {row.standard_error:.2f}",
            f"{row.tokens_per_step_not_looping:.2f}",
            f"{row.looping:.0%}",
            " ".join(f"{share:.2f}" for share in row.reached),
            str(row.num_texts),
            str(row.num_steps),
        ]
        for row in rows
    ]


def _place_cells(rows: Sequence[SamePlaces]) -> tuple[list[str], list[list[str]]]:
    head = ["T", "k", "first draft: coupling", "rejection", "argmax"]
    head += ["same drafts: token-wise", "block", "block - token-wise"]
    return head, [
        [
            f"{row.temperature:g}",
            str(row.max_drafts),
            *(f"{row.first_draft[rule]:.3f}" for rule in (Rule.COUPLING, Rule.TOKEN_WISE, Rule.ARGMAX)),
            f"{row.token_wise:.3f}",
            f"{row.block:.3f}",
            f"{row.gain:+.3f} ± {row.gain_error:.3f}",
        ]
        for row in rows
    ]


def draw_verdicts(folder: Path, errors: Sequence[ErrorRow], rows: Sequence[DecodingRow]) -> None:
    """verdicts-tokens.png (tokens per step, with one standard error), verdicts-positions.png, verdicts-error.png."""
    from space_eval.plots import Bar, bar_plot, line_plot

    k = max(row.max_drafts for row in rows)
    widest = [row for row in rows if row.max_drafts == k]
    bars: dict[str, dict[str, float | Bar]] = {}
    for row in widest:
        error = row.standard_error if math.isfinite(row.standard_error) else 0.0
        bar = Bar(row.tokens_per_step, row.tokens_per_step - error, row.tokens_per_step + error)
        bars.setdefault(f"temperature {row.temperature:g}", {})[row.rule] = bar
    bar_plot(
        folder / "verdicts-tokens.png",
        bars,
        title=f"Tokens per step by verification rule, k={k}",
        y="tokens per step",
        level=1.0,
        note="range: one standard error over texts; published is not exact, only coupling serves",
    )
    temperature = widest[0].temperature
    line_plot(
        folder / "verdicts-positions.png",
        {
            row.rule: [(float(position), share) for position, share in enumerate(row.reached, start=1)]
            for row in widest
            if row.temperature == temperature
        },
        title=f"Steps in which at least so many drafts stood, k={k}, temperature {temperature:g}",
        x="drafts",
        y="share of steps",
    )
    sizes: dict[str, dict[str, float | Bar]] = {}
    for case in errors:
        if case.floor is None:
            sizes.setdefault(case.case, {})[case.rule] = case.total_variation
    bar_plot(
        folder / "verdicts-error.png",
        sizes,
        title="Total variation from one token at a time, exact enumeration",
        y="total variation",
        digits=3,
    )


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
