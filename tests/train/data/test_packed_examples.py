"""Rows hold every target once per epoch, in an order that the seed and the row's number alone decide."""

from collections.abc import Sequence

import pytest
import torch
from space_train.data.examples import Example
from space_train.data.records import NothingToLearn
from space_train.data.rows import PackedExamples, packed

PAD = 0


def example(*ids: int, given: int = 0) -> Example:
    """Learned from id number `given` on."""
    return Example(list(ids), [place >= given for place in range(len(ids))])


def numbered(sizes: Sequence[int]) -> list[Example]:
    """Examples of these sizes whose ids are all different."""
    starts = [1 + sum(sizes[:index]) for index in range(len(sizes))]
    return [example(*range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def targets(rows: PackedExamples, first: int, count: int) -> list[int]:
    found = rows.rows(first, count)
    return sorted(found.ids[found.learned].tolist())


def test_short_examples_share_a_row_and_know_their_document() -> None:
    rows = PackedExamples([example(1, 2, 3, 4, given=2), example(5, 6, 7)], length=8, seed=0, pad_id=PAD).rows(0, 1)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, PAD]]
    assert rows.document.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1]]
    # The first id of a document has nothing before it to be learned from.
    assert rows.learned.tolist() == [[False, False, True, True, False, True, True, False]]
    assert (rows.ids.dtype, rows.learned.dtype, rows.document.dtype) == (torch.int64, torch.bool, torch.int64)


def test_a_long_example_is_cut_into_pieces_and_no_target_is_lost() -> None:
    rows = PackedExamples([example(1, 2, 3, 4, 5, 6, 7)], length=4, seed=0, pad_id=PAD)
    assert len(rows) == 2
    found = sorted(rows.rows(0, 2).ids.tolist())
    assert found == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert targets(rows, 0, 2) == [2, 3, 4, 5, 6, 7]


def test_a_piece_without_a_target_is_no_row() -> None:
    rows = PackedExamples([example(*range(1, 11), given=8)], length=4, seed=0, pad_id=PAD)
    assert len(rows) == 1
    assert targets(rows, 0, 1) == [9, 10]


def test_an_epoch_teaches_every_target_once_and_the_next_in_another_order() -> None:
    sizes = [3, 9, 2, 30, 5, 5, 7, 1, 4, 16, 8, 2]
    rows = PackedExamples(numbered(sizes), length=8, seed=1, pad_id=PAD)
    ids = set(range(1, 1 + sum(sizes)))
    firsts = {1 + sum(sizes[:index]) for index in range(len(sizes))}
    for epoch in range(3):
        assert targets(rows, epoch * len(rows), len(rows)) == sorted(ids - firsts)
    assert not torch.equal(rows.rows(0, len(rows)).ids, rows.rows(len(rows), len(rows)).ids)


def test_rows_depend_on_the_seed_and_their_number_alone() -> None:
    examples = numbered([3, 9, 2, 30, 5, 5, 7, 4, 16, 8, 2])
    rows = PackedExamples(examples, length=8, seed=1, pad_id=PAD)
    total = 3 * len(rows)
    whole = rows.rows(0, total).ids
    # Another object, asked backwards and across the borders of epochs: as after a resume.
    other = PackedExamples(examples, length=8, seed=1, pad_id=PAD)
    for first in reversed(range(0, total - 4, 3)):
        assert torch.equal(other.rows(first, 4).ids, whole[first : first + 4])
    assert not torch.equal(PackedExamples(examples, length=8, seed=2, pad_id=PAD).rows(0, total).ids, whole)


def test_processes_that_take_rows_by_number_share_out_an_epoch() -> None:
    rows = PackedExamples(numbered([5] * 16), length=5, seed=0, pad_id=PAD)
    per_process, num_processes = 4, 4
    found = [
        tuple(row) for rank in range(num_processes) for row in rows.rows(rank * per_process, per_process).ids.tolist()
    ]
    assert len(set(found)) == len(found) == len(rows)


def test_what_a_token_may_see_and_where_it_stands_keep_to_its_document() -> None:
    rows = PackedExamples([example(1, 2, 3), example(4, 5)], length=6, seed=0, pad_id=PAD).rows(0, 1)
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert rows.visible[0].int().tolist() == expected


def test_without_packing_each_example_has_a_row() -> None:
    rows = PackedExamples(numbered([2, 3, 2]), length=8, seed=0, pad_id=PAD, pack=False)
    assert len(rows) == 3
    assert rows.rows(0, 3).document.max() == 0


def test_packing_fills_rows_as_full_as_the_sizes_allow() -> None:
    assert [sorted(row) for row in packed([6, 5, 4, 3, 2], 10, range(5))] == [[0, 2], [1, 3, 4]]
    sizes = [3, 7, 2, 8, 5, 5, 1, 9, 4, 6] * 20
    rows = packed(sizes, 10, range(len(sizes)))
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    assert [sum(sizes[item] for item in row) for row in rows] == [10] * 100


def test_the_figures_of_an_epoch_are_counted() -> None:
    rows = PackedExamples([example(1, 2, 3, 4, given=2), example(5, 6)], length=8, seed=0, pad_id=PAD)
    assert (rows.num_tokens, rows.num_targets, rows.fill) == (6, 3, 0.75)


def test_nothing_to_learn_is_refused_with_the_count() -> None:
    with pytest.raises(NothingToLearn, match="None of the 2 examples has an id to learn behind another"):
        PackedExamples([example(1), example(2, 3, given=2)], length=8, seed=0, pad_id=PAD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1, "pad_id": 0}, "at least 2 ids.*got length 1"),
        ({"length": 4, "pad_id": -1}, "pad_id must be .*got -1"),
    ],
)
def test_senseless_settings_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedExamples([example(1, 2)], seed=0, **options)


def test_senseless_row_numbers_are_refused() -> None:
    rows = PackedExamples([example(1, 2)], length=4, seed=0, pad_id=PAD)
    for first, count in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"got first={first}, count={count}"):
            rows.rows(first, count)
