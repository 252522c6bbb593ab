"""Synthetic acceptance: the kernel equals the reference. The server's tests compare it with the host's."""

import pytest
import torch
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors, synthetic_accept
from space_kernels.step.verification import StepVerification

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANCES = (0.9, 0.7, 0.5)


def told(num_lines: int, num_places: int) -> SyntheticAcceptanceTensors:
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
    from space_kernels.step import synthetic_acceptance_triton as decree_triton

    S, N = 12, 20
    synthetic_tensors = told(S, N)
    generator = torch.Generator().manual_seed(k)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    num_prompt = drawn(1, 30, S)
    num_known = num_prompt + drawn(1, 16, S)
    lengths = drawn(0, k + 2, S)
    at = (num_known - num_prompt)[:, None] + torch.arange(k + 1, device=DEVICE)
    right = synthetic_tensors.ids.gather(1, at.clamp(max=N - 1)).long()
    emitted = torch.where(drawn(0, 8, S, k + 1) > 0, right, 1)  # now and then another id than was told
    emitted = torch.where(torch.arange(k + 1, device=DEVICE) < lengths[:, None], emitted, 0)
    verification = StepVerification(lengths, emitted, lengths, lengths)
    first, drafts = drawn(0, 5, S), drawn(200, 250, S, width + 2)[:, :width]
    given = synthetic_tensors, num_known, num_prompt, verification, first, drafts
    expected = synthetic_accept(*given)
    assert torch.equal(decree_triton.synthetic_accept(*given), expected)
    ranges = torch.bucketize(expected, torch.tensor([50, 150], device=DEVICE), right=True)
    assert {0, 1, 2} <= set(ranges.flatten().tolist())  # right, wrong, and left as they were


def test_a_text_that_is_longer_than_a_line_is_refused() -> None:
    with pytest.raises(ValueError, match="5 positions do not fit; the limit is 4"):
        told(1, 4).put(0, range(5), [0.0] * 5, range(5))
