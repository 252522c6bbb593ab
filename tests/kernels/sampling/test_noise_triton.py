"""Noise drawn by a kernel equals the reference: its bits exactly, its logarithms up to the last digits."""

import pytest
import torch

pytest.importorskip("triton")

from space_kernels.sampling import noise
from space_kernels.sampling.noise_triton import NEARLY, cell_bits, gumbel, gumbel_nearly

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cells(num_rows: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_ids)
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    keys[0] = noise.request_key(2**64 - 1, 0)
    positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    ids = torch.randint(0, 1 << 18, (num_rows, num_ids), generator=generator)
    return keys, positions, ids


def test_bits_are_the_references_bit_by_bit() -> None:
    keys, positions, ids = cells(7, 1500)
    expected = noise.random_bits(noise.row_streams(keys, positions)[:, None], ids)
    found = cell_bits(keys.to(DEVICE), positions.to(DEVICE), ids.to(DEVICE))
    assert torch.equal(found.cpu(), expected)


def test_noise_agrees_to_the_last_digits() -> None:
    keys, positions, ids = cells(5, 3000)
    expected = noise.gumbel(keys, positions, ids)
    found = gumbel(keys.to(DEVICE), positions.to(DEVICE), ids.to(DEVICE)).cpu()
    # One unit in the last place of -log u, carried through the outer logarithm, and one of that.
    assert (found - expected).abs().max() <= 2**-51 * (1 + expected.abs().max())


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 2**26 - 3, 2**32 - 2**26 + 3, 2**32 - 300, 2**32 - 1])
def test_the_cheap_noise_is_near_at_every_end(bits: int) -> None:
    # A row's stream and an id's cell are bijections, so an id with wanted bits can be computed backwards.
    key, position = torch.tensor([5]), torch.tensor([9])
    word = (bits << 32) + 12345
    stream = noise.row_streams(key, position)
    id_ = (invert(word) - int(stream)) * pow(0x9E3779B97F4A7C15, -1, 1 << 64) - 1
    ids = torch.tensor([[(id_ + (1 << 63)) % (1 << 64) - (1 << 63)]])
    assert int(cell_bits(key.to(DEVICE), position.to(DEVICE), ids.to(DEVICE))) == bits
    exact = noise.gumbel_of_bits(torch.tensor([bits]))
    nearly = gumbel_nearly(key.to(DEVICE), position.to(DEVICE), ids.to(DEVICE)).cpu()
    assert abs(float(nearly) - float(exact)) < NEARLY


def test_the_cheap_noise_is_near_everywhere() -> None:
    keys, positions, ids = cells(2, 16_000)
    exact = noise.gumbel(keys, positions, ids)
    nearly = gumbel_nearly(keys.to(DEVICE), positions.to(DEVICE), ids.to(DEVICE)).cpu()
    assert (nearly - exact).abs().max() < NEARLY


def invert(word: int) -> int:
    """SplitMix64's finaliser backwards."""

    def unfold(value: int, shift: int) -> int:
        found = value
        for _ in range(64 // shift + 1):
            found = value ^ (found >> shift)
        return found

    word = unfold(word, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) % (1 << 64)
    word = unfold(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) % (1 << 64)
    return unfold(word, 30)
