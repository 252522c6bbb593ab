"""Partial attention results merged by log-sum-exp equal attention over all keys; a part without keys has no effect."""

import math
from collections.abc import Iterator

import pytest
import torch
from doubles.kernels import MadeUp, made_up_step
from space_kernels.attention.attention import AttentionSpec
from space_kernels.attention.library_parts import OwnPart, in_step_attention, merge, natural, store_kv
from space_kernels.paging.step_rows import StepTables
from torch import Tensor

D = 8


def attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    scores = query.double() @ keys.double().T
    return torch.softmax(scores, -1) @ values.double(), torch.logsumexp(scores, -1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cut", [1, 5, 19])
def test_two_parts_are_the_whole(cut: int) -> None:
    query, keys, values = 3 * drawn(7, D), drawn(20, D, seed=1), drawn(20, D, seed=2)
    parts = [attend(query, keys[part], values[part]) for part in (slice(cut), slice(cut, None))]
    (out_a, lse_a), (out_b, lse_b) = parts
    whole, lse = attend(query, keys, values)
    found, found_lse = merge(out_a.float(), lse_a.float(), out_b.float(), lse_b.float())
    torch.testing.assert_close(found.double(), whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(found_lse.double(), lse, atol=1e-6, rtol=2e-7)


def test_base_2_becomes_natural() -> None:
    scores = drawn(3, 9).double()
    base_2 = torch.log2(torch.exp(scores).sum(-1))
    torch.testing.assert_close(natural(base_2), torch.logsumexp(scores, -1))


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_a_part_that_saw_nothing_leaves_the_other_bit_for_bit(garbage: float) -> None:
    out, lse = drawn(5, 3, D), 40 * drawn(5, 3, seed=1)
    empty, empty_lse = torch.full_like(out, garbage), torch.full_like(lse, -math.inf)
    for found, found_lse in (merge(out, lse, empty, empty_lse), merge(empty, empty_lse, out, lse)):
        assert torch.equal(found, out)
        assert torch.equal(found_lse, lse)


def test_who_saw_nothing_at_all_gets_zero() -> None:
    nan, nothing = torch.full((2, D), math.nan), torch.full((2,), -math.inf)
    out, lse = merge(nan, nothing, nan, nothing)
    assert torch.equal(out, torch.zeros(2, D))
    assert torch.equal(lse, nothing)


def test_far_apart_parts_neither_overflow_nor_vanish() -> None:
    out, lse = merge(torch.ones(1, D), torch.tensor([3e4]), torch.zeros(1, D), torch.tensor([-3e4]))
    assert torch.equal(out, torch.ones(1, D))
    assert lse.item() == 3e4


def test_a_row_does_not_depend_on_its_company() -> None:
    out_a, out_b = drawn(64, 4, D).bfloat16(), drawn(64, 4, D, seed=1)
    lse_a, lse_b = drawn(64, 4, seed=2), drawn(64, 4, seed=3)
    whole, whole_lse = merge(out_a, lse_a, out_b, lse_b)
    for count in (1, 2, 3, 7, 33):
        found, lse = merge(out_a[:count], lse_a[:count], out_b[:count], lse_b[:count])
        assert torch.equal(found, whole[:count])
        assert torch.equal(lse, whole_lse[:count])


TWO = [MadeUp(4, 2, [(0, 3), (1, 1)], seed=1), MadeUp(0, 3, [(2, 2)], seed=2)]
CHAINS = [[0, 1], [2, 3, 4]]  # flat rows
GROUPS = [(0, 0, [5, 6, 7]), (0, 1, [8]), (1, 2, [9, 10])]  # sequence, base, flat rows


def own_keys(chain: bool) -> Iterator[tuple[int, list[int]]]:
    """Yield each row and the rows whose keys it sees."""
    for rows in CHAINS:
        for i, row in enumerate(rows):
            yield row, rows[: i + 1] if chain else []
    for sequence, base, rows in GROUPS:
        for j, row in enumerate(rows):
            yield row, (CHAINS[sequence][: base + 1] if chain else []) + rows[: j + 1]


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_rows_see_the_step_s_own_keys(chain: bool, window: int | None, softcap: float | None) -> None:
    step = made_up_step(TWO, heads=4, kv_heads=2, head_dim=D)
    spec = AttentionSpec(0.4, window, softcap)
    out, lse = in_step_attention(step.qkv, StepTables.of(step.rows), spec, chain=chain)
    assert torch.equal(lse[step.num_rows :], torch.full((len(lse) - step.num_rows, 4), -math.inf))
    for row, keys in own_keys(chain):
        keys = keys[-(window or 99) :]  # every row's own keys stand at consecutive positions
        for head in range(4):
            scores = 0.4 * (step.key[keys, head // 2].double() @ step.query[row, head].double())
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            wanted = torch.softmax(scores, 0) @ step.value[keys, head // 2].double()
            torch.testing.assert_close(out[row, head].double(), wanted, atol=1e-6, rtol=0)
            torch.testing.assert_close(lse[row, head].double(), torch.logsumexp(scores, 0), atol=1e-6, rtol=0)


def test_our_part_is_the_reference_where_there_is_no_gpu() -> None:
    own = OwnPart.on(torch.device("cpu"))
    assert (own.store_kv, own.in_step_attention, own.merge) == (store_kv, in_step_attention, merge)


def test_the_kernels_are_the_reference(device: torch.device) -> None:
    pytest.importorskip("triton")
    kernels, step = OwnPart.kernels(), made_up_step(TWO, head_dim=16, device=device, garbage=0.0)
    other = made_up_step(TWO, head_dim=16, device=device, garbage=0.0)
    tables = StepTables.of(step.rows)
    kernels.store_kv(step.qkv, step.pages, tables)
    store_kv(other.qkv, other.pages, tables)
    assert torch.equal(step.pages.keys, other.pages.keys)
    assert torch.equal(step.pages.values, other.pages.values)
    parts = []
    for chain in (False, True):
        given = step.qkv, tables, AttentionSpec(0.4, softcap=2.0)
        out, lse = kernels.in_step_attention(*given, chain=chain)
        wanted, wanted_lse = in_step_attention(*given, chain=chain)
        torch.testing.assert_close(out[: step.num_rows], wanted[: step.num_rows], atol=2e-6, rtol=0)
        torch.testing.assert_close(lse[: step.num_rows], wanted_lse[: step.num_rows], atol=2e-6, rtol=0)
        parts += [wanted[: step.num_rows], wanted_lse[: step.num_rows]]
    for found, wanted in zip(kernels.merge(*parts), merge(*parts), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
