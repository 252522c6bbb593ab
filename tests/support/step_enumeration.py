"""Verification rules and whole steps, enumerated exactly on a tiny vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import product
from typing import Protocol

import numpy as np
from exact_distribution import Floats, softmax
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.space_model import SpaceModel


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


Ids = tuple[int, ...]


class StepDistributions(Protocol):
    """The distributions of a model that a step depends on, temperature and bans applied."""

    @property
    def vocab_size(self) -> int: ...

    def p(self, known: Ids) -> Floats:
        """[V]: the token behind `known`."""
        ...

    def q(self, known: Ids, behind: Ids) -> Floats:
        """[V]: the draft behind `known` and `behind`, made by masks that saw `known` alone.

        `behind` is the bonus and the drafts after it. Plain masks look at its length, a draft head at its last id.
        """
        ...


@dataclass(frozen=True)
class TableDistributions:
    """Distributions written by hand."""

    vocab_size: int
    next_token: Callable[[Ids], Floats]
    draft: Callable[[Ids, Ids], Floats]

    def p(self, known: Ids) -> Floats:
        """Of the next token."""
        return self.next_token(known)

    def q(self, known: Ids, behind: Ids) -> Floats:
        """Of a draft."""
        return self.draft(known, behind)


def worst_case() -> TableDistributions:
    """Two ids, a fair coin behind anything, and a mask that is sure: the published rule errs by 1/4 on one token."""
    return TableDistributions(2, lambda known: np.array([0.5, 0.5]), lambda known, behind: np.array([1.0, 0.0]))


class ModelDistributions:
    """A loaded checkpoint's distributions at a temperature, by its own forward pass; drafts by masks alone."""

    def __init__(self, model: SpaceModel, temperature: float) -> None:
        facts = model.facts
        self.vocab_size = facts.vocab_size
        self._model, self._temperature = model, temperature
        self._live_ids = [id_ for id_ in range(facts.vocab_size) if id_ not in facts.mask_ids]
        self._kv = model.allocate_kv(len(self._live_ids), facts.window)
        self._rows: dict[Ids, Floats] = {}

    def p(self, known: Ids) -> Floats:
        """The root's row."""
        row: Floats = self._rows_behind(known)[0]
        return row

    def q(self, known: Ids, behind: Ids) -> Floats:
        """Group 0 behind the longer prefix is group a behind a accepted drafts: it sees the same rows."""
        row: Floats = self._rows_behind(known)[len(behind)]
        return row

    def _rows_behind(self, known: Ids) -> Floats:
        """[1 + num_masks, V]: the root and the masks behind it. One pass computes all prefixes with another last id."""
        if known not in self._rows:
            self._rows |= self._forward([(*known[:-1], id_) for id_ in self._live_ids])
        return self._rows[known]

    def _forward(self, prefixes: list[Ids]) -> dict[Ids, Floats]:
        facts, layout = self._model.facts, DraftLayout.full(0, self._model.facts.num_masks)
        batch = ForwardBatch.build(
            [Segment(known, 0, [page], layout) for page, known in enumerate(prefixes)],
            block_size=self._kv.block_size,
            mask_ids=facts.mask_ids,
            device=facts.device,
        )
        hidden = self._model.forward(batch, self._kv)
        found = {}
        for known, chain, groups in zip(prefixes, batch.chain_rows, batch.mask_rows, strict=True):
            z: Floats = self._model.logits(hidden[[chain[-1], *groups[0]]]).double().cpu().numpy()
            z[:, list(facts.mask_ids)] = -np.inf
            found[known] = softmax(z / self._temperature)
        return found


@dataclass(frozen=True)
class RunDistribution:
    """The exact distribution of text that a rule gives, and how many drafts it accepts."""

    distribution: Floats  # [V, V, …]: probability of every run of the first tokens
    reached: tuple[float, ...]  # of the first decode step: chance that at least 1, 2, … k drafts are accepted

    @property
    def tokens_in_first_step(self) -> float:
        """Mean tokens of the first decode step."""
        return 1.0 + sum(self.reached)


