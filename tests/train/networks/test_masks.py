"""Mask ids, where they come from, and where their embeddings start."""

from pathlib import Path

import pytest
import torch
from doubles.training import read_model
from space_model.testing import tiny_checkpoint
from space_train.train_plan import InvalidPlan
from space_train.training.checkpoint import embedding_spread, mask_ids, start_masks
from transformers import PreTrainedModel


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    """128 ids."""
    return read_model(tiny_checkpoint(tmp_path, "llama", num_masks=0))


def ids_of(model: PreTrainedModel, *, shared: bool = False, given: list[int] | None = None, size: int) -> list[int]:
    return mask_ids(model, 3, shared=shared, given=given, tokenizer_size=size)


def test_spare_rows_of_the_vocabulary_are_taken_before_it_grows(model: PreTrainedModel) -> None:
    assert ids_of(model, size=100) == [100, 101, 102]
    assert ids_of(model, size=100, shared=True) == [100, 100, 100]
    assert len(model.get_input_embeddings().weight) == 128


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_vocabulary_grows_by_as_many_rows_as_it_lacks(tied: bool, tmp_path: Path) -> None:
    model = read_model(tiny_checkpoint(tmp_path, "llama", num_masks=0, tie_word_embeddings=tied))
    before = model.get_input_embeddings().weight.detach().clone()
    assert ids_of(model, size=126) == [126, 127, 128]
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert len(inputs) == len(outputs) == model.config.vocab_size == 129
    assert (inputs is outputs) == tied
    assert torch.equal(inputs[:128], before)


def test_given_ids_win_and_one_is_shared(model: PreTrainedModel) -> None:
    assert ids_of(model, size=128, given=[7]) == [7, 7, 7]
    assert ids_of(model, size=128, given=[9, 8, 7]) == [9, 8, 7]
    assert len(model.get_input_embeddings().weight) == 128


def test_the_published_id_right_behind_the_vocabulary_makes_it_grow(model: PreTrainedModel) -> None:
    assert ids_of(model, size=128, given=[130]) == [130, 130, 130]
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == 131


def test_ids_that_do_not_do_are_refused_by_name(model: PreTrainedModel) -> None:
    with pytest.raises(InvalidPlan, match="3 masks need 1 or 3 mask ids; got 2"):
        ids_of(model, size=128, given=[1, 2])
    with pytest.raises(InvalidPlan, match="Mask id 5000 is outside the vocabulary of 128, which grows by at most 64"):
        ids_of(model, size=128, given=[5000])
    with pytest.raises(InvalidPlan, match="Mask id -1 is outside"):
        ids_of(model, size=128, given=[-1])


def test_masks_start_near_the_mean_embedding_and_no_other_row_moves(model: PreTrainedModel) -> None:
    before = model.get_input_embeddings().weight.detach().clone()
    mean, spread = embedding_spread(model)
    start_masks(model, [100, 101, 101], torch.Generator().manual_seed(0))
    after = model.get_input_embeddings().weight.detach()
    moved = (after != before).any(1).nonzero().flatten().tolist()
    assert moved == [100, 101]
    assert not torch.equal(after[100], after[101])
    for row in (100, 101):
        assert 0.3 * spread < float((after[row] - mean).std()) < 0.7 * spread
