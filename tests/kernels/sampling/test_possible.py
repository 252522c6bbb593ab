"""A row can sample only ids that its grammar allows, whose logits keep their bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from space_kernels.sampling.logits_processors import process
from space_kernels.sampling.sampler import sample_rows
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.sampling.sampling_rows import IdBits, SamplingRow
from space_kernels.sampling.sampling_tensors import SamplingCapacity

NO_IDS = torch.tensor([], dtype=torch.int64)
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


def test_what_is_left_of_a_law_at_the_end_forbids_nothing() -> None:
    sampling_params = SamplingParams(
        key=3, bias=((1, 2.0),), allowed_ids=(4,), min_tokens=9, end_ids=(0,), bad_words=((0,),), top_k=3
    )
    assert sampling_params.ending == SamplingParams(key=3, bias=((1, 2.0),), end_ids=(0,), top_k=3)


def test_a_law_with_a_grammar_is_left_to_the_host() -> None:
    assert GREEDY.edits
    assert not SamplingCapacity().holds(GREEDY)
    assert SamplingCapacity().holds(SamplingParams(temperature=0.0))
