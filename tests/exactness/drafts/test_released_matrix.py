"""SPACE with the adapters that Uno and I-DLM release ≡ plain decoding of the base, bitwise; each seat by its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from exactness_matrix import Cell, Mismatch, Subject, check_cell
from space_kernels.linear.gated_delta import GatedDelta
from space_model.loading.load import load_model
from tiny_checkpoints import released_adapter, tiny_checkpoint
from torch import Tensor

CELLS = [
    Cell("float32", "k5", 0.0, "none", "alone", "whole", "miss", "preempted", False, "short", "nan"),
    Cell("float32", "k3", 0.8, "repetition", "batch", "chunked", "hit", "undisturbed", False, "short", "left"),
    Cell("float32", "k2", 0.8, "top_p", "alone", "whole", "hit", "preempted", False, "short", "left"),
    Cell("bfloat16", "pruned", 0.0, "none", "batch", "whole", "hit", "preempted", False, "short", "nan"),
    Cell("bfloat16", "k5", 0.8, "all", "alone", "chunked", "miss", "restarted", False, "short", "left"),
    Cell("float32", "turns3", 0.8, "none", "batch", "chunked", "hit", "preempted", False, "short", "nan"),
]


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    folder = tmp_path_factory.mktemp("released")
    base = tiny_checkpoint(
        folder / "base", "qwen3", num_masks=0, seed=1, hidden_size=32, num_heads=2, kv_heads=1, mask_token_id=100
    )
    adapters = {form: f"{form}:{released_adapter(folder / form, base, rank=16)}" for form in ("uno", "i-dlm")}

    @cache
    def find(dtype: str) -> Subject:
        model, bare = load_model(base, dtype=dtype, adapters=adapters), load_model(base, dtype=dtype)
        return Subject("released", model, adapters=("uno", "i-dlm", ""), base=bare)

    return find


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_released_drafts_leave_the_base_s_text(cell: Cell, subject_of: Callable[[str], Subject]) -> None:
    check_cell(subject_of(cell.dtype), cell)


def test_noise_that_leaks_into_chain_rows_is_caught(
    subject_of: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leak(delta: GatedDelta, y: Tensor, x: Tensor, rows: slice) -> None:
        y[: rows.stop] += delta(x[: rows.stop])

    monkeypatch.setattr(GatedDelta, "add_to", leak)
    with pytest.raises(Mismatch):
        check_cell(subject_of("float32"), CELLS[0])
