"""The oracle itself, in numbers small enough to do by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from exact_distribution import (
    MASK_IDS,
    VOCABULARY,
    DenseLogits,
    Draws,
    Floats,
    RejectionRule,
    UniformDrafts,
    chi_square_p,
    chi_square_tail,
    choice_probabilities,
    counts_of,
    draw,
    joint_distribution,
    octal_checkpoint,
)
from pairwise import covering_cases
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb

FOUR = np.log(np.array([0.4, 0.3, 0.2, 0.1]))


def distribution_of(sampling: pb.Sampling, prefix: list[int] | None = None, **more: tuple[int, ...]) -> list[float]:
    p = choice_probabilities(FOUR, prefix or [0], 1, sampling, **more)
    return [round(float(x), 6) for x in p]


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (pb.Sampling(temperature=0.0), [1, 0, 0, 0]),
        (pb.Sampling(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (pb.Sampling(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (pb.Sampling(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (pb.Sampling(temperature=1.0, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        (pb.Sampling(temperature=1.0, min_p=0.4), [4 / 9, 3 / 9, 2 / 9, 0]),
        (pb.Sampling(temperature=1.0, typical_p=0.2), [0, 1, 0, 0]),  # entropy 1.28 lies nearest to -log 0.3
        (pb.Sampling(temperature=1.0, allowed_ids=[1, 3]), [0, 0.75, 0, 0.25]),
        (pb.Sampling(temperature=1.0, logit_bias={3: float(np.log(3))}), [4 / 12, 3 / 12, 2 / 12, 3 / 12]),
    ],
)
def test_each_stage_keeps_the_ids_it_should(sampling: pb.Sampling, wanted: list[float]) -> None:
    assert distribution_of(sampling) == pytest.approx(wanted, abs=1e-5)


def test_stages_that_look_back_see_prompt_and_output_apart() -> None:
    presence = pb.Sampling(temperature=1.0, presence_penalty=float(np.log(2)))
    assert distribution_of(presence, [0, 1, 1]) == pytest.approx(
        [0.4 / 0.85, 0.15 / 0.85, 0.2 / 0.85, 0.1 / 0.85], abs=1e-5
    )
    frequency = pb.Sampling(temperature=1.0, frequency_penalty=float(np.log(2)))
    assert distribution_of(frequency, [0, 1, 1])[1] == pytest.approx(0.075 / 0.775, abs=1e-5)
    repetition = pb.Sampling(temperature=1.0, repetition_penalty=2.0)
    assert distribution_of(repetition, [0])[0] == pytest.approx(0.16 / 0.76, abs=1e-5)  # negative logits are multiplied
    bad_word = pb.Sampling(temperature=1.0, bad_words=[pb.IdRun(ids=[2, 0])])
    assert distribution_of(bad_word, [1, 2])[0] == 0
    assert distribution_of(bad_word, [2, 1])[0] == pytest.approx(0.4)
    early = pb.Sampling(temperature=1.0, min_tokens=2)
    assert distribution_of(early, [1, 1], end_ids=(0,))[0] == 0
    assert distribution_of(early, [1, 1, 1], end_ids=(0,))[0] == pytest.approx(0.4)


def test_the_joint_distribution_is_the_product_along_each_run() -> None:
    table = np.log(np.array([[0.9, 0.1], [0.2, 0.8]]))
    distribution = joint_distribution(
        lambda prefixes: table[[p[-1] for p in prefixes]], [0], 2, pb.Sampling(temperature=1.0), vocab_size=2
    )
    assert distribution == pytest.approx(np.array([[0.81, 0.09], [0.02, 0.08]]))
    ended = joint_distribution(
        lambda prefixes: table[[p[-1] for p in prefixes]], [0], 2, pb.Sampling(temperature=1.0), vocab_size=2,
        end_ids=(1,),
    )  # fmt: skip
    assert ended == pytest.approx(np.array([[0.81, 0.09], [0.0, 0.1]]))


def test_chi_square_passes_a_true_distribution_and_fails_a_false_one() -> None:
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-6)
    draws = np.random.default_rng(0).choice(4, size=(20_000, 1), p=np.exp(FOUR))
    counts = counts_of(draws.tolist(), vocab_size=4, depth=1)
    assert chi_square_p(counts, np.exp(FOUR)) > 1e-3
    assert chi_square_p(counts, np.array([0.37, 0.33, 0.2, 0.1])) < 1e-6
    assert chi_square_p(counts, np.array([0.0, 0.7, 0.2, 0.1])) == 0.0


PROMPT = (1, 4, 2)
DEPTH = 3
LEAST_P = 1e-3

EVERYTHING = pb.Sampling(
    temperature=0.9, top_k=5, top_p=0.95, min_p=0.03, typical_p=0.97, repetition_penalty=1.2, presence_penalty=0.4,
    frequency_penalty=0.3, logit_bias={3: 0.6, 0: -0.5}, bad_words=[pb.IdRun(ids=[2, 1])],
)  # fmt: skip
ONE_BY_ONE = {
    "temperature": pb.Sampling(temperature=0.7),
    "top_k": pb.Sampling(temperature=1.0, top_k=3),
    "top_p": pb.Sampling(temperature=1.0, top_p=0.8),
    "min_p": pb.Sampling(temperature=1.0, min_p=0.2),
    "typical_p": pb.Sampling(temperature=1.0, typical_p=0.7),
    "penalties": pb.Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "bias": pb.Sampling(temperature=1.0, logit_bias={5: 1.0, 1: -1.0}),
    "bans": pb.Sampling(temperature=1.0, allowed_ids=[0, 1, 2, 4], bad_words=[pb.IdRun(ids=[0, 1]), pb.IdRun(ids=[2])]),
    "all": EVERYTHING,
}


@pytest.fixture(scope="module")
def octal(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpaceModel, DenseLogits]:
    """A model of 8 ids, and its oracle."""
    path = octal_checkpoint(tmp_path_factory.mktemp("octal"), seed=3)
    return load_model(path, dtype="float32"), DenseLogits(path)


DistributionOf = Callable[[pb.Sampling], Floats]


@pytest.fixture
def joint_distribution_of(octal: tuple[SpaceModel, DenseLogits]) -> DistributionOf:
    """Sampling -> [V, V, V] by enumeration."""
    return lambda sampling: joint_distribution(
        octal[1], PROMPT, DEPTH, sampling, vocab_size=VOCABULARY, banned_ids=MASK_IDS
    )


def p_values(draws: Draws, distribution: Floats) -> tuple[float, float]:
    """Of the next 2 tokens, and of the next 3."""
    pairs = counts_of([run[:2] for run in draws.runs], vocab_size=VOCABULARY, depth=2)
    triples = counts_of(draws.runs, vocab_size=VOCABULARY, depth=3)
    return chi_square_p(pairs, distribution.sum(axis=2)), chi_square_p(triples, distribution)


def test_with_every_processor_on_the_joint_distribution_is_the_enumerated_one(
    octal: tuple[SpaceModel, DenseLogits], joint_distribution_of: DistributionOf
) -> None:
    """`with each processor` draws twelve times as many."""
    draws = draw(octal[0], PROMPT, EVERYTHING, depth=DEPTH, num_runs=8_000)
    assert draws.num_accepted > 800
    assert min(p_values(draws, joint_distribution_of(EVERYTHING))) > LEAST_P


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processor", ONE_BY_ONE)
def test_with_each_processor_the_joint_distribution_is_the_enumerated_one(
    processor: str, octal: tuple[SpaceModel, DenseLogits], joint_distribution_of: DistributionOf
) -> None:
    sampling = ONE_BY_ONE[processor]
    draws = draw(octal[0], PROMPT, sampling, depth=DEPTH, num_runs=100_000, first_seed=1 << 40)
    assert draws.num_accepted > 10_000
    assert min(p_values(draws, joint_distribution_of(sampling))) > LEAST_P


@pytest.mark.parametrize(("residual", "exact"), [(True, True), (False, False)], ids=["lossless", "published"])
def test_the_published_rule_fails_the_test_that_rejection_sampling_passes(
    residual: bool, exact: bool, octal: tuple[SpaceModel, DenseLogits], joint_distribution_of: DistributionOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sampling = pb.Sampling(temperature=0.9)
    monkeypatch.setattr("space_server.host_runner.sample_rows", RejectionRule(1, residual=residual))
    draws = draw(octal[0], PROMPT, sampling, depth=DEPTH, num_runs=5_000, draft_source=UniformDrafts(2))
    assert draws.num_accepted > 625
    p = p_values(draws, joint_distribution_of(sampling))
    assert min(p) > LEAST_P if exact else max(p) < 1e-9


def test_tokens_of_neighbouring_seeds_and_choices_are_independent(
    octal: tuple[SpaceModel, DenseLogits], joint_distribution_of: DistributionOf
) -> None:
    # Behind one prompt the first tokens of all runs have one distribution, so pairs of runs have its square.
    sampling = pb.Sampling(temperature=1.0)
    first = joint_distribution_of(sampling).sum(axis=(1, 2))
    by_seed = draw(octal[0], PROMPT, sampling, depth=1, num_runs=8_000).runs
    other = pb.Sampling(temperature=1.0, choice=1)
    by_choice = draw(octal[0], PROMPT, other, depth=1, num_runs=8_000).runs
    neighbours = [[a[0], b[0]] for a, b in zip(by_seed[::2], by_seed[1::2], strict=True)]
    choices = [[a[0], b[0]] for a, b in zip(by_seed, by_choice, strict=True)]
    for pairs in (neighbours, choices):
        counts = counts_of(pairs, vocab_size=VOCABULARY, depth=2)
        assert chi_square_p(counts, np.outer(first, first)) > LEAST_P


AXES = {"k": (0, 1, 2, 3, 4, 5), "law": tuple("abcdefgh"), "life": ("whole", "preempted", "restarted"), "hit": (0, 1)}


@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_of_values_stands_together_in_some_case(strength: int) -> None:
    cases = covering_cases(AXES, strength=strength)
    for names in combinations(AXES, strength):
        wanted = set(product(*(AXES[name] for name in names)))
        assert {tuple(case[name] for name in names) for case in cases} == wanted


def test_the_cover_is_small_and_the_same_each_time() -> None:
    cases = covering_cases(AXES)
    assert cases == covering_cases(AXES)
    assert len(cases) <= 60 < prod(map(len, AXES.values()))  # 48 pairs of k and law, each in a case of its own


def test_impossible_cases_are_left_out_and_nothing_else() -> None:
    cases = covering_cases(AXES, possible=lambda case: case["k"] > 0 or case["hit"] == 0)
    assert all(case["k"] > 0 or case["hit"] == 0 for case in cases)
    pairs = {(case["k"], case["hit"]) for case in cases}
    assert pairs == set(product(AXES["k"], AXES["hit"])) - {(0, 1)}
