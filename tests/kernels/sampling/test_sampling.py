"""Sampling is argmax of logit plus keyed noise; pruning never changes the result."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from space_kernels.build.cpu_library import CpuLibrary, library_for, own_kinds
from space_kernels.sampling import sampler as sampling
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
from space_kernels.sampling.sampler import argmax, best_of, gumbel_argmax, log_probabilities, sample_rows
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRow
from torch import Tensor

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


NO_IDS = torch.tensor([], dtype=torch.int64)


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 12.0, 3e7])
@pytest.mark.parametrize("possible", [1, 40, 700])
def test_pruning_never_changes_the_winner(spread: float, possible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CELLS_AT_ONCE", 5000)  # rows in several parts
    z = torch.randn(40, 700, generator=torch.Generator().manual_seed(5)) * spread
    z[::3, ::2] = -math.inf
    z[:, 700 - possible :].neg_()
    z[:, : 700 - possible] = -math.inf
    keys, positions = torch.arange(40) * 7 - 3, torch.arange(40) % 9
    dense = (z.to(torch.float64) + gumbel(keys, positions, torch.arange(700)[None])).argmax(dim=1)
    reachable = z.amax(dim=1) > -math.inf
    assert torch.equal(gumbel_argmax(z, keys, positions)[reachable], dense[reachable])


def test_rows_of_nan_and_of_nothing_possible_harm_no_other_row() -> None:
    z = torch.zeros(4, 30)
    keys = torch.arange(4)
    alone = gumbel_argmax(z, keys, keys)
    z[1], z[2, 7] = -math.inf, math.nan
    assert gumbel_argmax(z, keys, keys)[[0, 3]].tolist() == alone[[0, 3]].tolist()


def test_where_every_row_has_a_nan_nothing_is_usable_and_nothing_fails() -> None:
    rows = [SamplingRow(SamplingParams(key=n), (0,), 1) for n in range(2)]
    assert sample_rows(torch.full((2, 30), math.nan), rows, NO_IDS).valid.tolist() == [False, False]


def test_samples_follow_the_softmax() -> None:
    z = torch.tensor([[0.0, 1.0, -math.inf, 2.0]])
    positions = torch.arange(40_000)
    ids = gumbel_argmax(z.expand(40_000, 4), torch.full((40_000,), 99), positions)
    expected = torch.softmax(z[0], dim=0) * 40_000
    observed = torch.bincount(ids, minlength=4).float()
    assert observed[2] == 0
    possible = expected > 0
    assert ((observed - expected)[possible] ** 2 / expected[possible]).sum() < 13.8  # chi-square, 2 degrees, 1e-3


def test_a_choice_does_not_depend_on_the_rows_beside_it() -> None:
    raw = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    batch_params = [
        SamplingParams(temperature=0.0),
        SamplingParams(key=1),
        SamplingParams(key=1, top_k=5),
        SamplingParams(temperature=0.7, key=2, top_p=0.8),
    ]
    rows = [SamplingRow(batch_params[n % 4], ids=(1,) * (n + 1), num_prompt=1) for n in range(6)]
    together = sample_rows(raw.clone(), rows, NO_IDS).ids.tolist()
    alone = [sample_rows(raw[n : n + 1].clone(), [rows[n]], NO_IDS).ids.item() for n in range(6)]
    assert together == alone


def test_noise_belongs_to_the_position_of_the_chosen_token() -> None:
    raw = torch.zeros(2, 50)
    sampling_params = SamplingParams(key=4)
    known, drafted = SamplingRow(sampling_params, (1, 2, 3), 1), SamplingRow(sampling_params, (1,), 1, tail=(2, 3))
    assert sample_rows(raw, [known, drafted], NO_IDS).ids.unique().numel() == 1


def test_banned_ids_are_never_chosen_and_of_equal_logits_the_lower_id_wins() -> None:
    raw = torch.tensor([[1.0, 5.0, 3.0, 3.0], [0.0, 9.0, 0.0, 0.0]])
    rows = [SamplingRow(SamplingParams(temperature=0.0), (0,), 1)] * 2
    assert sample_rows(raw, rows, torch.tensor([1])).ids.tolist() == [2, 0]


def test_rows_with_nan_or_nothing_possible_are_reported() -> None:
    raw = torch.zeros(4, 5)
    raw[1, 3] = math.nan
    rows = [
        SamplingRow(SamplingParams(), (0,), 1),
        SamplingRow(SamplingParams(), (0,), 1),
        SamplingRow(SamplingParams(allowed_ids=(2,)), (0,), 1),
        SamplingRow(SamplingParams(), (0,), 1),
    ]
    raw[3, 4] = math.inf
    assert sample_rows(raw, rows, torch.tensor([2])).valid.tolist() == [True, False, False, False]


def test_logprobs_are_the_log_softmax_with_the_lower_id_first() -> None:
    raw = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, -1.0, 3.0, 3.0]])
    first, second = log_probabilities(raw, [2, 1], 3)
    exact = raw.double().numpy() - np.log(np.exp(raw.double().numpy()).sum(axis=1, keepdims=True))
    assert first.top_ids == (1, 3, 2)
    assert second.top_ids == (0, 2, 3)
    assert first.logprob == pytest.approx(exact[0, 2], abs=1e-6)
    assert second.top_logprobs == pytest.approx([exact[1, 0]] * 3, abs=1e-6)
    assert log_probabilities(raw, [2, 1], 0)[0].top_ids == ()


@pytest.fixture(scope="module", params=own_kinds())
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    try:
        return library_for(request.param)
    except OSError as error:
        pytest.skip(str(error))


def rows(num_ids: int, coarse: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(num_ids)
    drawn = torch.randn(5, num_ids + 3, generator=generator)[:, :num_ids]  # rows that are not one behind the other
    return (drawn / coarse).round() * coarse if coarse else drawn


BANNED = torch.tensor([0, 4])


@pytest.mark.parametrize("num_ids", [7, 511, 512, 513, 6144, 40_001])
@pytest.mark.parametrize("coarse", [0.0, 0.5])
def test_the_greatest_is_the_first_of_equal_ones(library: CpuLibrary, num_ids: int, coarse: float) -> None:
    logits = rows(num_ids, coarse)
    ids, usable = argmax(library, logits, BANNED)
    assert bool(usable.all())
    assert ids.tolist() == logits.index_fill(1, BANNED, -math.inf).argmax(dim=1).tolist()


def test_minus_zero_is_zero(library: CpuLibrary) -> None:
    logits = torch.full((1, 600), -1.0)
    logits[0, 20], logits[0, 550] = -0.0, 0.0
    assert argmax(library, logits, BANNED)[0].tolist() == [20]


def test_rows_without_a_finite_greatest_or_with_nan_have_none(library: CpuLibrary) -> None:
    logits = rows(6144)
    logits[0] = -math.inf
    logits[1, 5000] = math.nan
    logits[2, 9] = -torch.tensor(math.nan)
    logits[3, 100] = math.inf
    assert argmax(library, logits, BANNED)[1].tolist() == [False, False, False, False, True]
    few = torch.full((1, 5), -math.inf)
    few[0, 4] = 1.0  # banned
    assert argmax(library, few, BANNED)[1].tolist() == [False]


@pytest.mark.parametrize(("num_ids", "count"), [(7, 256), (256, 256), (300, 256), (6144, 256), (40_001, 256), (900, 3)])
@pytest.mark.parametrize("coarse", [0.0, 0.5])
def test_the_best_ids_come_in_their_order(library: CpuLibrary, num_ids: int, count: int, coarse: float) -> None:
    logits = rows(num_ids, coarse)
    ids, offsets = best_of(library, logits, BANNED, count)
    edited = logits.index_fill(1, BANNED, -math.inf)
    order = edited.sort(dim=1, descending=True, stable=True).indices[:, : min(count, num_ids)]
    assert torch.equal(ids, order.sort(dim=1).values)
    assert torch.equal(offsets, torch.where(edited.gather(1, ids) > -math.inf, 0.0, -math.inf))


COMPILED_SAMPLERS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1e-5),
    SamplingParams(temperature=40.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5, temperature=0.9),
    SamplingParams(top_k=600),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.1),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1 - 1e-12),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=30, top_p=0.6, temperature=1.3),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=50, top_p=0.95, min_p=0.02, temperature=0.6),
    SamplingParams(typical_p=0.6),
    SamplingParams(typical_p=0.9, top_p=0.95, temperature=0.7),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2, temperature=0.8),
    SamplingParams(temperature=0.0, frequency_penalty=0.7),
]


@pytest.mark.parametrize("kind", own_kinds())
@pytest.mark.parametrize("grain", [0.0, 0.5], ids=["random", "with ties"])
@pytest.mark.parametrize("spread", [0.0, 3.0, 3e7])
@pytest.mark.parametrize("vocabulary", [1, 17, 700])
def test_compiled_sampling_chooses_what_torch_chooses(
    vocabulary: int, spread: float, grain: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "library_for_logits", lambda logits: library_for(kind))
    repeats, generator = 6, torch.Generator().manual_seed(vocabulary)
    rows = [
        SamplingRow(replace(params, key=17 * n - 5), ids=(0, vocabulary - 1, 0) * (n + 1), num_prompt=1, tail=(0,) * n)
        for params in COMPILED_SAMPLERS
        for n in range(repeats)
    ]
    raw = torch.randn(len(rows), vocabulary, generator=generator) * spread
    if grain:
        raw = (raw / (grain * spread + 1e-9)).round()
    raw[::4, 1::2] = -math.inf
    raw[5::repeats, : vocabulary - 1] = -math.inf
    raw[7], raw[13, vocabulary // 2], raw[25, vocabulary // 3] = -math.inf, math.nan, math.inf
    ours = sample_rows(raw.clone(), rows, NO_IDS)
    alone = {n: sample_rows(raw[n : n + 1].clone(), [rows[n]], NO_IDS).ids.item() for n in range(0, len(rows), 5)}
    monkeypatch.setattr(sampling, "library_for_logits", lambda logits: None)
    theirs = sample_rows(raw.clone(), rows, NO_IDS)
    assert ours.valid.tolist() == theirs.valid.tolist()
    assert not ours.valid[[7, 13, 25]].any()
    assert ours.ids[ours.valid].tolist() == theirs.ids[ours.valid].tolist()
    assert all(id_ == ours.ids[n] for n, id_ in alone.items() if ours.valid[n])


@pytest.mark.parametrize("kind", own_kinds()[:1])
@pytest.mark.parametrize("params", COMPILED_SAMPLERS)
def test_compiled_sampling_of_a_whole_vocabulary(
    params: SamplingParams, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "library_for_logits", lambda logits: library_for(kind))
    raw = torch.randn(24, 50_257, generator=torch.Generator().manual_seed(1)) * 3
    rows = [SamplingRow(replace(params, key=n * 99), (5, 6, 7), 1, (n,)) for n in range(24)]
    ours = sample_rows(raw.clone(), rows, NO_IDS)
    monkeypatch.setattr(sampling, "library_for_logits", lambda logits: None)
    theirs = sample_rows(raw.clone(), rows, NO_IDS)
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.valid.all()
    if params.temperature > 0.1 and params.top_k != 1 and params.top_p > 1e-6 and params.min_p < 1:
        assert len(set(ours.ids.tolist())) > 4


@pytest.mark.parametrize("kind", own_kinds())
@pytest.mark.parametrize("vocabulary", [3, 700, 5000])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_the_most_probable_ids_are_those_of_the_whole_order(
    num_top: int, vocabulary: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = (
        torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(num_top)).mul(4).round().div(2)
    )  # with ties
    raw[2, 1:] = -math.inf
    raw[3, ::2] = -math.inf
    raw[4] = 0.0
    raw[5, ::3] = -0.0
    ids = [n % vocabulary for n in range(9)]
    monkeypatch.setattr(sampling, "library_for_logits", lambda logits: library_for(kind))
    ours = log_probabilities(raw, ids, num_top)
    monkeypatch.setattr(sampling, "library_for_logits", lambda logits: None)
    assert ours == log_probabilities(raw, ids, num_top)
    assert all(len(one.top_ids) == min(num_top, vocabulary) for one in ours)
