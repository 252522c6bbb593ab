"""The draft head's kernels equal the reference."""

import math

import pytest
import torch

pytest.importorskip("triton")

from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.sampling.sampling_tensors import SamplingTensors, Stages
from space_kernels.step import draft_head, draft_head_triton
from space_kernels.step.draft_head import SamplingColumns, candidates, sampling_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(key=5, temperature=0.8),
    SamplingParams(key=6, temperature=1.3, top_k=4),
    SamplingParams(key=7, temperature=0.9, top_p=0.6, min_p=0.05),
    SamplingParams(key=8, temperature=2.0, min_p=0.2),
    SamplingParams(key=9, temperature=1.5, top_k=20, top_p=0.9),
]


def rows(num_rows: int, M: int, seed: int, step: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, M, generator=generator) * 2.0
    if step:
        logits = (logits / step).round() * step
    ids = torch.stack([torch.randperm(5 * M, generator=generator)[:M].sort().values for _ in range(num_rows)])
    return logits, ids


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["values differ", "many are equal"])
@pytest.mark.parametrize("M", [1, 40, 100])
def test_candidates_are_chosen_alike(M: int, step: float) -> None:
    batch_params = LAWS * 4
    logits, ids = rows(len(batch_params), M, M, step)
    logits[3, 0] = -math.inf
    keys, positions = (
        torch.tensor([sampling_params.key for sampling_params in batch_params]),
        torch.arange(len(batch_params)) + 3,
    )
    device = torch.device(DEVICE)
    arguments = [each.to(device) for each in (logits, ids)]
    places = [each.to(device) for each in (keys, positions)]
    for some in (slice(None), slice(0, 1), slice(1, 2)):  # with every stage, greedy alone, without cuts
        columns = SamplingColumns.of(batch_params[some], device)
        found = draft_head_triton.sample_candidates(
            *(each[some] for each in arguments), columns, *(each[some] for each in places)
        )
        expected = draft_head.sample_candidates(
            *(each[some] for each in arguments), columns, *(each[some] for each in places)
        )
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_head_are_multiplied_where_they_lie(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 70, generator=generator).to(dtype).to(DEVICE) for n in (3, 50))
    ids = torch.randint(0, 50, (3, 4, 21), generator=generator).to(DEVICE)[:, 2]  # rows apart
    exact = (weight[ids].double() * hidden.double()[:, None]).sum(dim=2)
    found = draft_head_triton.logits_of(hidden, weight, ids)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-4
    for row in range(3):
        alone = draft_head_triton.logits_of(hidden[row : row + 1], weight, ids[row : row + 1])
        assert torch.equal(alone[0], found[row])


def test_laws_in_tensors_say_to_the_draft_head_what_laws_say() -> None:
    tensors, stages = SamplingTensors.of(LAWS, 300), Stages.of(LAWS)
    expected, found = SamplingColumns.of(LAWS, torch.device("cpu")), sampling_columns(tensors, stages)
    assert expected.greedy is not None
    assert expected.top_k is not None
    assert found.greedy is not None
    assert found.top_k is not None
    assert torch.equal(found.greedy, expected.greedy)
    assert torch.equal(found.top_k, expected.top_k.clamp(max=300))
    assert torch.allclose(found.divisor, expected.divisor)
    assert torch.equal(found.top_p, expected.top_p)
    assert torch.allclose(found.min_p, expected.min_p, rtol=1e-15, atol=0.0)
    assert sampling_columns(tensors, Stages()).greedy is None
    assert sampling_columns(tensors, Stages(samples=True)).top_k is None


def test_candidates_are_the_best_ids_ascending_with_what_the_law_adds() -> None:
    logits = torch.randn(1, 2, 300, generator=torch.Generator().manual_seed(4))
    edited = logits.clone()
    edited[..., 7] = -math.inf
    edited[..., 9] += 50.0
    ids, offsets = candidates(logits.clone(), Stages(edits=True), lambda raw: edited)
    assert (ids.diff(dim=2) > 0).all()
    for row in range(2):
        assert set(ids[0, row].tolist()) == set(edited[0, row].topk(256).indices.tolist())
        at = ids[0, row].tolist()
        assert offsets[0, row, at.index(9)].item() == pytest.approx(50.0, rel=1e-5)
    plain_ids, plain_offsets = candidates(
        logits.clone(), Stages(), lambda raw: raw.index_fill(2, torch.tensor([7]), -math.inf)
    )
    assert plain_offsets[plain_ids != 7].abs().max() == 0.0
