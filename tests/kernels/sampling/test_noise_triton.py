"""Noise drawn by a kernel equals the reference: its bits exactly, its logarithms up to the last digits."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from space_kernels.sampling import noise
from space_kernels.sampling.noise_kernels import NEARLY, gumbel_of_bits, nearly_gumbel, random_bits, row_stream
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit  # type: ignore[untyped-decorator]
def _cells(keys, positions, ids, bits, exact, near, M, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    stream = row_stream(tl.load(keys + row).to(tl.int64), tl.load(positions + row).to(tl.int64))
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < M
    drawn = random_bits(stream, tl.load(ids + row * M + lanes, inside, other=0))
    tl.store(bits + row * M + lanes, drawn.to(tl.int64), inside)
    tl.store(exact + row * M + lanes, gumbel_of_bits(drawn), inside)
    tl.store(near + row * M + lanes, nearly_gumbel(drawn).to(tl.float64), inside)


def by_kernel(keys: Tensor, positions: Tensor, ids: Tensor) -> list[Tensor]:
    """Return the bits, the noise and the cheap noise of each cell."""
    found = [
        torch.empty(ids.shape, dtype=dtype, device=DEVICE) for dtype in (torch.int64, torch.float64, torch.float64)
    ]
    given = (each.to(DEVICE) for each in (keys, positions, ids))
    _cells[(len(ids), triton.cdiv(ids.shape[1], 1024))](*given, *found, ids.shape[1], BLOCK=1024)
    return [each.cpu() for each in found]


def cells(num_rows: int, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_ids)
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    keys[0] = noise.request_key(2**64 - 1, 0)
    positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    ids = torch.randint(0, 1 << 18, (num_rows, num_ids), generator=generator)
    return keys, positions, ids


def test_bits_are_the_references_bit_by_bit() -> None:
    keys, positions, ids = cells(7, 1500)
    expected = noise.random_bits(noise.row_streams(keys, positions)[:, None], ids)
    assert torch.equal(by_kernel(keys, positions, ids)[0], expected)


def test_noise_agrees_to_the_last_digits() -> None:
    keys, positions, ids = cells(5, 3000)
    expected = noise.gumbel(keys, positions, ids)
    found = by_kernel(keys, positions, ids)[1]
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
    drawn, _, nearly = by_kernel(key, position, ids)
    assert int(drawn) == bits
    exact = noise.gumbel_of_bits(torch.tensor([bits]))
    assert abs(float(nearly) - float(exact)) < NEARLY


def test_the_cheap_noise_is_near_everywhere() -> None:
    keys, positions, ids = cells(2, 16_000)
    exact = noise.gumbel(keys, positions, ids)
    nearly = by_kernel(keys, positions, ids)[2]
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
