"""Every exact rule gives the distribution of one token at a time, over several steps; the published one does not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from exact_distribution import (
    MASK_IDS,
    DenseLogits,
    Floats,
    chi_square_p,
    counts_of,
    joint_distribution,
    octal_checkpoint,
    softmax,
)
from space_common.worker.completion import CompletionOutput, generate
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from step_enumeration import (
    Ids,
    ModelDistributions,
    Rule,
    StepDistributions,
    TableDistributions,
    autoregressive_distribution,
    run_distribution,
    total_variation,
    worst_case,
)

EXACT = (Rule.COUPLING, Rule.TOKEN_WISE, Rule.BLOCK, Rule.ARGMAX)
PROMPT = (1, 4, 2)


def random_distribution(*key: int) -> Floats:
    return softmax(np.random.default_rng(key).normal(size=3))


def plain_masks() -> StepDistributions:
    """A draft depends on what the masks saw, and on its place."""
    return TableDistributions(
        3,
        lambda known: random_distribution(1, *known),
        lambda known, behind: random_distribution(2, len(behind), *known),
    )


def with_head() -> StepDistributions:
    """A draft knows the token before it, the bonus first."""
    return TableDistributions(
        3,
        lambda known: random_distribution(1, *known),
        lambda known, behind: random_distribution(2, len(behind), behind[-1], *known),
    )


def error(distributions: StepDistributions, rule: Rule, *, k: int = 2, depth: int = 3, prompt: Ids = (0,)) -> float:
    found = run_distribution(distributions, rule, prompt, num_drafts=k, depth=depth).distribution
    assert found.sum() == pytest.approx(1)
    return total_variation(found, autoregressive_distribution(distributions, prompt, depth))


@pytest.mark.parametrize("distributions", [plain_masks(), with_head()], ids=["masks", "head"])
@pytest.mark.parametrize("k", [1, 2])
def test_the_exact_rules_leave_the_distribution_as_it_is_and_the_published_one_does_not(
    distributions: StepDistributions, k: int
) -> None:
    assert max(error(distributions, rule, k=k) for rule in EXACT) < 1e-12
    assert error(distributions, Rule.PUBLISHED, k=k) > 0.05


def test_at_its_worst_the_published_rule_errs_by_a_quarter_on_one_token() -> None:
    assert error(worst_case(), Rule.PUBLISHED, k=1, depth=2) == pytest.approx(0.25)
    assert max(error(worst_case(), rule, k=2) for rule in EXACT) < 1e-12


def test_on_one_token_the_published_rule_errs_by_its_formula_and_never_by_more_than_a_quarter() -> None:
    for seed in range(30):
        p, q = (softmax(2 * np.random.default_rng((seed, i)).normal(size=3)) for i in range(2))
        distributions = TableDistributions(3, lambda known, p=p: p, lambda known, behind, q=q: q)  # type: ignore[misc]
        refused = 1 - np.minimum(p, q).sum()
        wanted = total_variation(np.minimum(p, q) + refused * p, p)
        assert error(distributions, Rule.PUBLISHED, k=1, depth=2) == pytest.approx(wanted)
        assert wanted <= 0.25


def test_drafts_that_are_the_models_own_distribution_always_stand() -> None:
    distributions = TableDistributions(
        3, lambda known: random_distribution(1, *known), lambda known, behind: random_distribution(1, *known, *behind)
    )
    for rule in (Rule.COUPLING, Rule.TOKEN_WISE, Rule.BLOCK, Rule.PUBLISHED):
        assert run_distribution(distributions, rule, (0,), num_drafts=3, depth=2).reached == pytest.approx((1, 1, 1))


def test_rules_accept_in_the_order_that_theory_gives_them() -> None:
    for distributions in (plain_masks(), with_head()):
        tokens = {
            rule: run_distribution(distributions, rule, (0,), num_drafts=3, depth=2).tokens_in_first_step
            for rule in Rule
        }
        assert tokens[Rule.BLOCK] > tokens[Rule.TOKEN_WISE] > tokens[Rule.COUPLING]
        assert tokens[Rule.PUBLISHED] == pytest.approx(tokens[Rule.TOKEN_WISE])


@pytest.fixture(scope="module")
def octal(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpaceModel, Path]:
    folder = octal_checkpoint(tmp_path_factory.mktemp("octal"), seed=3)
    return load_model(folder, dtype="float32"), folder


def test_a_checkpoint_is_enumerated_as_dense_attention_sees_it(octal: tuple[SpaceModel, Path]) -> None:
    model, folder = octal
    distributions = ModelDistributions(model, 0.8)
    wanted = joint_distribution(
        DenseLogits(folder), PROMPT, 2, pb.Sampling(temperature=0.8), vocab_size=8, banned_ids=MASK_IDS
    )
    assert total_variation(autoregressive_distribution(distributions, PROMPT, 2), wanted) < 1e-6
    assert error(distributions, Rule.BLOCK, k=1, depth=2, prompt=PROMPT) < 1e-12


def test_the_group_behind_accepted_drafts_is_the_first_group_behind_a_longer_prefix(
    octal: tuple[SpaceModel, Path],
) -> None:
    model, _ = octal
    kv = model.allocate_kv(1, 16)
    drafts = [5, 0]
    batch = ForwardBatch.build(
        [Segment([*PROMPT, *drafts], 0, [0], DraftLayout.full(2, 2))], block_size=16, mask_ids=model.facts.mask_ids
    )
    logits = model.logits(model.forward(batch, kv)).double()
    logits[:, list(MASK_IDS)] = -torch.inf
    distributions = ModelDistributions(model, 1.0)
    for accepted, group in enumerate(batch.mask_rows[0]):
        known = (*PROMPT, *drafts[:accepted])
        for j, row in enumerate(group):
            assert distributions.q(known, (0,) * (j + 1)) == pytest.approx(logits[row].softmax(0).numpy(), abs=1e-6)


def test_a_worker_yields_the_enumerated_distribution_and_number_of_tokens(octal: tuple[SpaceModel, Path]) -> None:
    model, _ = octal
    wanted = run_distribution(ModelDistributions(model, 1.0), Rule.COUPLING, PROMPT, num_drafts=2, depth=2)
    worker = Worker(model, num_blocks=4, max_sequences=1, max_draft_length=2, controller=FixedLayout.full(2))
    texts: list[CompletionOutput] = []
    for seed in range(400):
        sampling = pb.Sampling(seed=seed, temperature=1.0)
        texts += generate(worker, [PROMPT], sampling=sampling, max_tokens=4, max_draft_length=2)
    tokens = np.array([1 + text.steps[0].num_accepted for text in texts])
    assert abs(tokens.mean() - wanted.tokens_in_first_step) < 4 * tokens.std() / np.sqrt(len(tokens))
    pairs = counts_of([text.tokens[:2] for text in texts], vocab_size=8, depth=2)
    assert chi_square_p(pairs, wanted.distribution) > 1e-3
