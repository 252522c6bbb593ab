"""SPACE with a recurrent draft head, which lays out no masks ≡ plain decoding, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from exactness_matrix import HEAD_CELLS, Cell, Mismatch, Subject, check_cell
from space_model.loading.load import load_model
from tiny_checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    sizes = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "tie_word_embeddings": False}
    folder = tiny_checkpoint(tmp_path_factory.mktemp("head"), seed=1, head_drafts=5, draft_vocab=60, **sizes)

    @cache
    def find(dtype: str) -> Subject:
        return Subject("head", load_model(folder, dtype=dtype))

    return find


@pytest.mark.parametrize("cell", HEAD_CELLS, ids=str)
def test_drafts_of_the_recurrent_head_leave_the_plain_text(cell: Cell, subject_of: Callable[[str], Subject]) -> None:
    check_cell(subject_of(cell.dtype), cell)


@pytest.mark.usefixtures("accept_unverified")
def test_a_draft_that_is_accepted_unverified_is_caught(subject_of: Callable[[str], Subject]) -> None:
    with pytest.raises(Mismatch):
        check_cell(subject_of("float32"), HEAD_CELLS[0])
