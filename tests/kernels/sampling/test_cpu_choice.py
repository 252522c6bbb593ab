"""Compiled argmax and top-k over the vocabulary equal torch's."""

import math

import pytest
import torch
from space_kernels.build.cpu_library import CpuLibrary, library_for, own_kinds
from space_kernels.sampling.sampler import argmax, best_of
from torch import Tensor


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
