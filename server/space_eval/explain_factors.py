"""What goes with a draft's standing: rates by group, how much a grouping tells, and why two kinds of text differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from space_eval.explain_drafts import JudgedDraft
from space_eval.token_class import TokenClass

ENTROPY_BOUNDS = (0.1, 0.5, 1.0, 2.0, 3.0)
"""Nats between the bins: from all but certain to about 20 ids as good as each other."""


@dataclass(frozen=True)
class Factor:
    """A way to sort drafts into groups."""

    name: str
    groups: tuple[str, ...]  # in order
    group_of: Callable[[JudgedDraft], str]


def _entropy_groups() -> tuple[str, ...]:
    bounds = [f"{bound:g}" for bound in ENTROPY_BOUNDS]
    between = [f"{low}–{high}" for low, high in pairwise(bounds)]
    return (f"< {bounds[0]}", *between, f"≥ {bounds[-1]}")


ENTROPY_GROUPS = _entropy_groups()
ENTROPY = Factor(
    "entropy of the base (nats)",
    ENTROPY_GROUPS,
    lambda draft: ENTROPY_GROUPS[sum(draft.entropy >= bound for bound in ENTROPY_BOUNDS)],
)
TOKEN = Factor("token class", tuple(TokenClass), lambda draft: draft.token_class.value)
REPETITION = Factor("repetition", ("repeats", "new"), lambda draft: "repeats" if draft.repeats else "new")


def position(k: int) -> Factor:
    """Place in the chain, 1 to k."""
    return Factor("position", tuple(str(j) for j in range(1, k + 1)), lambda draft: str(draft.position))


def factors(k: int) -> tuple[Factor, ...]:
    """All four."""
    return position(k), ENTROPY, TOKEN, REPETITION


@dataclass(frozen=True)
class Group:
    """Judged drafts of one group."""

    num: int
    num_stood: int

    @property
    def rate(self) -> float:
        """Share that stood; nan where there are none."""
        return self.num_stood / self.num if self.num else math.nan

    @property
    def error(self) -> float:
        """Standard error of the rate, drafts taken as independent."""
        return math.sqrt(self.rate * (1 - self.rate) / self.num) if self.num else math.nan


def by_group(factor: Factor, drafts: Sequence[JudgedDraft]) -> dict[str, Group]:
    """Every group of the factor, empty ones too, in its order."""
    stood: dict[str, list[bool]] = {name: [] for name in factor.groups}
    for draft in drafts:
        stood[factor.group_of(draft)].append(draft.stood)
    return {name: Group(len(found), sum(found)) for name, found in stood.items()}


def over_all(drafts: Sequence[JudgedDraft]) -> Group:
    """All of them as one group."""
    return Group(len(drafts), sum(draft.stood for draft in drafts))


def explained_share(factor: Factor, drafts: Sequence[JudgedDraft]) -> float:
    """Of the variance of standing or falling, the share that lies between the groups (η²); nan without variance."""
    whole = over_all(drafts)
    if not whole.num or not 0 < whole.rate < 1:
        return math.nan
    between = sum(
        group.num * (group.rate - whole.rate) ** 2 for group in by_group(factor, drafts).values() if group.num
    )
    return between / (whole.num * whole.rate * (1 - whole.rate))


@dataclass(frozen=True)
class Difference:
    """Why one kind of text has a higher rate than another (Kitagawa 1955): composition + within = rate - rate."""

    composition: float  # from having the groups in other shares
    within: float  # from other rates in equal groups


def difference(factor: Factor, one: Sequence[JudgedDraft], other: Sequence[JudgedDraft]) -> Difference:
    """one - other. A group that only one of them has takes the same rate in both: it is composition."""
    a, b = by_group(factor, one), by_group(factor, other)
    composition = within = 0.0
    for name in factor.groups:
        share_a, share_b = a[name].num / len(one), b[name].num / len(other)
        rate_a = a[name].rate if a[name].num else b[name].rate
        rate_b = b[name].rate if b[name].num else a[name].rate
        if a[name].num or b[name].num:
            composition += (share_a - share_b) * (rate_a + rate_b) / 2
            within += (share_a + share_b) / 2 * (rate_a - rate_b)
    return Difference(composition, within)
