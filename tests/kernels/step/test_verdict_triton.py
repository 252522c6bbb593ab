"""Verification by the kernel equals the reference."""

import pytest
import torch

pytest.importorskip("triton")

from space_kernels.step import verification
from space_kernels.step import verification_triton as verdict_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    cut, expected_cut = verdict_triton.verify_sequences(*arguments), verification.verify_sequences(*arguments)
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
    verified = verdict_triton.verify_sequences(
        samples, fit, drafts[:, :2], live, running, left, none[:, :1] - 1, none[:, 0]
    )
    assert verified.accepted.tolist() == [2, 1]
