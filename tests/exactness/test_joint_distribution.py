"""The next 2 and 3 tokens have the distribution they should, drafts on: chi-square against exact enumeration."""

from collections.abc import Callable

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
    counts_of,
    draw,
    joint_distribution,
    octal_checkpoint,
)
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb

PROMPT = (1, 4, 2)
DEPTH = 3
LEAST_P = 1e-3

EVERYTHING = pb.Sampling(
    temperature=0.9,
    top_k=5,
    top_p=0.95,
    min_p=0.03,
    typical_p=0.97,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={3: 0.6, 0: -0.5},
    bad_words=[pb.IdRun(ids=[2, 1])],
)
ONE_BY_ONE = {
    "temperature": pb.Sampling(temperature=0.7),
    "top_k": pb.Sampling(temperature=1.0, top_k=3),
    "top_p": pb.Sampling(temperature=1.0, top_p=0.8),
    "min_p": pb.Sampling(temperature=1.0, min_p=0.2),
    "typical_p": pb.Sampling(temperature=1.0, typical_p=0.7),
    "penalties": pb.Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "bias": pb.Sampling(temperature=1.0, logit_bias={5: 1.0, 1: -1.0}),
    "bans": pb.Sampling(temperature=1.0, allowed_ids=[0, 1, 2, 4], bad_words=[pb.IdRun(ids=[0, 1]), pb.IdRun(ids=[2])]),
}


@pytest.fixture(scope="module")
def octal(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpaceModel, DenseLogits]:
    """A model of 8 ids, and its oracle."""
    path = octal_checkpoint(tmp_path_factory.mktemp("octal"), seed=3)
    return load_model(path, dtype="float32"), DenseLogits(path)


DistributionOf = Callable[[pb.Sampling], Floats]


@pytest.fixture
def distribution_of(octal: tuple[SpaceModel, DenseLogits]) -> DistributionOf:
    """Sampling -> [V, V, V] by enumeration."""
    return lambda sampling: joint_distribution(
        octal[1], PROMPT, DEPTH, sampling, vocab_size=VOCABULARY, banned_ids=MASK_IDS
    )


def p_values(draws: Draws, distribution: Floats) -> tuple[float, float]:
    """Of the next 2 tokens, and of the next 3."""
    pairs = counts_of([run[:2] for run in draws.runs], vocab_size=VOCABULARY, depth=2)
    triples = counts_of(draws.runs, vocab_size=VOCABULARY, depth=3)
    return chi_square_p(pairs, distribution.sum(axis=2)), chi_square_p(triples, distribution)


@pytest.mark.timeout(900)  # a minute of work, on a machine that may be shared
def test_with_every_processor_on_the_joint_distribution_is_the_enumerated_one(
    octal: tuple[SpaceModel, DenseLogits], distribution_of: DistributionOf
) -> None:
    draws = draw(octal[0], PROMPT, EVERYTHING, depth=DEPTH, num_runs=100_000)
    assert draws.num_accepted > 10_000
    assert min(p_values(draws, distribution_of(EVERYTHING))) > LEAST_P


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processor", ONE_BY_ONE)
def test_with_each_processor_the_joint_distribution_is_the_enumerated_one(
    processor: str, octal: tuple[SpaceModel, DenseLogits], distribution_of: DistributionOf
) -> None:
    sampling = ONE_BY_ONE[processor]
    draws = draw(octal[0], PROMPT, sampling, depth=DEPTH, num_runs=100_000, first_seed=1 << 40)
    assert draws.num_accepted > 10_000
    assert min(p_values(draws, distribution_of(sampling))) > LEAST_P


@pytest.mark.parametrize(("residual", "exact"), [(True, True), (False, False)], ids=["lossless", "published"])
def test_the_published_rule_fails_the_test_that_rejection_sampling_passes(
    residual: bool,
    exact: bool,
    octal: tuple[SpaceModel, DenseLogits],
    distribution_of: DistributionOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling = pb.Sampling(temperature=0.9)
    monkeypatch.setattr("space_server.host_runner.host_runner.sample_rows", RejectionRule(1, residual=residual))
    draws = draw(octal[0], PROMPT, sampling, depth=DEPTH, num_runs=8_000, draft_source=UniformDrafts(2))
    assert draws.num_accepted > 1_000
    p = p_values(draws, distribution_of(sampling))
    assert min(p) > LEAST_P if exact else max(p) < 1e-9


def test_tokens_of_neighbouring_seeds_and_choices_are_independent(
    octal: tuple[SpaceModel, DenseLogits], distribution_of: DistributionOf
) -> None:
    # Behind one prompt the first tokens of all runs have one distribution, so pairs of runs have its square.
    sampling = pb.Sampling(temperature=1.0)
    first = distribution_of(sampling).sum(axis=(1, 2))
    by_seed = draw(octal[0], PROMPT, sampling, depth=1, num_runs=8_000).runs
    other = pb.Sampling(temperature=1.0, choice=1)
    by_choice = draw(octal[0], PROMPT, other, depth=1, num_runs=8_000).runs
    neighbours = [[a[0], b[0]] for a, b in zip(by_seed[::2], by_seed[1::2], strict=True)]
    choices = [[a[0], b[0]] for a, b in zip(by_seed, by_choice, strict=True)]
    for pairs in (neighbours, choices):
        counts = counts_of(pairs, vocab_size=VOCABULARY, depth=2)
        assert chi_square_p(counts, np.outer(first, first)) > LEAST_P