def run_distribution(
    distributions: StepDistributions, rule: Rule, prompt: Ids, *, num_drafts: int, depth: int
) -> RunDistribution:
    """Every run of `depth` tokens behind `prompt`, over all drafts and outcomes of the steps that make it.

    The first token is the prefill's. A step begins with masks that saw all but the last token.
    """
    pairs = cache(partial(_pair, distributions))
    distribution = np.zeros((distributions.vocab_size,) * depth)
    reached = np.zeros(num_drafts)
    states: dict[Ids, float] = {
        (int(t),): float(distributions.p(prompt)[t]) for t in np.flatnonzero(distributions.p(prompt))
    }
    is_first = True
    while states:
        longer: dict[Ids, float] = {}
        for run, mass in states.items():
            for emitted, chance in _step(distributions, rule, prompt + run, num_drafts, pairs):
                if is_first:
                    reached[: len(emitted) - 1] += mass * chance
                new = run + emitted
                if len(new) >= depth:
                    distribution[new[:depth]] += mass * chance
                else:
                    longer[new] = longer.get(new, 0.0) + mass * chance
        states, is_first = longer, False
    return RunDistribution(distribution, tuple(float(share) for share in reached))


def autoregressive_distribution(distributions: StepDistributions, prompt: Ids, depth: int) -> Floats:
    """[V, V, …]: the same runs, one token at a time."""
    distribution = np.zeros((distributions.vocab_size,) * depth)
    runs: dict[Ids, float] = {(): 1.0}
    for _ in range(depth):
        runs = {
            (*run, int(t)): mass * float(p[t])
            for run, mass in runs.items()
            for p in (distributions.p(prompt + run),)
            for t in np.flatnonzero(p)
        }
    for run, mass in runs.items():
        distribution[run] = mass
    return distribution


def total_variation(one: Floats, other: Floats) -> float:
    """½ Σ |one - other|."""
    return float(np.abs(one - other).sum() / 2)


Pairs = Callable[[Ids, Ids, Ids], Floats]


def _pair(distributions: StepDistributions, known: Ids, seen: Ids, behind: Ids) -> Floats:
    return pair_distribution(distributions.p(known), distributions.q(seen, behind))


def _step(
    distributions: StepDistributions, rule: Rule, known: Ids, k: int, pairs: Pairs
) -> Iterator[tuple[Ids, float]]:
    """What one step behind `known` emits, each with its chance."""
    if rule is Rule.COUPLING:
        yield from _coupled(distributions, known, (), 1.0, k, pairs)
        return
    seen, bonus = known[:-1], known[-1:]
    for drafts, chance in _drafts(distributions, rule, seen, bonus, k):
        p = np.array([distributions.p(known + drafts[:i]) for i in range(k + 1)])
        q = np.array([distributions.q(seen, bonus + drafts[:i]) for i in range(k)])
        outcomes = outcome_distribution(rule, p, q, drafts)
        for a, v in zip(*np.nonzero(outcomes), strict=True):
            yield (*drafts[:a], int(v)), chance * float(outcomes[a, v])


def _drafts(distributions: StepDistributions, rule: Rule, seen: Ids, bonus: Ids, k: int) -> Iterator[tuple[Ids, float]]:
    """Every chain of k drafts, with its chance."""
    if rule is Rule.ARGMAX:
        chain: Ids = ()
        while len(chain) < k:
            chain = (*chain, int(distributions.q(seen, bonus + chain).argmax()))
        yield chain, 1.0
        return
    for chain in product(range(distributions.vocab_size), repeat=k):
        chance = 1.0
        for i, c in enumerate(chain):
            chance *= float(distributions.q(seen, bonus + chain[:i])[c])
            if chance == 0.0:
                break
        if chance > 0.0:
            yield chain, chance


def _coupled(
    distributions: StepDistributions, known: Ids, accepted: Ids, reached: float, k: int, pairs: Pairs
) -> Iterator[tuple[Ids, float]]:
    """Noise at a position is shared by draft and sample there; noise behind the bonus has decided nothing yet."""
    if len(accepted) == k:
        p = distributions.p(known + accepted)
        yield from (((*accepted, int(v)), reached * float(p[v])) for v in np.flatnonzero(p))
        return
    joint = pairs(known + accepted, known[:-1], known[-1:] + accepted)
    for v in range(distributions.vocab_size):
        apart = float(joint[v].sum() - joint[v, v])
        if apart > 0.0:
            yield (*accepted, v), reached * apart
        if joint[v, v] > 0.0:
            yield from _coupled(distributions, known, (*accepted, v), reached * float(joint[v, v]), k, pairs)
