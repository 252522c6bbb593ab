"""A step in one call gives the ids, keys and values of the forward pass, the head and the sampler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from space_kernels.sampling.sampler import sample_rows
from space_kernels.sampling.sampling_params import BatchSamplingParams, SamplingParams, SamplingRow, SamplingRows
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.networks.sampled_step import MOST_ROWS, SampledStep
from space_model.space_model import SpaceModel

BANNED = torch.tensor([3, 4])
GREEDY = BatchSamplingParams([SamplingParams(temperature=0.0)] * 2)
MIXED = BatchSamplingParams(
    [SamplingParams(key=5, temperature=0.9), SamplingParams(key=-7, temperature=1.3, top_k=40, top_p=0.9, min_p=0.01)]
)
HALF = BatchSamplingParams([SamplingParams(temperature=0.0), SamplingParams(key=9)])
LONG, SHORT = ([16 + number * seed % 100 for number in range(80)] for seed in (7, 11))


@pytest.fixture(scope="module")
def model(llama: Path) -> SpaceModel:
    found = load_model(llama, dtype="bfloat16")
    if found.facts.attention != "compiled":
        pytest.skip("there are no compiled operations here")
    return found


def step_of(model: SpaceModel, num_blocks: int = 8) -> SampledStep:
    step = model.sampled_step(model.allocate_kv(num_blocks, 16), BANNED)
    assert step is not None
    return step


def rows_of(segments: list[Segment], sampling: BatchSamplingParams) -> SamplingRows:
    def unread(run: int, number: int) -> SamplingRow:
        raise AssertionError("No prefix is needed.")

    return SamplingRows(sampling, [one.start + 1 for one in segments], [len(one.ids) for one in segments], unread)


def segments_of(*places: tuple[list[int], int, int, list[int]]) -> list[Segment]:
    """Ids of a text, where they begin and end, and pages."""
    return [Segment(text[start:stop], start, np.array(pages)) for text, start, stop, pages in places]


@pytest.mark.parametrize("sampling", [GREEDY, MIXED, HALF], ids=["greedy", "sampled", "half greedy"])
def test_steps_of_changing_sequences_equal_the_forward_pass_bit_by_bit(
    sampling: BatchSamplingParams, model: SpaceModel
) -> None:
    kv, other = model.allocate_kv(40, 16), model.allocate_kv(40, 16)
    step = model.sampled_step(kv, BANNED)
    assert step is not None
    many = list(range(5, 35))
    steps = [
        segments_of((LONG, 0, 15, [0]), (SHORT, 0, 4, [1])),
        segments_of((LONG, 15, 16, [0]), (SHORT, 4, 5, [1])),
        segments_of((LONG, 16, 17, [0, 2]), (SHORT, 5, 6, [1])),  # one with a new page
        segments_of((LONG, 17, 20, [0, 2]), (SHORT, 6, 7, [1])),  # one with drafts
        segments_of((LONG, 20, 23, [0, 2]), (SHORT, 7, 8, [1])),
        segments_of((SHORT, 8, 9, [1]), (LONG, 23, 24, [0, 2])),  # in another order
        segments_of((SHORT, 9, 10, [1]), (LONG, 24, 25, [0, 2, *many])),  # more pages than the table had room for
        segments_of((LONG, 25, 26, [0, 2, *many])),
    ]
    for segments in steps:
        if len(segments) == 1:
            sampling = BatchSamplingParams(sampling[:1])
        step.pack(segments, sampling)
        batch = ForwardBatch.build(segments, block_size=16, mask_ids=())
        logits = model.logits(model.forward(batch, other)[: batch.num_chain_rows]).clone()
        wanted = sample_rows(logits, rows_of(segments, sampling), BANNED)
        assert wanted.valid.all()
        assert step.run() == wanted.ids.tolist()
        assert all(map(torch.equal, kv.keys + kv.values, other.keys + other.values))


def test_pages_in_a_list_may_grow(model: SpaceModel) -> None:
    step, pages = step_of(model), [2]
    step.pack([Segment(LONG[:16], 0, pages)], GREEDY)
    step.run()
    pages.append(5)
    found = []
    for held in (pages, np.array([2, 5])):
        step.pack([Segment(LONG[16:17], 16, held)], GREEDY)
        found.append(step.run())
    assert found[0] == found[1] is not None
    assert step._kv.keys[0][5].any()


def test_a_step_without_a_valid_id_gives_none(model: SpaceModel) -> None:
    everything = torch.arange(model.facts.vocab_size)
    step = model.sampled_step(model.allocate_kv(1, 16), everything)
    assert step is not None
    step.pack([Segment([20, 21], 0, [0])], GREEDY)
    assert step.run() is None


@pytest.mark.parametrize("wrong", [-1, 1 << 40])
def test_an_id_without_an_embedding_is_an_error(wrong: int, model: SpaceModel) -> None:
    step = step_of(model)
    step.pack([Segment([20, wrong], 0, [0])], GREEDY)
    with pytest.raises(IndexError, match="embeddings"):
        step.run()


def test_rows_without_slots_and_too_many_rows_are_refused(model: SpaceModel) -> None:
    step = step_of(model)
    with pytest.raises(ValueError, match="Segment 1 has 2 chain rows from position 15"):
        step.pack([Segment([20], 0, [0]), Segment([20, 21], 15, [1])], GREEDY)
    with pytest.raises(ValueError, match=f"at most {MOST_ROWS} rows"):
        step.pack([Segment(LONG[: MOST_ROWS + 1], 0, [0, 1, 2])], GREEDY)


def test_models_without_such_a_call_have_none(llama: Path, model: SpaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    in_float32 = load_model(llama, dtype="float32")
    assert in_float32.sampled_step(in_float32.allocate_kv(1, 16), BANNED) is None
    kv = model.allocate_kv(1, 16)
    assert model.sampled_step(kv, BANNED) is not None
    monkeypatch.setattr(model._head, "_softcap", 30.0)  # makes equal logits
    assert model.sampled_step(kv, BANNED) is None
