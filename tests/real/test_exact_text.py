"""Drafts on ≡ off on real models: ids and log-probabilities, bit for bit, greedy and seeded.

Every cell fails unless drafts were accepted and rejected in it. The whole run compares more than 20,000 tokens.
"""

from collections.abc import Sequence

import pytest
from space_common.worker.client import ClientSequence, SequenceRequest
from space_eval.acceptance.equivalence import RIGHT
from space_model.space_model import SpaceModel
from space_router.text.model_text import ModelText
from worker_answers import Drafting, answers, encoded, request

PLAIN = Drafting("off", k=0)
OF_SMOLLM2 = [Drafting("auto"), *(Drafting(f"k={k}", k=k) for k in (1, 3, 5))]
OF_GEMMA = [
    Drafting("auto"),
    Drafting("oracle", k=4, right=RIGHT["oracle"]),
    Drafting("half-right", k=4, right=RIGHT["half"]),
    Drafting("wrong", k=4, right=RIGHT["wrong"]),
]
SAMPLING_PARAMS = {"greedy": 0.0, "seeded": 0.8}


def asked(
    text: ModelText, model: SpaceModel, prompts: Sequence[str], *, max_tokens: int, temperature: float
) -> list[SequenceRequest]:
    """The questions, behind the model's chat template where it has one."""
    return [
        request(ids, eos=model.facts.eos_ids, max_tokens=max_tokens, temperature=temperature, seed=1000 + number)
        for number, ids in enumerate(encoded(text, prompts))
    ]


def compare(model: SpaceModel, requests: Sequence[SequenceRequest], ways: Sequence[Drafting]) -> int:
    """Every way of drafting against plain decoding; the number of tokens compared."""
    plain = answers(model, requests, PLAIN)
    num_tokens = 0
    for way in ways:
        drafted = answers(model, requests, way, plain)
        for one, other in zip(drafted, plain, strict=True):
            assert one.tokens == other.tokens, way.name
            assert one.finish == other.finish, way.name
            assert one.logprobs == other.logprobs, way.name
            num_tokens += len(one.tokens)
        prove_power(way, drafted)
    return num_tokens


def prove_power(way: Drafting, records: Sequence[ClientSequence]) -> None:
    """Drafts were accepted and rejected, as far as this way of drafting has both."""
    verifications = [
        verification for record in records for verification in record.verifications[:-1] if verification[0]
    ]
    accepted = sum(accepted for _, accepted in verifications)
    rejected = sum(drafted > accepted for drafted, accepted in verifications)
    assert (accepted > 0) == (way.right is not RIGHT["wrong"]), (way.name, accepted)
    assert (rejected > 0) == (way.right is not RIGHT["oracle"]), (way.name, rejected)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sampling_params", SAMPLING_PARAMS)
def test_smollm2_says_the_same_with_its_drafts_and_without(
    smollm2: SpaceModel, smollm2_text: ModelText, prompts: list[str], sampling_params: str
) -> None:
    requests = asked(smollm2_text, smollm2, prompts[:16], max_tokens=128, temperature=SAMPLING_PARAMS[sampling_params])
    assert compare(smollm2, requests, OF_SMOLLM2) > 6_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sampling_params", SAMPLING_PARAMS)
def test_gemma_says_the_same_with_drafts_from_outside_and_without(
    gemma: SpaceModel, gemma_text: ModelText, prompts: list[str], sampling_params: str
) -> None:
    requests = asked(gemma_text, gemma, prompts[:12], max_tokens=96, temperature=SAMPLING_PARAMS[sampling_params])
    assert compare(gemma, requests, OF_GEMMA) > 4_000


def test_smollm2_says_the_same_at_a_glance(smollm2: SpaceModel, smollm2_text: ModelText, prompts: list[str]) -> None:
    requests = asked(smollm2_text, smollm2, prompts[:2], max_tokens=32, temperature=0.0)
    requests += asked(smollm2_text, smollm2, prompts[2:4], max_tokens=32, temperature=0.8)
    assert compare(smollm2, requests, [Drafting("auto"), Drafting("k=5", k=5)]) > 200
