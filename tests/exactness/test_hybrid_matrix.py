"""SPACE ≡ plain, bitwise, where layers are recurrent: the gated delta rule, Mamba-2, Mamba and short convolutions."""

from __future__ import annotations

from functools import cache

import pytest
from exactness_matrix import LAYOUTS, Cell, Mismatch, Subject, Subjects, cell_name, check_cell, cover
from space_kernels.recurrence.states import RecurrentStates, StateStep
from space_model.loading.load import load_model
from tiny_checkpoints import tiny_checkpoint

FEW: dict[str, tuple[object, ...]] = {
    "layout": ("k0", "k2", "k5", "pruned", "mixed"),
    "temperature": (0.0, 0.8),
    "processor": ("none", "repetition"),
    "context": ("short",),
}
SOME = ("none", "repetition", "top_p", "bad_words", "allowed_ids", "stop_id")
HYBRIDS = (
    "ids-qwen3_next",
    "own-qwen3_5",
    "ids-lfm2",
    "own-granite4",
    "ids-falcon_h1",
    "ids-nemotron_h",
    "own-jamba",
    "ids-lfm3",
    "ids-mamba",
    "own-falcon_mamba",
    "ids-mamba2",
)
"""Masks with ids, or the checkpoint's own gated adapter."""


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    @cache
    def find(name: str, dtype: str) -> Subject:
        kind, _, family = name.partition("-")
        sizes = {"hidden_size": 64, "num_heads": 2, "kv_heads": 1, "num_masks": 5}
        rank = 3 if kind == "own" else None
        path = tiny_checkpoint(tmp_path_factory.mktemp(name), family, seed=1, adapter_rank=rank, **sizes)
        return Subject(name, load_model(path, dtype=dtype))

    return find


@pytest.mark.parametrize(("model", "cell"), cover(1, model=HYBRIDS, **FEW), ids=cell_name)
def test_drafts_leave_the_text_of_a_hybrid(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cell"),
    cover(2, model=(*HYBRIDS, "ids-bamba", "ids-olmo_hybrid"), **FEW | {"processor": SOME, "layout": LAYOUTS}),
    ids=cell_name,
)
def test_drafts_leave_the_text_of_a_hybrid_under_every_two_conditions(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


CELL = Cell("float32", "k5", 0.0, "none", "batch", "chunked", "miss", "undisturbed", False, "short", "left")


@pytest.mark.parametrize("model", ["ids-qwen3_next", "ids-lfm2"])
def test_a_state_that_rejected_drafts_reach_is_caught(
    model: str, subject_of: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(model, "float32")
    check_cell(subject, CELL)
    begin = RecurrentStates.begin

    def all_final(states: RecurrentStates, rows: object) -> StateStep:
        step = begin(states, rows)  # type: ignore[arg-type]
        step.runs[:, 7] = step.runs[:, 6]
        step.windows(3).log[:] = step.windows(3).log.roll(1, dims=1)
        return step

    monkeypatch.setattr(RecurrentStates, "begin", all_final)
    with pytest.raises(Mismatch):
        check_cell(subject, CELL)
