"""Noise is a function of key, position and id alone, and a standard Gumbel variable."""

import math

import pytest
import torch
from space_kernels.sampling.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    finalise,
    gumbel,
    gumbel_of_bits,
    random_bits,
    request_key,
    row_streams,
)

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def finalise_slowly(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
    return z ^ (z >> 31)


def bits_slowly(seed: int, position: int, id_: int) -> int:
    row = finalise_slowly((finalise_slowly(seed) + (position + 1) * GOLDEN) % WORD)
    return finalise_slowly((row + (id_ + 1) * GOLDEN) % WORD) >> 32


def test_the_finaliser_is_splitmix64() -> None:
    # The published first outputs of SplitMix64 with seed 0.
    states = torch.tensor([GOLDEN, 2 * GOLDEN % WORD, 3 * GOLDEN % WORD], dtype=torch.uint64).view(torch.int64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert finalise(states).view(torch.uint64).tolist() == expected


@pytest.mark.parametrize(
    ("seed", "position", "id_", "bits", "noise"),
    [
        (0, 0, 0, 2802244911, 0.8509171901273976),
        (1, 17, 4095, 702069081, -0.5939716175191591),
        (2**64 - 1, 1023, 127999, 2861249420, 0.9009452010714623),
    ],
)
def test_vectors(seed: int, position: int, id_: int, bits: int, noise: float) -> None:
    keys, positions = torch.tensor([request_key(seed, 0)]), torch.tensor([position])
    ids = torch.tensor([[id_]])
    assert bits_slowly(seed, position, id_) == bits
    assert random_bits(row_streams(keys, positions)[:, None], ids).item() == bits
    assert gumbel(keys, positions, ids).item() == pytest.approx(noise, rel=1e-14)


def test_choice_keys() -> None:
    assert [request_key(7, choice) for choice in (0, 1, 2)] == [7, 7191089600892374487, 309689372594955804]
    assert request_key(2**64 - 1, 0) == -1
    with pytest.raises(ValueError, match="seed=-1"):
        request_key(-1, 0)


def test_a_cell_does_not_depend_on_its_neighbours() -> None:
    keys, positions = torch.tensor([3, -9]), torch.tensor([5, 1000])
    whole = gumbel(keys, positions, torch.arange(100).expand(2, 100))
    assert torch.equal(whole[1:, 40:41], gumbel(keys[1:], positions[1:], torch.tensor([[40]])))


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(torch.tensor([11]), torch.tensor([0]), torch.arange(200_000)[None])[0].sort().values
    distribution = torch.exp(-torch.exp(-noise))
    uniform = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    assert (distribution - uniform).abs().max() < 1.63 / math.sqrt(200_000)  # Kolmogorov-Smirnov, 1 %


def test_the_bounds_hold_for_the_extreme_bits() -> None:
    low, high = gumbel_of_bits(torch.tensor([0, 2**32 - 1])).tolist()
    assert GUMBEL_MIN < low < GUMBEL_MIN + 1e-8
    assert GUMBEL_MAX - 1e-8 < high < GUMBEL_MAX


def test_neighbouring_bits_give_different_noise_everywhere() -> None:
    for start in (0, 2**31, 2**32 - 1000):
        noise = gumbel_of_bits(torch.arange(start, start + 1000))
        assert (noise.diff() > 0).all()
