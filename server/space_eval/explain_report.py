"""Tables and figures of which drafts stand where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from space_eval.explain_factors import Factor, Group, by_group, explained_share, factors, over_all
from space_eval.explain_reading import Portrait, reading
from space_eval.measured import markdown_table

NOTE = """\
A cell is the share of judged drafts that stood ± its standard error, and in brackets the group's share of the judged
drafts. A draft is judged if all before it in its step stood; it stands if it is the base's own token. Class and
repetition are of the base's token, entropy of the law it was drawn from (temperature 1, masks banned). A token repeats
if it closes a 4-gram that occurs earlier in prompt or output. An output loops if at least half of its 4-grams have
occurred earlier in it.
"""


def explain_markdown(portraits: Sequence[Portrait], k: int) -> str:
    """For each temperature a paragraph and a table; looping outputs in tables of their own."""
    parts = []
    for temperature in sorted({portrait.temperature for portrait in portraits}):
        of_heat = [portrait for portrait in portraits if portrait.temperature == temperature]
        steady = [portrait for portrait in of_heat if not portrait.looping]
        looping = [portrait for portrait in of_heat if portrait.looping and portrait.num_texts]
        title = "Greedy" if temperature == 0.0 else f"Temperature {temperature:g}"
        parts += [f"## {title}", "", reading(steady, k), "", _table(steady, k)]
        if looping:
            parts += [f"### {title}: outputs that loop", "", _table(looping, k)]
    return "\n".join([*parts, NOTE])


def _table(portraits: Sequence[Portrait], k: int) -> str:
    head = ["", *(portrait.name for portrait in portraits)]
    rows = [
        ["texts", *(f"{portrait.num_texts} of {portrait.num_all_texts}" for portrait in portraits)],
        ["tokens per step", *(_number(portrait.tokens_per_step) for portrait in portraits)],
        ["judged drafts", *(str(len(portrait.drafts)) for portrait in portraits)],
        ["all", *(_cell(over_all(portrait.drafts), len(portrait.drafts)) for portrait in portraits)],
    ]
    for factor in factors(k):
        groups = [by_group(factor, portrait.drafts) for portrait in portraits]
        shares = [explained_share(factor, portrait.drafts) for portrait in portraits]
        rows.append([f"**{factor.name}**", *(f"tells {_percent(share)} of the variance" for share in shares)])
        for name in factor.groups:
            cells = [_cell(g[name], len(p.drafts)) for g, p in zip(groups, portraits, strict=True)]
            rows.append([name, *cells])
    return markdown_table(head, rows)


def _cell(group: Group, num_drafts: int) -> str:
    return f"{group.rate:.2f} ± {group.error:.2f} ({group.num / num_drafts:.0%})" if group.num else "–"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


def explain_record(portraits: Sequence[Portrait], k: int) -> list[dict[str, object]]:
    """Every count, for reading by programs."""
    return [
        {
            "prompts": portrait.name,
            "temperature": portrait.temperature,
            "looping": portrait.looping,
            "texts": portrait.num_texts,
            "all_texts": portrait.num_all_texts,
            "tokens": portrait.num_tokens,
            "steps": portrait.num_steps,
            "factors": {factor.name: _counts(factor, portrait) for factor in factors(k)},
        }
        for portrait in portraits
    ]


def _counts(factor: Factor, portrait: Portrait) -> dict[str, object]:
    share = explained_share(factor, portrait.drafts)
    groups = by_group(factor, portrait.drafts)
    return {
        "explained_share": None if math.isnan(share) else share,
        "groups": {name: {"judged": group.num, "stood": group.num_stood} for name, group in groups.items()},
    }


def draw_explanation(folder: Path, portraits: Sequence[Portrait], k: int) -> None:
    """One figure per factor: outputs that do not loop, with one standard error."""
    from space_eval.plots import Bar, bar_plot

    names = ("position", "entropy", "class", "repetition")
    for name, factor in zip(names, factors(k), strict=True):
        series: dict[str, dict[str, float | Bar]] = {}
        for portrait in portraits:
            if not portrait.looping and portrait.drafts:
                label = f"{portrait.name}, T={portrait.temperature:g}"
                groups = by_group(factor, portrait.drafts)
                series[label] = {
                    group: Bar(found.rate, max(0.0, found.rate - found.error), min(1.0, found.rate + found.error))
                    if found.num
                    else math.nan
                    for group, found in groups.items()
                }
        if series:
            bar_plot(
                folder / f"explain-{name}.png",
                series,
                title=f"Judged drafts that stood, by {factor.name}",
                y="share that stood",
                x=factor.name,
                note="outputs that do not loop; range: one standard error",
            )
