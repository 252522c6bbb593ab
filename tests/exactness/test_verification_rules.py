"""Each rule's distribution of outcomes is the published algorithm's, and what theory says of it holds."""

from collections.abc import Callable

import numpy as np
import pytest
from exact_distribution import Floats, chi_square_p, softmax
from step_enumeration import (
    Rule,
    agreement_by_id,
    expected_accepted,
    first_draft_chances,
    outcome_distribution,
    pair_distribution,
)

JUDGED = (Rule.TOKEN_WISE, Rule.BLOCK, Rule.ARGMAX, Rule.PUBLISHED)
V, K = 4, 3


def distributions(seed: int, rows: int, *, sharpness: float = 1.5, vocab: int = V) -> Floats:
    return softmax(np.random.default_rng(seed).normal(size=(rows, vocab)) * sharpness)


def drawn(seed: int) -> tuple[Floats, Floats, list[int]]:
    """p, q, and drafts of them."""
    q = distributions(1000 + seed, K)
    rng = np.random.default_rng(seed)
    return distributions(seed, K + 1), q, [int(rng.choice(V, p=row)) for row in q]


@pytest.mark.parametrize("rule", JUDGED)
def test_the_outcomes_of_a_step_are_a_distribution(rule: Rule) -> None:
    for seed in range(20):
        distribution = outcome_distribution(rule, *drawn(seed))
        assert distribution.min() >= 0
        assert distribution.sum() == pytest.approx(1)


def test_without_drafts_every_rule_draws_from_the_model() -> None:
    p = distributions(0, 1)
    for rule in JUDGED:
        assert outcome_distribution(rule, p, np.empty((0, V)), []) == pytest.approx(p)


Judge = Callable[[Floats, Floats, list[int], np.random.Generator], tuple[int, int]]


def token_wise_with_coins(p: Floats, q: Floats, drafts: list[int], rng: np.random.Generator) -> tuple[int, int]:
    """2211.17192, algorithm 1."""
    for i, c in enumerate(drafts):
        if rng.random() > p[i, c] / q[i, c]:
            rest = np.maximum(p[i] - q[i], 0)
            return i, int(rng.choice(V, p=rest / rest.sum()))
    return len(drafts), int(rng.choice(V, p=p[len(drafts)]))


def published_with_coins(p: Floats, q: Floats, drafts: list[int], rng: np.random.Generator) -> tuple[int, int]:
    """The SPACE code: no residual."""
    for i, c in enumerate(drafts):
        if rng.random() > p[i, c] / q[i, c]:
            return i, int(rng.choice(V, p=p[i]))
    return len(drafts), int(rng.choice(V, p=p[len(drafts)]))


def block_with_coins(p: Floats, q: Floats, drafts: list[int], rng: np.random.Generator) -> tuple[int, int]:
    """2403.10444, algorithm 2: the last i whose coin falls below h_i."""
    k, kept, weight = len(drafts), 0, 1.0
    weight_kept = 1.0
    for i in range(1, k + 1):
        weight = min(weight * p[i - 1, drafts[i - 1]] / q[i - 1, drafts[i - 1]], 1.0)
        spare = np.maximum(weight * p[i] - q[i], 0).sum() if i < k else 0.0
        chance = spare / (spare + 1 - weight) if i < k else weight
        if rng.random() <= chance:
            kept, weight_kept = i, weight
    if kept == k:
        return k, int(rng.choice(V, p=p[k]))
    rest = np.maximum(weight_kept * p[kept] - q[kept], 0)
    return kept, int(rng.choice(V, p=rest / rest.sum()))


@pytest.mark.parametrize(
    ("rule", "verify_sequences"),
    [(Rule.TOKEN_WISE, token_wise_with_coins), (Rule.PUBLISHED, published_with_coins), (Rule.BLOCK, block_with_coins)],
)
def test_the_distribution_is_that_of_the_algorithm_run_with_coins(rule: Rule, verify_sequences: Judge) -> None:
    p, q, drafts = drawn(3)
    counts = np.zeros((K + 1, V), dtype=np.int64)
    rng = np.random.default_rng(0)
    for _ in range(6000):
        counts[verify_sequences(p, q, drafts, rng)] += 1
    distribution = outcome_distribution(rule, p, q, drafts)
    assert counts[distribution == 0].sum() == 0
    assert chi_square_p(counts, distribution) > 1e-3


