"""SPACE with a draft model ≡ plain decoding, bitwise, however often its drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from exactness_matrix import (
    BETWEEN,
    HEAD_CELLS,
    Cell,
    Mismatch,
    Run,
    Subject,
    accepted_lengths,
    check_cell,
    check_sources,
)
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.draft_model import load_draft_model
from space_model.loading.load import load_model
from tiny_checkpoints import perturbed, tiny_checkpoint


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    sizes = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "tie_word_embeddings": False}
    target = tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1, **sizes)
    draft = perturbed(target, tmp_path_factory.mktemp("draft"))

    @cache
    def find(dtype: str) -> Subject:
        model = load_model(target, dtype=dtype)
        network = load_draft_model(Checkpoint.open(draft), Checkpoint.open(target), model.facts, dtype=dtype)
        return Subject("draft model", model.drafted_by(network), base=model)

    return find


@pytest.mark.parametrize("cell", HEAD_CELLS, ids=str)
def test_drafts_of_a_second_model_leave_the_plain_text(cell: Cell, subject_of: Callable[[str], Subject]) -> None:
    check_cell(subject_of(cell.dtype), cell)


@pytest.mark.parametrize("life", ["undisturbed", "preempted", "restarted"])
def test_its_own_drafts_are_refused_taken_in_part_and_taken_whole(
    life: str, subject_of: Callable[[str], Subject]
) -> None:
    seen: set[tuple[int, int]] = set()
    for temperature in (0.0, 0.8):
        cell = Cell("float32", "head3", temperature, "none", "batch", "chunked", "hit", life, True, "short", "left")
        seen |= accepted_lengths(subject_of("float32"), cell, "model")
    assert {(3, 0), (3, 1), (3, 2), (3, 3)} <= seen


def test_lookup_drafts_come_between_its_own(subject_of: Callable[[str], Subject]) -> None:
    check_sources(subject_of("float32"), BETWEEN)


@pytest.mark.usefixtures("spoilt_drafter")
def test_whatever_its_pages_hold_the_text_is_the_same(subject_of: Callable[[str], Subject]) -> None:
    records = Run(subject_of("float32"), HEAD_CELLS[1], "model").finished()  # each is compared with plain decoding
    assert any(report.num_drafted for record in records for report in record.reports)


@pytest.mark.usefixtures("accept_unverified")
def test_a_draft_that_is_accepted_unverified_is_caught(subject_of: Callable[[str], Subject]) -> None:
    with pytest.raises(Mismatch):
        check_cell(subject_of("float32"), HEAD_CELLS[0])
