"""SPACE with gated adapters ≡ plain decoding of the base without any, bitwise, in every cell; each seat by its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from exactness_matrix import Cell, Mismatch, Subject, Subjects, cell_name, check_cell, cover
from space_kernels.linear.gated_delta import GatedDelta
from space_model.loading.load import load_model
from tiny_checkpoints import tiny_adapter, tiny_checkpoint
from torch import Tensor

MODELS = ("own-llama", "beside-qwen3", "own-gemma2", "beside-gemma3")
"""The checkpoint's own adapter and two named ones; or masks with ids, and two named adapters beside them."""
FEW: dict[str, tuple[Any, ...]] = {
    "model": ("own-llama", "beside-gemma3"),
    "layout": ("k5", "mixed"),
    "temperature": (0.0, 0.8),
    "processor": ("none", "repetition"),
    "context": ("short",),
}


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    @cache
    def make(name: str, dtype: str) -> Subject:
        kind, _, family = name.partition("-")
        folder = tmp_path_factory.mktemp(name)
        rank = 3 if kind == "own" else None
        path = checkpoint(folder / "model", family, adapter_rank=rank)
        bare = checkpoint(folder / "bare", family, num_masks=0) if kind == "own" else path
        adapters = {
            "code": tiny_adapter(folder / "code", path, num_masks=5, rank=8, seed=5),
            "prose": tiny_adapter(folder / "prose", path, num_masks=3, rank=1, seed=6, draft_head=False),
        }
        model = load_model(path, dtype=dtype, adapters=adapters)
        connections = ("", "code", "prose") if kind == "own" else ("code", "prose", "", "code")
        return Subject(name, model, adapters=connections, base=load_model(bare, dtype=dtype))

    return make


def checkpoint(folder: Path, family: str, **options: int | None) -> Path:
    sizes = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "num_masks": 5}
    return tiny_checkpoint(folder, family, seed=1, tie_word_embeddings=False, **(sizes | options))


@pytest.mark.parametrize(("model", "cell"), cover(2, **FEW), ids=cell_name)
def test_gated_drafts_leave_the_base_s_text(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize(("model", "cell"), cover(2, **FEW | {"model": ("own-deepseek_v3",)})[::3], ids=cell_name)
def test_gated_drafts_leave_the_text_of_a_base_with_latent_attention(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cell"), cover(2, model=MODELS), ids=cell_name)
def test_gated_drafts_leave_the_base_s_text_under_every_two_conditions(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize("model", FEW["model"])
def test_an_adapter_that_leaks_into_chain_rows_is_caught(
    model: str, subject_of: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leak(delta: GatedDelta, y: Tensor, x: Tensor, rows: slice) -> None:
        y[: rows.stop] += delta(x[: rows.stop])

    monkeypatch.setattr(GatedDelta, "add_to", leak)
    cell = Cell("float32", "k2", 0.0, "none", "alone", "whole", "miss", "undisturbed", False, "short", "left")
    with pytest.raises(Mismatch):
        check_cell(subject_of(model, "float32"), cell)
