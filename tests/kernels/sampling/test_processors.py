"""Each logits processor against a slow oracle, alone and combined; rows are independent."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from space_kernels.sampling.device_sampling import SamplingCapacity
from space_kernels.sampling.sampler import TokenCounts, process, sample_rows
from space_kernels.sampling.sampling_params import IdBits, SamplingParams, SamplingRow

V = 17
NO_IDS = torch.tensor([], dtype=torch.int64)
INF = math.inf


def order(values: np.ndarray) -> list[int]:
    """Largest first, equal values: the lower id first."""
    return sorted(range(len(values)), key=lambda v: (-values[v], v))


def probabilities(z: np.ndarray) -> np.ndarray:
    weights = np.exp(z.astype(np.float64) - z.max())
    return weights / weights.sum()


def keep_until(ranked: list[int], p: np.ndarray, mass: float) -> set[int]:
    kept, reached = set(), 0.0
    for v in ranked:
        if reached >= mass:
            break
        kept.add(v)
        reached += p[v]
    return kept


def only(z: np.ndarray, kept: set[int]) -> np.ndarray:
    return np.array([z[v] if v in kept else -INF for v in range(len(z))], dtype=np.float32)


def slow_law(raw: np.ndarray, row: SamplingRow, banned: list[int]) -> np.ndarray:
    """SPACE §3, one id and one stage at a time."""
    sampling_params, z = row.sampling_params, raw.astype(np.float32).copy()
    prefix = [*row.ids, *row.tail]
    output = Counter(prefix[row.num_prompt :])
    for v, value in sampling_params.bias:
        z[v] += np.float32(value)
    impossible = set(banned)
    if sampling_params.allowed_ids:
        impossible |= set(range(len(z))) - set(sampling_params.allowed_ids)
    if len(prefix) - row.num_prompt < sampling_params.min_tokens:
        impossible |= set(sampling_params.end_ids)
    for run in sampling_params.bad_words:
        head = list(run[:-1])
        if prefix[len(prefix) - len(head) :] == head and len(head) <= len(prefix):
            impossible.add(run[-1])
    z[list(impossible)] = -INF
    for v in range(len(z)):
        if v in prefix:
            penalty = np.float32(sampling_params.repetition_penalty)
            z[v] = z[v] / penalty if z[v] > 0 else z[v] * penalty
        if output[v]:
            z[v] -= np.float32(sampling_params.presence_penalty)
            z[v] -= np.float32(sampling_params.frequency_penalty) * np.float32(output[v])
    if sampling_params.temperature == 0:
        return z
    z = z / np.float32(sampling_params.temperature)
    if sampling_params.top_k:
        z = only(z, set(order(z)[: sampling_params.top_k]))
    if sampling_params.top_p < 1:
        z = only(z, keep_until(order(z), probabilities(z), sampling_params.top_p))
    if sampling_params.min_p > 0:
        p = probabilities(z)
        z = only(z, {v for v in range(len(z)) if p[v] >= sampling_params.min_p * p.max()})
    if sampling_params.typical_p < 1:
        p = probabilities(z)
        possible = [v for v in range(len(z)) if p[v] > 0]
        entropy = -sum(p[v] * math.log(p[v]) for v in possible)
        ranked = sorted(possible, key=lambda v: (abs(-math.log(p[v]) - entropy), v))
        z = only(z, keep_until(ranked, p, sampling_params.typical_p))
    return z


def assert_same(got: torch.Tensor, expected: np.ndarray) -> None:
    assert (got == -INF).tolist() == (expected == -INF).tolist()
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-6)


SAMPLING_PARAMS = {
    "neutral": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0, top_k=2),
    "bias": SamplingParams(bias=((3, 5.0), (0, -2.5))),
    "allowed": SamplingParams(allowed_ids=(1, 4, 9, 11)),
    "min tokens": SamplingParams(min_tokens=4, end_ids=(2, 5)),
    "min tokens reached": SamplingParams(min_tokens=3, end_ids=(2, 5)),
    "bad word": SamplingParams(bad_words=((6,),)),
    "bad run": SamplingParams(bad_words=((7, 3, 8), (1, 3, 9))),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=0.9),
    "frequency": SamplingParams(frequency_penalty=0.6),
    "negative penalties": SamplingParams(presence_penalty=-0.9, frequency_penalty=-1.5, repetition_penalty=0.8),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=4),
    "top-k of all": SamplingParams(top_k=V + 5),
    "top-p": SamplingParams(top_p=0.7),
    "tiny top-p": SamplingParams(top_p=1e-6),
    "min-p": SamplingParams(min_p=0.2),
    "min-p of one": SamplingParams(min_p=1.0),
    "typical": SamplingParams(typical_p=0.5),
    "all": SamplingParams(
        bias=((3, 1.0),), allowed_ids=tuple(range(1, 16)), min_tokens=9, end_ids=(2,), bad_words=((6,), (3, 8)),
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, temperature=0.8, top_k=9, top_p=0.95,
        min_p=0.01, typical_p=0.9,
    ),
}  # fmt: skip


def raw_logits(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("sampling_params", SAMPLING_PARAMS.values(), ids=SAMPLING_PARAMS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_each_stage_equals_the_slow_distribution(sampling_params: SamplingParams, seed: int) -> None:
    row = SamplingRow(sampling_params, ids=(5, 5, 2, 7, 9, 9), num_prompt=4, tail=(7, 3))
    raw = raw_logits(seed, 1)
    expected = slow_law(raw[0].numpy(), row, [0, 13])
    assert_same(process(raw, [row], torch.tensor([0, 13]))[0], expected)


@given(st.lists(st.sampled_from(sorted(SAMPLING_PARAMS)), min_size=1, max_size=6), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_of_different_sampling_params_do_not_see_each_other(names: list[str], seed: int) -> None:
    rows = [
        SamplingRow(SAMPLING_PARAMS[name], ids=(1, 3, 3, 8), num_prompt=1 + n % 3, tail=(7, 3)[: n % 3])
        for n, name in enumerate(names)
    ]
    raw = raw_logits(seed, len(rows))
    together = process(raw.clone(), rows, torch.tensor([16]))
    for n, row in enumerate(rows):
        alone = process(raw[n : n + 1].clone(), [row], torch.tensor([16]))
        assert torch.equal(together[n], alone[0])
        assert_same(together[n], slow_law(raw[n].numpy(), row, [16]))


def test_counts_kept_up_to_date_equal_counts_of_the_whole_prefix() -> None:
    sampling_params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    counts = TokenCounts([4, 4, 5], 2, V)
    counts.extend([6, 6])
    raw = raw_logits(1, 1)
    kept = process(raw.clone(), [SamplingRow(sampling_params, (4, 4, 5, 6, 6), 2, (6,), counts)], NO_IDS)
    assert torch.equal(kept, process(raw.clone(), [SamplingRow(sampling_params, (4, 4, 5, 6, 6), 2, (6,))], NO_IDS))
    assert counts.output.tolist() == TokenCounts([4, 4, 5, 6, 6], 2, V).output.tolist()


def test_equal_values_at_a_cut_keep_the_lower_ids() -> None:
    level = torch.zeros(2, V)
    level[:, 11] = 1.0
    kept = process(
        level, [SamplingRow(SamplingParams(top_k=3), (1,), 1), SamplingRow(SamplingParams(top_p=0.3), (1,), 1)], NO_IDS
    )
    assert (kept[0] > -INF).nonzero()[:, 0].tolist() == [0, 1, 11]
    assert (kept[1] > -INF).nonzero()[:, 0].tolist() == [0, 1, 2, 11]  # e/(e+16) = .145, then .053 each


def test_minus_zero_equals_zero() -> None:
    level = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    kept = process(level, [SamplingRow(SamplingParams(top_k=2), (1,), 1)], NO_IDS)
    assert (kept[0] > -INF).tolist() == [True, True, False, False]


def test_a_nucleus_wider_than_the_first_sort_is_whole() -> None:
    raw = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3)) * 0.1
    batch_params = [SamplingParams(top_p=0.99), SamplingParams(top_p=0.01), SamplingParams(top_p=0.9, top_k=3000)]
    kept = process(raw.clone(), [SamplingRow(sampling_params, (1,), 1) for sampling_params in batch_params], NO_IDS)
    for n, sampling_params in enumerate(batch_params):
        assert_same(kept[n], slow_law(raw[n].numpy(), SamplingRow(sampling_params, (1,), 1), []))


def test_typical_keeps_of_equal_distances_the_lower_id() -> None:
    kept = process(torch.zeros(1, 4), [SamplingRow(SamplingParams(typical_p=0.5), (1,), 1)], NO_IDS)
    assert (kept[0] > -INF).tolist() == [True, True, False, False]


@pytest.mark.parametrize("tail", [(), (7,), (1, 7), (5, 1, 7)])
def test_the_head_of_a_bad_run_is_found_across_the_border_of_drafts(tail: tuple[int, ...]) -> None:
    whole = (5, 1, 7)
    row = SamplingRow(SamplingParams(bad_words=((1, 7, 2),)), ids=(9, *whole[: 3 - len(tail)]), num_prompt=1, tail=tail)
    assert process(torch.zeros(1, V), [row], NO_IDS)[0, 2] == -INF


def test_a_tiny_temperature_leaves_the_largest_logit() -> None:
    raw = torch.tensor([[1e4, -1e4, 9.9e3]])
    z = process(raw, [SamplingRow(SamplingParams(temperature=1e-30), (0,), 1)], NO_IDS)
    assert z.isfinite().all()
    assert z[0].argmax() == 0


def test_a_row_costs_no_more_python_for_longer_lists() -> None:
    count = 32_000
    sampling_params = SamplingParams(
        bias=tuple((id_, 0.5) for id_ in range(count)),
        allowed_ids=tuple(range(count)),
        bad_words=tuple((id_, id_ + 1, 3) for id_ in range(count)),
    )
    rows = [SamplingRow(sampling_params, ids=(5, 6), num_prompt=1, tail=(7,) * n) for n in range(4)]
    process(torch.zeros(4, count + 1), rows, NO_IDS)  # makes the lists
    asked = 0

    def count_call(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal asked
        asked += 1  # lines, calls and returns
        return count_call

    logits = torch.zeros(4, count + 1)
    before = sys.gettrace()
    sys.settrace(count_call)
    try:
        process(logits, rows, NO_IDS)
    finally:
        sys.settrace(before)
    assert asked < 3000
    assert (logits[:, :count] == 0.5).sum(dim=1).tolist() == [count - 1, count - 1, count, count]
    assert logits[:2, 3].tolist() == [-INF] * 2  # behind 5, 6 and 6, 7
    assert logits[:, count].tolist() == [-INF] * 4


GREEDY = SamplingParams(temperature=0.0, grammar="some")


def bits(ids: list[int], num_ids: int) -> IdBits:
    words = np.zeros(-(-num_ids // 32), dtype=np.uint32)
    for id_ in ids:
        words[id_ // 32] |= np.uint32(1 << id_ % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("num_ids", [8, 31, 32, 33, 100, 1000])
def test_each_row_keeps_the_bits_of_what_its_grammar_allows(num_ids: int) -> None:
    raw = torch.randn(5, num_ids, generator=torch.Generator().manual_seed(num_ids))
    raw[3, 2] = -0.0
    some = [[0, num_ids - 1], [3], None, [2, 5, 7], []]
    rows = [
        SamplingRow(GREEDY, [1], 1, possible=bits(ids, num_ids))
        if ids is not None
        else SamplingRow(SamplingParams(temperature=0.0), [1], 1)
        for ids in some
    ]
    made = process(raw.clone(), rows, NO_IDS)
    for number, ids in enumerate(some):
        allowed = torch.zeros(num_ids, dtype=torch.bool)
        allowed[range(num_ids) if ids is None else ids] = True
        expected = torch.where(allowed, raw[number], -torch.inf)
        assert made[number].numpy().tobytes() == expected.numpy().tobytes()
    assert sample_rows(raw, rows, NO_IDS).valid.tolist() == [True, True, True, True, False]


def test_the_grammar_acts_behind_bias_and_before_what_else_forbids() -> None:
    raw = torch.zeros(1, 40)
    sampling_params = replace(GREEDY, bias=((7, 5.0), (9, 1.0)), min_tokens=3, end_ids=(9,), bad_words=((11,),))
    row = SamplingRow(sampling_params, [1], 1, possible=bits([9, 11, 12], 40))
    made = process(raw, [row], torch.tensor([12]))
    assert torch.isneginf(made).all()
    assert sample_rows(
        torch.zeros(1, 40), [replace(row, sampling_params=sampling_params.ending)], NO_IDS
    ).ids.tolist() == [9]


def test_what_is_left_of_sampling_params_at_the_end_forbids_nothing() -> None:
    sampling_params = SamplingParams(
        key=3, bias=((1, 2.0),), allowed_ids=(4,), min_tokens=9, end_ids=(0,), bad_words=((0,),), top_k=3
    )
    assert sampling_params.ending == SamplingParams(key=3, bias=((1, 2.0),), end_ids=(0,), top_k=3)


def test_sampling_params_with_a_grammar_are_left_to_the_host() -> None:
    assert GREEDY.edits
    assert not SamplingCapacity().holds(GREEDY)
    assert SamplingCapacity().holds(SamplingParams(temperature=0.0))
