"""Sampling is argmax of logit plus keyed noise; pruning never changes the result."""

import math

import numpy as np
import pytest
import torch
from space_kernels.sampling import sampler as sampling
from space_kernels.sampling.noise import gumbel
from space_kernels.sampling.sampler import gumbel_argmax, log_probabilities, sample_rows
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.sampling.sampling_rows import SamplingRow

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


def test_the_law_of_choice_is_the_softmax() -> None:
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
