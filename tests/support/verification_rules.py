"""Verification rules as distributions: the probability of every outcome of a step, given its drafts.

    coupling    the model's own sample of every row, by noise that drafts and rows share; drafts are accepted while
                they equal the samples (SPACE §3). The rule that the server uses.
    token-wise  accept draft c with probability min(1, p(c)/q(c)); on rejection draw from the residual max(p - q, 0)
                (Leviathan et al. 2211.17192, Chen et al. 2302.01318).
    block       accept the longest prefix that the drafts' joint probability allows (Sun et al. 2403.10444, algorithm
                2).
    argmax      the coupling's verification of drafts that are the masks' most probable ids.
    published   the SPACE code as published: accept with p(c)/q(c); on rejection draw from p. Not exact.

Letters: p [k+1, V] the model's distributions at the root and behind each draft, q [k, V] those the drafts were drawn
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from exact_distribution import Floats


class Rule(StrEnum):
    """A way to verify drafts, with the way of making them that belongs to it."""

    COUPLING = "coupling"
    TOKEN_WISE = "token-wise"
    BLOCK = "block"
    ARGMAX = "argmax"
    PUBLISHED = "published"


def outcome_distribution(rule: Rule, p: Floats, q: Floats, drafts: Sequence[int]) -> Floats:
    """P(a drafts are accepted, the bonus is v | the drafts). p [k+1, V], q [k, V], k drafts -> [k+1, V], sum 1.

    The coupling has no such distribution, because drafts and samples share their noise: see `pair_distribution`.
    """
    match rule:
        case Rule.TOKEN_WISE:
            return _one_by_one(p, q, drafts, exact=True)
        case Rule.PUBLISHED:
            return _one_by_one(p, q, drafts, exact=False)
        case Rule.BLOCK:
            return _block(p, q, drafts)
        case Rule.ARGMAX:
            return _equal_to_samples(p, drafts)
    raise ValueError("The coupling's drafts and samples share their noise: it has no distribution given the drafts.")


def _one_by_one(p: Floats, q: Floats, drafts: Sequence[int], *, exact: bool) -> Floats:
    distribution, reached = np.zeros_like(p), 1.0
    for i, c in enumerate(drafts):
        accept = min(1.0, p[i, c] / q[i, c])
        distribution[i] = reached * (1.0 - accept) * (_normal(p[i] - q[i], p[i]) if exact else p[i])
        reached *= accept
    distribution[len(drafts)] = reached * p[len(drafts)]
    return distribution


def _equal_to_samples(p: Floats, drafts: Sequence[int]) -> Floats:
    distribution, reached = np.zeros_like(p), 1.0
    for i, c in enumerate(drafts):
        distribution[i] = reached * p[i]
        distribution[i, c] = 0.0
        reached *= p[i, c]
    distribution[len(drafts)] = reached * p[len(drafts)]
    return distribution


def _block(p: Floats, q: Floats, drafts: Sequence[int]) -> Floats:
    """w_i = min(w_{i-1}·p/q, 1);  h_i = S_i / (S_i + 1 - w_i) with S_i = Σ_v max(w_i·p_i(v) - q_i(v), 0), h_k = w_k;
    the longest prefix i that a coin with chance h_i accepts is kept; the bonus is drawn from max(w_i·p_i - q_i, 0).
    """
    k = len(drafts)
    weight = [1.0]
    for i, c in enumerate(drafts):
        weight.append(min(weight[i] * p[i, c] / q[i, c], 1.0))
    distribution, longer_refused = np.zeros_like(p), 1.0
    for i in range(k, -1, -1):
        spare = np.maximum(weight[i] * p[i] - q[i], 0.0) if i < k else p[i]
        if i == k:
            accept = weight[k]
        elif i == 0:
            accept = 1.0  # what is left
        else:
            short = 1.0 - weight[i]
            accept = spare.sum() / (spare.sum() + short) if spare.sum() + short > 0.0 else 1.0
        distribution[i] = longer_refused * accept * _normal(spare, p[i])
        longer_refused *= 1.0 - accept
    return distribution


def _normal(weights: Floats, otherwise: Floats) -> Floats:
    """The positive part, to sum 1; `otherwise` where there is none (then rounding alone could have led here)."""
    positive = np.maximum(weights, 0.0)
    total = positive.sum()
    return positive / total if total > 0.0 else otherwise


def expected_accepted(distribution: Floats) -> float:
    """Mean of a under an outcome distribution [k+1, V]."""
    return float(np.arange(len(distribution)) @ distribution.sum(axis=1))


def pair_distribution(p: Floats, q: Floats) -> Floats:
    """The coupling: P(argmax(log p + g) = a, argmax(log q + g) = b) for one Gumbel noise g. [V], [V] -> [V, V]

    With E_v = exp(-g_v), which are independent and exponential, a is the least E_v/p_v and b the least E_v/q_v. At
    E_b = r·E_a all conditions are E_v >= E_a·max(p_v/p_a, r·q_v/q_b), so that

        J[a, b] = ∫ dr / (1 + r + Σ_{v≠a,b} max(p_v/p_a, r·q_v/q_b))²   over  p_b/p_a < r < q_b/q_a
        J[a, a] = 1 / Σ_v max(p_v/p_a, q_v/q_a)

    and between two r at which a maximum changes sides the integrand is 1/(A + B·r)²: exact, without quadrature.
    """
    V = len(p)
    distribution = np.zeros((V, V))
    both = [int(v) for v in np.flatnonzero((p > 0) & (q > 0))]
    distribution[both, both] = agreement_by_id(p, q)[both]
    for a in np.flatnonzero(p > 0):
        for b in np.flatnonzero(q > 0):
            low, high = p[b] / p[a], (q[b] / q[a] if q[a] > 0 else np.inf)
            if a == b or low >= high:
                continue
            others = np.delete(np.arange(V), [a, b])
            still, rising = p[others] / p[a], q[others] / q[b]
            turns = still[rising > 0] / rising[rising > 0]
            knots = [low, *sorted(float(t) for t in turns if low < t < high)]
            ends = [*knots[1:], high]
            for begin, end in zip(knots, ends, strict=True):
                middle = (begin + end) / 2 if np.isfinite(end) else begin + 1.0
                rises = rising * middle > still
                constant, slope = 1.0 + still[~rises].sum(), 1.0 + rising[rises].sum()
                at_begin = constant + slope * begin
                if np.isfinite(end):
                    distribution[a, b] += (end - begin) / (at_begin * (constant + slope * end))
                else:
                    distribution[a, b] += 1.0 / (slope * at_begin)
    return distribution


def agreement_by_id(p: Floats, q: Floats) -> Floats:
    """J[v, v] of the coupling: the chance that draft and sample are both v. [V], [V] -> [V], in V·log V."""
    agreed = np.zeros_like(p)
    both = np.flatnonzero((p > 0) & (q > 0))
    order = both[np.argsort(-p[both] / q[both], kind="stable")]  # p_v/q_v falls
    p_before = np.cumsum(p[order]) + p[q == 0].sum()  # at least this ratio: the maximum is p_v/p_a
    q_behind = q.sum() - np.cumsum(q[order])
    agreed[order] = 1.0 / (p_before / p[order] + np.maximum(q_behind, 0.0) / q[order])
    return agreed


def first_draft_chances(p: Floats, q: Floats) -> dict[Rule, float]:
    """The chance that the first draft is accepted, by rule. p [V] at the root, q [V] of the draft.

    Token-wise and published rejection and the block rule with a single draft reach Σ min(p, q), the most there can be.
    """
    overlap = float(np.minimum(p, q).sum())
    return {
        Rule.COUPLING: float(agreement_by_id(p, q).sum()),
        Rule.TOKEN_WISE: overlap,
        Rule.ARGMAX: float(p[int(q.argmax())]),
        Rule.PUBLISHED: overlap,
    }
