"""SPACE with an EAGLE head ≡ plain decoding, bitwise, however often its drafts are accepted."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from eagle_heads import DenseHead, HeadShape, dense_base
from exactness_matrix import (
    BETWEEN,
    Cell,
    Mismatch,
    Run,
    Subject,
    Subjects,
    accepted_lengths,
    check_cell,
    check_sources,
)
from space_model.draft_networks.eagle import load_eagle
from space_model.draft_networks.eagle_files import EagleFiles
from space_model.loading.load import load_model
from tiny_checkpoints import tiny_checkpoint

CELLS = [
    ("eagle3", Cell("float32", "head5", 0.0, "none", "alone", "whole", "miss", "preempted", True, "short", "nan")),
    (
        "eagle3",
        Cell("float32", "head3", 0.8, "repetition", "batch", "chunked", "hit", "undisturbed", True, "short", "left"),
    ),
    ("eagle3", Cell("float32", "head2", 0.8, "top_p", "alone", "whole", "hit", "restarted", True, "long", "left")),
    ("eagle3", Cell("bfloat16", "head1", 1.0, "eos", "batch", "whole", "miss", "preempted", True, "short", "nan")),
    ("eagle3", Cell("bfloat16", "head5", 0.0, "none", "batch", "chunked", "hit", "restarted", True, "short", "nan")),
    ("eagle3", Cell("bfloat16", "head4", 0.8, "all", "batch", "whole", "miss", "undisturbed", True, "long", "left")),
    (
        "eagle3",
        Cell("bfloat16", "heads and masks", 0.8, "none", "batch", "chunked", "hit", "preempted", True, "short", "nan"),
    ),
    ("eagle1", Cell("float32", "head3", 0.8, "none", "batch", "chunked", "hit", "preempted", True, "short", "nan")),
    ("speculators", Cell("float32", "head4", 0.0, "none", "batch", "whole", "miss", "restarted", True, "short", "nan")),
]
FORMS = {
    "eagle3": (HeadShape(draft_ids=tuple(range(20, 120))), "eagle"),
    "eagle1": (HeadShape(1, hidden=32, owns_embedding=False), "eagle"),
    "speculators": (HeadShape(norm_before_residual=True, draft_ids=tuple(range(20, 120))), "speculators"),
}
LAYERS = (2, 2, 1)  # of a model of four


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "kv_heads": 1}
    target = tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1, **sizes)

    @cache
    def trained(name: str) -> Path:
        (shape, form), base = FORMS[name], dense_base(target)
        steps = 100 if name == "eagle3" else 40  # the tests of eagle3 alone assert that whole chains are accepted
        return DenseHead(base, shape, LAYERS).train_on(base, steps=steps).save(tmp_path_factory.mktemp(name), form)

    @cache
    def find(name: str, dtype: str) -> Subject:
        model = load_model(target, dtype=dtype)
        head = load_eagle(EagleFiles.open(str(trained(name)), Path), model)
        return Subject("EAGLE head", model.drafted_by(head), base=model)

    return find


@pytest.mark.parametrize(("name", "cell"), CELLS, ids=str)
def test_drafts_of_an_eagle_head_leave_the_plain_text(name: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(name, cell.dtype), cell)


@pytest.mark.parametrize("life", ["undisturbed", "preempted", "restarted"])
def test_its_own_drafts_are_refused_taken_in_part_and_taken_whole(life: str, subject_of: Subjects) -> None:
    seen: set[tuple[int, int]] = set()
    for temperature in (0.0, 0.8):
        cell = Cell("float32", "head2", temperature, "none", "batch", "chunked", "hit", life, True, "short", "left")
        seen |= accepted_lengths(subject_of("eagle3", "float32"), cell, "own")
    assert {(2, 0), (2, 1), (2, 2)} <= seen


def test_lookup_drafts_come_between_its_own(subject_of: Subjects) -> None:
    check_sources(subject_of("eagle3", "float32"), BETWEEN)


@pytest.mark.usefixtures("spoilt_drafter")
def test_whatever_its_pages_and_states_hold_the_text_is_the_same(subject_of: Subjects) -> None:
    records = Run(subject_of("eagle3", "float32"), CELLS[1][1], "own").finished()  # compared with plain decoding
    assert any(report.num_drafted for record in records for report in record.reports)


@pytest.mark.usefixtures("accept_unverified")
def test_a_draft_that_is_accepted_unverified_is_caught(subject_of: Subjects) -> None:
    with pytest.raises(Mismatch):
        check_cell(subject_of("eagle3", "float32"), CELLS[0][1])
