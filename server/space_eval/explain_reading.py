"""The paragraph below the tables: which sentences it has, and their words, follow from comparing the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from space_eval.explain_drafts import JudgedDraft
from space_eval.explain_factors import (
    ENTROPY,
    REPETITION,
    TOKEN,
    Factor,
    Group,
    by_group,
    difference,
    explained_share,
    factors,
    over_all,
    position,
)

LEAST = 30
"""Judged drafts below which a group is not spoken of."""
LEAST_TEXTS = 5
"""Texts below which a set is compared with no other: the drafts of one text are no independent witnesses."""


@dataclass(frozen=True)
class Portrait:
    """One set of prompts at one temperature: outputs that loop, or those that do not."""

    name: str
    temperature: float
    looping: bool
    num_texts: int
    num_all_texts: int  # of the set, looping or not
    num_tokens: int
    num_steps: int
    drafts: list[JudgedDraft]

    @property
    def tokens_per_step(self) -> float:
        """Without the prefill's token."""
        return self.num_tokens / self.num_steps if self.num_steps else math.nan


def reading(portraits: Sequence[Portrait], k: int) -> str:
    """One paragraph about the portraits of one temperature whose outputs do not loop."""
    spoken = [portrait for portrait in portraits if len(portrait.drafts) >= LEAST]
    heat = "Greedy" if portraits[0].temperature == 0.0 else f"At temperature {portraits[0].temperature:g}"
    if not spoken:
        return f"{heat}: fewer than {LEAST} drafts were judged in outputs that do not loop; nothing is said of them."
    drafts = [draft for portrait in spoken for draft in portrait.drafts]
    gains = "; ".join(
        f"{p.name} {p.tokens_per_step:.2f} tokens per step ({p.num_texts} of {p.num_all_texts} texts)" for p in spoken
    )
    parts = [f"{heat}, outputs that do not loop: {gains}."]
    parts += [
        part
        for part in (
            _about_position(drafts, k),
            _about_entropy(drafts),
            _about_classes(drafts),
            _about_repetition(drafts),
            _about_telling(drafts, k),
            _about_sets(spoken, k),
        )
        if part
    ]
    return " ".join(parts)


def _populated(factor: Factor, drafts: Sequence[JudgedDraft]) -> dict[str, Group]:
    return {name: group for name, group in by_group(factor, drafts).items() if group.num >= LEAST}


def compare(one: Group, other: Group) -> int:
    """1 if one's rate is higher by more than two standard errors of the difference, -1 if lower, else 0."""
    gap = one.rate - other.rate
    error = math.hypot(one.error, other.error)
    return 0 if abs(gap) <= 2 * error else (1 if gap > 0 else -1)


def _about_position(drafts: Sequence[JudgedDraft], k: int) -> str:
    groups = _populated(position(k), drafts)
    if len(groups) < 2:
        return ""
    (first, one), *_, (last, other) = groups.items()
    remark = {
        1: ": later drafts are harder, even where those before them stood",
        0: ", a difference that may be chance",
        -1: ": later drafts are easier once those before them stood",
    }[compare(one, other)]
    return (
        f"Draft {first} stands in {_share(one)} of its places, draft {last} in {_share(other)} of the places that it "
        f"reaches{remark}."
    )


def _about_entropy(drafts: Sequence[JudgedDraft]) -> str:
    groups = _populated(ENTROPY, drafts)
    if len(groups) < 2:
        return ""
    (low, sure), *_, (high, unsure) = groups.items()
    rises = any(compare(b, a) > 0 for a, b in pairwise(groups.values()))
    course = {
        1: "not steadily in between" if rises else "and no bin in between breaks the fall",
        0: "a difference that may be chance",
        -1: "more where it is less sure",
    }[compare(sure, unsure)]
    return (
        f"Where the base's entropy is {_bin(low)} ({sure.num / len(drafts):.0%} of the places) {_share(sure)} stand, "
        f"where it is {_bin(high)} ({unsure.num / len(drafts):.0%}) {_share(unsure)}, {course}."
    )


def _about_classes(drafts: Sequence[JudgedDraft]) -> str:
    groups = _populated(TOKEN, drafts)
    if len(groups) < 2:
        return ""
    ranked = sorted(groups.items(), key=lambda item: -item[1].rate)
    (easy, one), (hard, other) = ranked[0], ranked[-1]
    if compare(one, other) == 0:
        return f"Token classes do not differ beyond chance ({easy} {_share(one)}, {hard} {_share(other)})."
    between = ", ".join(f"{name} {_share(group)}" for name, group in ranked[1:-1])
    middle = f", between them {between}" if between else ""
    return f"By token class {easy} is easiest ({_share(one)}) and {hard} hardest ({_share(other)}){middle}."