@pytest.mark.parametrize(
    ("rule", "verify_sequences"), [(Rule.TOKEN_WISE, published_with_coins), (Rule.BLOCK, token_wise_with_coins)]
)
def test_another_algorithm_run_with_coins_is_told_apart(rule: Rule, verify_sequences: Judge) -> None:
    p, q, drafts = drawn(3)
    counts = np.zeros((K + 1, V), dtype=np.int64)
    rng = np.random.default_rng(0)
    for _ in range(6000):
        counts[verify_sequences(p, q, drafts, rng)] += 1
    assert chi_square_p(counts, outcome_distribution(rule, p, q, drafts)) < 1e-6


def test_the_coupling_draws_sample_and_draft_each_from_its_own_distribution() -> None:
    for seed in range(20):
        p, q = distributions(seed, 1)[0], distributions(100 + seed, 1)[0]
        joint = pair_distribution(p, q)
        assert joint.min() >= 0
        assert joint.sum(axis=1) == pytest.approx(p, abs=1e-12)
        assert joint.sum(axis=0) == pytest.approx(q, abs=1e-12)
        assert np.diag(joint) == pytest.approx(agreement_by_id(p, q), abs=1e-12)


def test_the_coupling_holds_where_ids_are_impossible() -> None:
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0.25, 0.75, 0])
    joint = pair_distribution(p, q)
    assert joint.sum(axis=1) == pytest.approx(p)
    assert joint.sum(axis=0) == pytest.approx(q)
    # E_1 <= E_0 and E_1/.25 <= E_2/.75, in one noise: 1/(1 + 1 + 3)
    assert joint[1, 1] == pytest.approx(1 / 5)


def test_the_coupling_is_what_shared_noise_gives() -> None:
    p, q = distributions(1, 1)[0], distributions(2, 1)[0]
    noise = np.random.default_rng(0).gumbel(size=(20_000, V))
    counts = np.zeros((V, V), dtype=np.int64)
    np.add.at(counts, ((np.log(p) + noise).argmax(axis=1), (np.log(q) + noise).argmax(axis=1)), 1)
    assert chi_square_p(counts, pair_distribution(p, q)) > 1e-3


def test_agreement_lies_between_the_published_bound_and_the_most_there_can_be() -> None:
    for seed in range(50):
        p, q = distributions(seed, 1, vocab=30)[0], distributions(100 + seed, 1, vocab=30)[0]
        distance = np.abs(p - q).sum() / 2
        chances = first_draft_chances(p, q)
        assert (1 - distance) / (1 + distance) <= chances[Rule.COUPLING] <= chances[Rule.TOKEN_WISE] + 1e-12
        assert chances[Rule.TOKEN_WISE] == pytest.approx(1 - distance)
        assert chances[Rule.ARGMAX] == p[q.argmax()]


def test_the_block_rule_accepts_no_less_than_the_token_wise_on_average() -> None:
    gains = []
    for seed in range(10):
        p, q = distributions(seed, 3, vocab=3), distributions(50 + seed, 2, vocab=3)
        mean = {}
        for rule in (Rule.TOKEN_WISE, Rule.BLOCK):
            mean[rule] = sum(
                q[0, a] * q[1, b] * expected_accepted(outcome_distribution(rule, p, q, [a, b]))
                for a in range(3)
                for b in range(3)
            )
        gains.append(mean[Rule.BLOCK] - mean[Rule.TOKEN_WISE])
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_with_one_draft_block_and_token_wise_are_one_rule() -> None:
    p, q = distributions(5, 2), distributions(6, 1)
    for c in range(V):
        block, token_wise = (outcome_distribution(rule, p, q, [c]) for rule in (Rule.BLOCK, Rule.TOKEN_WISE))
        assert block == pytest.approx(token_wise)


def test_the_coupling_has_no_distribution_given_its_drafts() -> None:
    with pytest.raises(ValueError, match="share their noise"):
        outcome_distribution(Rule.COUPLING, *drawn(0))
