"""SPACE with a checkpoint's own MTP layer ≡ plain decoding, bitwise."""

from __future__ import annotations

import json
from functools import cache

import pytest
from exactness_matrix import BETWEEN, Cell, Mismatch, Subject, Subjects, accepted_lengths, check_cell, check_sources
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.mtp import load_mtp
from space_model.loading.load import load_model
from tiny_checkpoints import add_mtp_layer, tiny_checkpoint

CELLS = [
    ("glm4_moe", Cell("float32", "head4", 0.0, "none", "alone", "whole", "miss", "preempted", True, "short", "nan")),
    ("glm4_moe", Cell("bfloat16", "head3", 0.8, "all", "batch", "chunked", "hit", "restarted", True, "short", "left")),
    (
        "deepseek_v3",
        Cell("float32", "head3", 0.8, "top_p", "batch", "chunked", "hit", "restarted", True, "long", "left"),
    ),
    ("deepseek_v3", Cell("bfloat16", "head2", 0.0, "eos", "batch", "whole", "miss", "preempted", True, "short", "nan")),
    (
        "qwen3_next",
        Cell("float32", "head3", 0.8, "none", "batch", "chunked", "miss", "preempted", True, "short", "left"),
    ),
    ("qwen3_5", Cell("float32", "head2", 0.0, "none", "batch", "chunked", "miss", "preempted", True, "short", "nan")),
    ("mimo", Cell("bfloat16", "head4", 0.8, "none", "batch", "chunked", "hit", "restarted", True, "short", "nan")),
    ("mimo", Cell("float32", "head3", 0.0, "none", "alone", "whole", "miss", "preempted", True, "long", "left")),
    (
        "qwen3_5_moe",
        Cell("float32", "head3", 0.0, "none", "batch", "chunked", "miss", "restarted", True, "short", "left"),
    ),
    (
        "mimo_v2_flash",
        Cell("bfloat16", "head3", 0.8, "none", "batch", "chunked", "hit", "preempted", True, "short", "nan"),
    ),
]


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    @cache
    def find(family: str, dtype: str) -> Subject:
        kind = "qwen2" if family == "mimo" else family
        of_window = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
        folder = tiny_checkpoint(
            tmp_path_factory.mktemp(family), kind, num_masks=0, num_layers=1, seed=2, tie_word_embeddings=False,
            num_nextn_predict_layers=1, **(of_window if family == "mimo_v2_flash" else {}),
        )  # fmt: skip
        if family == "mimo":
            config = json.loads((folder / "config.json").read_text())
            changed = {"model_type": "mimo", "rope_theta": 10000.0}
            (folder / "config.json").write_text(json.dumps(config | changed))
        add_mtp_layer(folder)
        model = load_model(folder, dtype=dtype)
        network = load_mtp(Checkpoint.open(folder), model.facts, dtype=dtype)
        return Subject("MTP layer", model.drafted_by(network), base=model)

    return find


@pytest.mark.parametrize(("family", "cell"), CELLS, ids=str)
def test_drafts_of_an_mtp_layer_leave_the_plain_text(family: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(family, cell.dtype), cell)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_its_own_drafts_are_refused_and_taken(family: str, subject_of: Subjects) -> None:
    seen: set[tuple[int, int]] = set()
    for life in ("undisturbed", "preempted", "restarted"):
        for temperature in (0.0, 0.8):
            cell = Cell("float32", "head2", temperature, "none", "batch", "chunked", "hit", life, True, "short", "left")
            seen |= accepted_lengths(subject_of(family, "float32"), cell, "own")
    assert {(2, 0), (2, 1), (2, 2)} <= seen


def test_lookup_drafts_come_between_its_own(subject_of: Subjects) -> None:
    check_sources(subject_of("glm4_moe", "float32"), BETWEEN)


@pytest.mark.usefixtures("accept_unverified")
def test_a_draft_that_is_accepted_unverified_is_caught(subject_of: Subjects) -> None:
    with pytest.raises(Mismatch):
        check_cell(subject_of("glm4_moe", "float32"), CELLS[0][1])