def _about_repetition(drafts: Sequence[JudgedDraft]) -> str:
    groups = _populated(REPETITION, drafts)
    if len(groups) < 2:
        return ""
    again, new = groups["repeats"], groups["new"]
    word = {1: "more often than", 0: "as often as", -1: "less often than"}[compare(again, new)]
    return (
        f"Tokens that close a 4-gram seen before ({again.num / len(drafts):.0%}) are drafted right {word} new ones: "
        f"{_share(again)} against {_share(new)}."
    )


def _about_telling(drafts: Sequence[JudgedDraft], k: int) -> str:
    shares = {factor.name: explained_share(factor, drafts) for factor in factors(k)}
    ranked = sorted(((s, name) for name, s in shares.items() if not math.isnan(s)), reverse=True)
    if not ranked:
        return ""
    listed = ", ".join(f"{_bare(name)} {share:.0%}" for share, name in ranked)
    return f"Of the variance of which drafts stand each alone accounts for: {listed}."


def _about_sets(portraits: Sequence[Portrait], k: int) -> str:
    """The set that gains most against each other set."""
    best, *others = sorted(portraits, key=lambda portrait: -portrait.tokens_per_step)
    return " ".join(_about_pair(best, other, k) for other in others)


def _about_pair(best: Portrait, other: Portrait, k: int) -> str:
    few = min(best, other, key=lambda portrait: portrait.num_texts)
    if few.num_texts < LEAST_TEXTS:
        return f"{best.name} and {other.name} are not compared: of {few.name} only {few.num_texts} texts do not loop."
    one, two = over_all(best.drafts), over_all(other.drafts)
    gap = one.rate - two.rate
    lead = (
        f"{best.name} gains more than {other.name} ({best.tokens_per_step:.2f} against {other.tokens_per_step:.2f} "
        f"tokens per step): a judged draft stands in {_share(one)} of its places against {_share(two)}"
    )
    if compare(one, two) <= 0:
        return f"{lead}, which may be chance."
    found = {}
    for factor in factors(k):
        if factor.name != "position":  # how far a chain reaches is a consequence
            found[factor] = difference(factor, best.drafts, other.drafts).composition / gap
    ranked = sorted(found.items(), key=lambda item: -item[1])
    (factor, share), *rest = ranked
    amount = "Nearly all" if share > 0.8 else "Most" if share > 0.5 else "A part" if share > 0.2 else "Little"
    because = f": {_shift(factor, best, other)}" if share > 0.2 else ""
    tail = "; ".join(f"{_bare(f.name)} {s:.0%}" for f, s in rest)
    return (
        f"{lead}. {amount} of that ({share:.0%}) goes with {_bare(factor.name)}{because}; {1 - share:.0%} is left at "
        f"equal {_bare(factor.name)}. The others, each alone: {tail}."
    )


def _shift(factor: Factor, one: Portrait, other: Portrait) -> str:
    """The group whose other share in `one` brings it most, in words."""
    a, b = by_group(factor, one.drafts), by_group(factor, other.drafts)
    pooled = over_all([*one.drafts, *other.drafts]).rate
    both = by_group(factor, [*one.drafts, *other.drafts])

    def worth(name: str) -> float:
        more = a[name].num / len(one.drafts) - b[name].num / len(other.drafts)
        return more * (both[name].rate - pooled) if both[name].num else -math.inf

    more = [name for name in factor.groups if a[name].num * len(other.drafts) > b[name].num * len(one.drafts)]
    name = max(more, key=worth, default=factor.groups[0])
    if worth(name) <= 0:
        name = max(factor.groups, key=worth)
    share_a, share_b = a[name].num / len(one.drafts), b[name].num / len(other.drafts)
    label = f"places with entropy {_bin(name)}" if factor is ENTROPY else f"places of the group “{name}”"
    word = "more" if share_a > share_b else "fewer"
    return f"{one.name} has {word} {label} ({share_a:.0%} against {share_b:.0%})"


def _bin(name: str) -> str:
    if name.startswith("<"):
        return f"below {name[2:]} nats"
    if name.startswith("≥"):
        return f"{name[2:]} nats or more"
    return f"{name} nats"


def _bare(name: str) -> str:
    return name.partition(" (")[0].removesuffix(" of the base")


def _share(group: Group) -> str:
    return f"{group.rate:.2f}"
