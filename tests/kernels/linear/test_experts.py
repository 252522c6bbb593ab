"""Experts give a row the same bits in any company, and in any order of its experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from space_kernels.build import cpu_library
from space_kernels.layers.layers import RowInvariantActivation, silu
from space_kernels.linear.compiled_experts import CompiledExperts
from space_kernels.linear.experts import RowInvariantExperts
from space_kernels.linear.group_weights import GroupWeights, group_form
from space_kernels.linear.int8_linear import Int8Weights
from space_kernels.linear.rounded_inputs import rounded
from torch import Tensor
from torch.nn import functional as F

EXPERTS, HIDDEN, WIDTH, PER_ROW = 6, 64, 96, 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Random experts, and 64 rows that choose among them; expert 0 is chosen by all, expert 5 by none."""

    def __init__(self, dtype: torch.dtype, num_threads: int, weights: str = "plain") -> None:
        self.weights = weights
        self.gate_up = (numbers(EXPERTS, 2 * WIDTH, HIDDEN, seed=1) * HIDDEN**-0.5).to(dtype)
        self.down = (numbers(EXPERTS, HIDDEN, WIDTH, seed=2) * WIDTH**-0.5).to(dtype)
        self.biases = numbers(EXPERTS, 2 * WIDTH, seed=3).to(dtype), numbers(EXPERTS, HIDDEN, seed=4).to(dtype)
        act = RowInvariantActivation(F.silu, silu, num_threads)

        def gate(rows: Tensor) -> Tensor:
            first, second = rows.chunk(2, dim=-1)
            return act(first.contiguous()) * second

        biases: dict[str, Any] = {"gate_up_bias": self.biases[0], "down_bias": self.biases[1]}
        self.experts: torch.nn.Module = RowInvariantExperts(self.gate_up, self.down, gate, **biases, weights=weights)
        self.rows = numbers(64, HIDDEN, seed=5).to(dtype)
        others = torch.stack([torch.randperm(EXPERTS - 2)[: PER_ROW - 1] + 1 for _ in range(64)])
        self.chosen = torch.cat([others, torch.zeros(64, 1, dtype=torch.int64)], dim=1)
        self.weight = numbers(64, PER_ROW, seed=6).sigmoid().to(dtype)

    def of(self, rows: slice | Tensor) -> Tensor:
        out: Tensor = self.experts(self.rows[rows], self.chosen[rows], self.weight[rows])
        return out

    def wanted(self, row: int) -> Tensor:
        """One row in float32, by the numbers that the weights and their inputs are rounded to."""
        out = torch.zeros(HIDDEN)
        for expert, weight in zip(self.chosen[row].tolist(), self.weight[row].float(), strict=True):
            fused = self._times(self.gate_up[expert], self.rows[row]) + self.biases[0][expert].float()
            first, second = fused.to(self.rows.dtype).float().chunk(2)
            inner = (F.silu(first) * second).to(self.rows.dtype)
            out += weight * (self._times(self.down[expert], inner) + self.biases[1][expert].float())
        return out

    def _times(self, weight: Tensor, x: Tensor) -> Tensor:
        if self.weights == "plain":
            return weight.float() @ x.float()
        form = group_form(self.weights)
        dense = Int8Weights.of(weight).dense() if form is None else GroupWeights.of(weight, form).dense()
        return dense @ rounded(x.float()[None])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_the_number_of_rows_and_their_order_change_no_bit(dtype: torch.dtype, num_threads: int) -> None:
    case = Case(dtype, num_threads)
    whole = case.of(slice(None))
    for count in range(1, 65):
        assert torch.equal(case.of(slice(count)), whole[:count]), count
    for first, last in ((0, 1), (5, 6), (7, 40), (40, 64)):
        assert torch.equal(case.of(slice(first, last)), whole[first:last]), (first, last)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(case.of(shuffled), whole[shuffled])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_the_order_of_a_rows_experts_changes_no_bit(dtype: torch.dtype, num_threads: int) -> None:
    case = Case(dtype, num_threads)
    whole = case.of(slice(None))
    turned = torch.tensor([1, 2, 0])
    assert torch.equal(case.experts(case.rows, case.chosen[:, turned], case.weight[:, turned]), whole)


@pytest.mark.parametrize(
    ("dtype", "weights", "near"),
    [
        (torch.float32, "plain", 1e-5),
        (torch.bfloat16, "plain", 0.04),
        (torch.bfloat16, "int8", 0.06),
        (torch.bfloat16, "int4", 0.06),
        (torch.float32, "int8", 0.02),
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_row_is_the_weighted_sum_of_its_experts(
    dtype: torch.dtype, weights: str, near: float, num_threads: int
) -> None:
    case = Case(dtype, num_threads, weights)
    whole = case.of(slice(None)).float()
    for row in range(0, 64, 7):
        torch.testing.assert_close(whole[row], case.wanted(row), atol=near, rtol=0)
    for count in (1, 2, 3, 5, 17, 33):
        assert torch.equal(case.of(slice(count)).float(), whole[:count]), count


@pytest.mark.parametrize("weights", ["plain", "int8", "int4"])
@pytest.mark.parametrize("kind", cpu_library.own_kinds())
@torch.inference_mode()
def test_compiled_experts_compute_the_same_sum_and_each_row_alone(kind: str, weights: str, num_threads: int) -> None:
    case = Case(torch.bfloat16, num_threads, weights)
    case.biases = torch.zeros_like(case.biases[0]), torch.zeros_like(case.biases[1])
    case.experts = CompiledExperts(cpu_library.library_for(kind), case.gate_up, case.down, weights=weights)
    whole = case.of(slice(None))
    for row in range(0, 64, 7):
        torch.testing.assert_close(whole[row].float(), case.wanted(row), atol=0.03, rtol=0)
    for count in (*range(1, 20), 31, 32, 33, 63):
        assert torch.equal(case.of(slice(count)), whole[:count]), count
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(case.of(shuffled), whole[shuffled])
    turned = torch.tensor([2, 0, 1])
    assert torch.equal(case.experts(case.rows, case.chosen[:, turned], case.weight[:, turned]), whole)


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    case = Case(torch.bfloat16, 1)
    experts = CompiledExperts(cpu_library.library_for(cpu_library.own_kinds()[0]), case.gate_up, case.down)
    with pytest.raises(IndexError, match="There are 6 experts; a row chose 6"):
        experts(case.rows, case.chosen.clone().fill_(6), case.weight)
    with pytest.raises(ValueError, match="Compiled experts take bfloat16"):
        CompiledExperts(cpu_library.library_for(cpu_library.own_kinds()[0]), case.gate_up.float(), case.down.float())
