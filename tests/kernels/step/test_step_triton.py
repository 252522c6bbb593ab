"""The draft head's kernels equal the reference."""

from __future__ import annotations

import math

import pytest
import torch
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors, synthetic_accept
from space_kernels.step.verification import StepVerification

pytest.importorskip("triton")
from space_kernels.sampling.device_sampling import SamplingTensors, Stages
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.step import draft_head, draft_head_triton, state_triton, verification
from space_kernels.step.draft_head import SamplingColumns, candidates, sampling_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLING_PARAMS = [
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
    batch_params = SAMPLING_PARAMS * 4
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


def test_sampling_tensors_say_to_the_draft_head_what_sampling_params_say() -> None:
    tensors, stages = SamplingTensors.of(SAMPLING_PARAMS, 300), Stages.of(SAMPLING_PARAMS)
    expected, found = SamplingColumns.of(SAMPLING_PARAMS, torch.device("cpu")), sampling_columns(tensors, stages)
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


def test_candidates_are_the_best_ids_ascending_with_what_the_sampling_params_add() -> None:
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


CHANCES = (0.9, 0.7, 0.5)


def reported(num_lines: int, num_places: int) -> SyntheticAcceptanceTensors:
    """Sequence n has 3·n known output positions; ids of drafts to be rejected begin at 100."""
    generator = torch.Generator().manual_seed(num_lines)
    synthetic_tensors = SyntheticAcceptanceTensors.empty(num_lines, num_places, CHANCES, device=DEVICE)
    for line in range(num_lines):
        count = min(3 * line, num_places)
        ids = torch.randint(4, 50, (count,), generator=generator)
        luck = torch.rand(count, generator=generator)
        synthetic_tensors.put(line, ids.tolist(), luck.tolist(), (ids + 100).tolist())
    return synthetic_tensors


@pytest.mark.parametrize(("k", "width"), [(0, 1), (3, 3), (2, 5), (4, 1)])
def test_the_kernel_decrees_as_the_reference(k: int, width: int) -> None:
    pytest.importorskip("triton")
    from space_kernels.step import state_triton

    S, N = 12, 20
    synthetic_tensors = reported(S, N)
    generator = torch.Generator().manual_seed(k)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    num_prompt = drawn(1, 30, S)
    num_known = num_prompt + drawn(1, 16, S)
    lengths = drawn(0, k + 2, S)
    at = (num_known - num_prompt)[:, None] + torch.arange(k + 1, device=DEVICE)
    right = synthetic_tensors.ids.gather(1, at.clamp(max=N - 1)).long()
    emitted = torch.where(drawn(0, 8, S, k + 1) > 0, right, 1)  # sometimes another id than the known output's
    emitted = torch.where(torch.arange(k + 1, device=DEVICE) < lengths[:, None], emitted, 0)
    verification = StepVerification(lengths, emitted, lengths, lengths)
    first, drafts = drawn(0, 5, S), drawn(200, 250, S, width + 2)[:, :width]
    given = synthetic_tensors, num_known, num_prompt, verification, first, drafts
    expected = synthetic_accept(*given)
    assert torch.equal(state_triton.synthetic_accept(*given), expected)
    ranges = torch.bucketize(expected, torch.tensor([50, 150], device=DEVICE), right=True)
    assert {0, 1, 2} <= set(ranges.flatten().tolist())  # right, wrong, and left as they were


def test_a_text_that_is_longer_than_a_line_is_refused() -> None:
    with pytest.raises(ValueError, match="5 positions do not fit; the limit is 4"):
        reported(1, 4).put(0, range(5), [0.0] * 5, range(5))


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_kernels_judge_as_the_reference(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    S = 30

    def of(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    samples, drafts, num_live = of(4, 7, S, k + 1), of(4, 6, S, k), of(0, k + 1, S)
    agrees = torch.rand(S, k, generator=generator) < 0.7
    samples[:, :k] = torch.where(agrees, drafts, samples[:, :k])
    usable, running = torch.rand(S, k + 1, generator=generator) > 0.1, of(0, 5, S) > 0
    num_left, num_eos = of(1, k + 4, S), of(0, 3, S)
    end_ids = of(-1, 12, S, 3)
    assert len(set(verification.verify(samples, drafts, num_live).accepted.tolist())) > k // 2
    arguments = [each.to(DEVICE) for each in (samples, usable, drafts, num_live, running, num_left, end_ids, num_eos)]
    cut, expected_cut = state_triton.verify_sequences(*arguments), verification.verify_sequences(*arguments)
    for name in ("accepted", "emitted", "lengths", "end"):
        assert torch.equal(getattr(cut, name), getattr(expected_cut, name)), name
    assert len(set(expected_cut.end.tolist())) > 3


def test_rows_of_wider_tensors_are_judged_where_they_are() -> None:
    drafts = torch.tensor([[5, 6, 9, 9], [5, 7, 9, 9]], device=DEVICE)
    samples = torch.tensor([[5, 6, 8], [5, 6, 8]], device=DEVICE)
    live, left, none = (
        torch.tensor([2, 2], device=DEVICE),
        torch.tensor([9, 9], device=DEVICE),
        torch.zeros_like(drafts),
    )
    fit, running = torch.ones_like(samples, dtype=torch.bool), torch.ones_like(live, dtype=torch.bool)
    verified = state_triton.verify_sequences(
        samples, fit, drafts[:, :2], live, running, left, none[:, :1] - 1, none[:, 0]
    )
    assert verified.accepted.tolist() == [2, 1]
