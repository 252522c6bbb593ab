"""SPACE with a recurrent draft head, which lays out no masks ≡ plain decoding, bitwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from exactness_matrix import Cell, Mismatch, Subject, check_cell
from space_model.loading.load import load_model
from tiny_checkpoints import tiny_checkpoint

CELLS = [
    Cell("float32", "head5", 0.0, "none", "alone", "whole", "miss", "preempted", True, "short", "nan"),
    Cell("float32", "head3", 0.8, "repetition", "batch", "chunked", "hit", "undisturbed", True, "short", "left"),
    Cell("float32", "head2", 0.8, "top_p", "alone", "whole", "hit", "restarted", True, "long", "left"),
    Cell("float32", "head1", 1.0, "eos", "batch", "whole", "miss", "preempted", True, "short", "nan"),
    Cell("bfloat16", "head5", 0.0, "none", "batch", "chunked", "hit", "restarted", True, "short", "nan"),
    Cell("bfloat16", "head4", 0.8, "all", "batch", "whole", "miss", "undisturbed", True, "long", "left"),
    Cell("bfloat16", "heads and masks", 0.8, "none", "batch", "chunked", "hit", "preempted", True, "short", "nan"),
]


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    sizes = {"hidden_size": 32, "num_heads": 2, "kv_heads": 1, "tie_word_embeddings": False}
    folder = tiny_checkpoint(tmp_path_factory.mktemp("head"), seed=1, head_drafts=5, draft_vocab=60, **sizes)
    subjects: dict[str, Subject] = {}

    def find(dtype: str) -> Subject:
        if dtype not in subjects:
            subjects[dtype] = Subject("head", load_model(folder, dtype=dtype))
        return subjects[dtype]

    return find


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_drafts_of_the_recurrent_head_leave_the_plain_text(cell: Cell, subject_of: Callable[[str], Subject]) -> None:
    check_cell(subject_of(cell.dtype), cell)


def test_a_draft_that_is_accepted_unverified_is_caught(
    subject_of: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("space_server.host_runner.num_accepted", lambda samples, drafts: len(drafts))
    with pytest.raises(Mismatch):
        check_cell(subject_of("float32"), CELLS[0])
