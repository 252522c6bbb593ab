"""Every exact rule gives the law of one token at a time, over several steps; the published one does not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from space_eval.distribution import MASK_IDS, DenseLogits, octal_checkpoint
from space_eval.exact_law import Floats, joint_law, softmax
from space_eval.verdict_rules import Rule
from space_eval.verdicts_law import (
    Ids,
    ModelLaws,
    StepLaws,
    TableLaws,
    autoregressive_law,
    noise_floor,
    run_law,
    total_variation,
    worst_case,
)
from space_model.draft_layout import DraftLayout
from space_model.forward_batch import ForwardBatch, Segment
from space_model.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb

EXACT = (Rule.COUPLING, Rule.TOKEN_WISE, Rule.BLOCK, Rule.ARGMAX)
PROMPT = (1, 4, 2)


def random_law(*key: int) -> Floats:
    return softmax(np.random.default_rng(key).normal(size=3))


def plain_masks() -> StepLaws:
    """A draft depends on what the masks saw, and on its place."""
    return TableLaws(3, lambda known: random_law(1, *known), lambda known, behind: random_law(2, len(behind), *known))


def with_head() -> StepLaws:
    """A draft knows the token before it, the bonus first."""
    return TableLaws(
        3, lambda known: random_law(1, *known), lambda known, behind: random_law(2, len(behind), behind[-1], *known)
    )


def error(laws: StepLaws, rule: Rule, *, k: int = 2, depth: int = 3, prompt: Ids = (0,)) -> float:
    found = run_law(laws, rule, prompt, num_drafts=k, depth=depth).law
    assert found.sum() == pytest.approx(1)
    return total_variation(found, autoregressive_law(laws, prompt, depth))


@pytest.mark.parametrize("laws", [plain_masks(), with_head()], ids=["masks", "head"])
@pytest.mark.parametrize("k", [1, 2])
def test_the_exact_rules_leave_the_law_as_it_is_and_the_published_one_does_not(laws: StepLaws, k: int) -> None:
    assert max(error(laws, rule, k=k) for rule in EXACT) < 1e-12
    assert error(laws, Rule.PUBLISHED, k=k) > 0.05


def test_at_its_worst_the_published_rule_errs_by_a_quarter_on_one_token() -> None:
    assert error(worst_case(), Rule.PUBLISHED, k=1, depth=2) == pytest.approx(0.25)
    assert max(error(worst_case(), rule, k=2) for rule in EXACT) < 1e-12


def test_on_one_token_the_published_rule_errs_by_its_formula_and_never_by_more_than_a_quarter() -> None:
    for seed in range(30):
        p, q = (softmax(2 * np.random.default_rng((seed, i)).normal(size=3)) for i in range(2))
        laws = TableLaws(3, lambda known, p=p: p, lambda known, behind, q=q: q)  # type: ignore[misc]
        refused = 1 - np.minimum(p, q).sum()
        wanted = total_variation(np.minimum(p, q) + refused * p, p)
        assert error(laws, Rule.PUBLISHED, k=1, depth=2) == pytest.approx(wanted)
        assert wanted <= 0.25


def test_drafts_that_are_the_models_own_law_always_stand() -> None:
    laws = TableLaws(3, lambda known: random_law(1, *known), lambda known, behind: random_law(1, *known, *behind))
    for rule in (Rule.COUPLING, Rule.TOKEN_WISE, Rule.BLOCK, Rule.PUBLISHED):
        assert run_law(laws, rule, (0,), num_drafts=3, depth=2).reached == pytest.approx((1, 1, 1))


def test_rules_accept_in_the_order_that_theory_gives_them() -> None:
    for laws in (plain_masks(), with_head()):
        tokens = {rule: run_law(laws, rule, (0,), num_drafts=3, depth=2).tokens_in_first_step for rule in Rule}
        assert tokens[Rule.BLOCK] > tokens[Rule.TOKEN_WISE] > tokens[Rule.COUPLING]
        assert tokens[Rule.PUBLISHED] == pytest.approx(tokens[Rule.TOKEN_WISE])


@pytest.fixture(scope="module")
def octal(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpaceModel, Path]:
    folder = octal_checkpoint(tmp_path_factory.mktemp("octal"), seed=3)
    return load_model(folder, dtype="float32"), folder


def test_a_checkpoint_is_enumerated_as_dense_attention_sees_it(octal: tuple[SpaceModel, Path]) -> None:
    model, folder = octal
    laws = ModelLaws(model, 0.8)
    wanted = joint_law(DenseLogits(folder), PROMPT, 2, pb.Sampling(temperature=0.8), vocab_size=8, banned_ids=MASK_IDS)
    assert total_variation(autoregressive_law(laws, PROMPT, 2), wanted) < 1e-6
    assert error(laws, Rule.BLOCK, k=1, depth=2, prompt=PROMPT) < 1e-12


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
    laws = ModelLaws(model, 1.0)
    for accepted, group in enumerate(batch.mask_rows[0]):
        known = (*PROMPT, *drafts[:accepted])
        for j, row in enumerate(group):
            assert laws.q(known, (0,) * (j + 1)) == pytest.approx(logits[row].softmax(0).numpy(), abs=1e-6)


def test_a_sample_lies_as_far_from_its_own_law_as_the_floor_says() -> None:
    law = softmax(np.random.default_rng(0).normal(size=(4, 4)).reshape(-1)).reshape(4, 4)
    mean, deviation = noise_floor(law, 2000)
    # E|x| of a normal x: σ·√(2/π), summed over cells, halved
    assert mean == pytest.approx(float(np.sqrt(law * (1 - law) * 2 / (np.pi * 2000)).sum() / 2), rel=0.05)
    assert 0 < deviation < mean
