"""Rows of examples and of streams, in an order that the seed and the row's number alone decide."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from space_train.data.corpus import END_OF_TEXT_ID, train_tokenizer
from space_train.data.examples import Example
from space_train.data.records import NothingToLearn
from space_train.data.rows import (
    PERIOD,
    ExampleRows,
    MixedRows,
    PackedExamples,
    PackedTokens,
    RowStream,
    packed,
    with_own_texts,
    write_packed,
)
from torch import Tensor

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


def test_short_examples_share_a_row_and_long_ones_are_cut_without_losing_a_target() -> None:
    rows = PackedExamples([example(1, 2, 3, 4, given=2), example(5, 6, 7)], length=8, seed=0, pad_id=PAD).rows(0, 1)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, PAD]]
    assert rows.document.tolist() == [[0, 0, 0, 0, 1, 1, 1, -1]]
    # The first id of a document has nothing before it to be learned from.
    assert rows.learned.tolist() == [[False, False, True, True, False, True, True, False]]
    assert (rows.ids.dtype, rows.learned.dtype, rows.document.dtype) == (torch.int64, torch.bool, torch.int64)
    rows = PackedExamples([example(1, 2, 3, 4, 5, 6, 7)], length=4, seed=0, pad_id=PAD)
    assert len(rows) == 2
    found = sorted(rows.rows(0, 2).ids.tolist())
    assert found == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert targets(rows, 0, 2) == [2, 3, 4, 5, 6, 7]
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


def test_packing_fills_rows_as_full_as_the_sizes_allow_and_counts_them() -> None:
    rows = PackedExamples(numbered([2, 3, 2]), length=8, seed=0, pad_id=PAD, pack=False)
    assert len(rows) == 3
    assert rows.rows(0, 3).document.max() == 0
    assert [sorted(row) for row in packed([6, 5, 4, 3, 2], 10, range(5))] == [[0, 2], [1, 3, 4]]
    sizes = [3, 7, 2, 8, 5, 5, 1, 9, 4, 6] * 20
    rows = packed(sizes, 10, range(len(sizes)))
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    assert [sum(sizes[item] for item in row) for row in rows] == [10] * 100
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


def stream(seed: int = 0, num_ids: int = 103) -> PackedTokens:
    return PackedTokens(np.arange(num_ids, dtype=np.uint16), seed)


def test_an_epoch_draws_every_window_once_by_the_seed_alone() -> None:
    windows = stream().windows(0, 9, 10)
    starts = sorted(windows[:, 0].tolist())
    assert windows.shape == (9, 10)
    assert starts == list(range(starts[0], starts[0] + 90, 10))
    assert (windows.diff(dim=1) == 1).all()
    whole = stream().windows(0, 30, 10)
    assert (stream().windows(120, 18, 10) == whole[12:]).all()
    assert (stream(seed=1).windows(0, 30, 10) != whole).any()
    assert not stream(num_ids=19).holds(10)
    with pytest.raises(ValueError, match=r"has 19 ids; windows of 10 need at least 20"):
        stream(num_ids=19).windows(0, 1, 10)


def test_texts_are_packed_one_after_the_other_each_with_an_end(tmp_path: Path) -> None:
    tokenizer, texts = train_tokenizer(["ab abc"] * 4, 300), ["ab abc", "abc"]
    count = write_packed(tokenizer, texts, tmp_path / "ids.bin")
    ids = np.fromfile(tmp_path / "ids.bin", dtype=np.uint16).tolist()
    assert count == len(ids)
    first = tokenizer.encode("ab abc").ids
    assert ids == [*first, END_OF_TEXT_ID, *tokenizer.encode("abc").ids, END_OF_TEXT_ID]


class Numbered:
    """Rows that say whose they are, and which."""

    def __init__(self, name: int, count: int) -> None:
        self.name, self.count = name, count

    def rows(self, first: int, count: int) -> ExampleRows:
        ids = torch.tensor([[self.name, number] for number in range(first, first + count)])
        return ExampleRows(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))

    def __len__(self) -> int:
        return self.count


def mixed(*shares: float) -> MixedRows:
    return MixedRows([RowStream(Numbered(name, 10 * (name + 1)), share) for name, share in enumerate(shares)], seed=3)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.75, 0.25), (6.0, 3.0, 1.0), (0.9, 0.1)])
def test_every_stream_has_its_share_of_every_period(shares: tuple[float, ...]) -> None:
    ids = mixed(*shares).rows(0, 3 * PERIOD).ids[:, 0]
    for period in ids.view(3, PERIOD):
        for name, share in enumerate(shares):
            assert int((period == name).sum()) == round(PERIOD * share / sum(shares))


def test_each_stream_is_read_in_its_own_order_and_any_part_can_be_asked_for() -> None:
    ids = mixed(0.7, 0.3).rows(0, 200).ids
    for name in (0, 1):
        own = ids[ids[:, 0] == name, 1]
        assert own.tolist() == list(range(len(own)))
    data = mixed(0.7, 0.3)
    whole: Tensor = data.rows(0, 100).ids
    for first, count in ((0, 7), (39, 2), (55, 45)):
        assert torch.equal(data.rows(first, count).ids, whole[first : first + count])


def test_an_epoch_lasts_until_every_stream_of_data_was_read_once() -> None:
    assert len(mixed(1.0)) == 10
    data = mixed(0.5, 0.5)  # of 10 and 20 rows
    assert len(data) == 40
    assert data.rounds == [2.0, 1.0]
    ids = data.rows(0, len(data)).ids
    for name, count in ((0, 10), (1, 20)):
        assert set(ids[ids[:, 0] == name, 1].tolist()) >= set(range(count))


@pytest.mark.parametrize("num_own", [5, 600])
def test_an_epoch_is_a_round_of_the_data_however_much_the_model_wrote(num_own: int) -> None:
    data = MixedRows(with_own_texts(Numbered(0, 60), Numbered(1, num_own), 0.5), seed=0)
    assert len(data) == 120
    assert data.rounds == [1.0, 60 / num_own]
    assert str(data) == f"an epoch is 120 rows: 60 of the data ×1 and {num_own} of its own texts ×{60 / num_own:.3g}"


def test_few_texts_of_its_own_get_a_smaller_share_unless_one_is_asked_for() -> None:
    for num_data, num_own, share in ((60, 600, 0.5), (400, 100, 0.5), (400, 50, 1 / 3), (60_000, 3_000, 1 / 6)):
        streams = with_own_texts(Numbered(0, num_data), Numbered(1, num_own), None)
        assert [stream.share for stream in streams] == pytest.approx([1 - share, share])
        assert MixedRows(streams, seed=0).rounds[1] < 4.6  # shares are rounded to fortieths
    assert with_own_texts(Numbered(0, 60_000), Numbered(1, 600), 0.5)[1].share == 0.5


def test_streams_without_a_share_are_not_read_and_own_texts_teach_masks_alone() -> None:
    data = MixedRows(with_own_texts(Numbered(0, 60), Numbered(1, 7), 1.0), seed=0)
    assert len(data) == 7
    assert set(data.rows(0, 7).ids[:, 0].tolist()) == {1}
    assert set(mixed(1.0, 0.0).rows(0, 50).ids[:, 0].tolist()) == {0}
    with pytest.raises(ValueError, match="no source of rows"):
        mixed(0.0)
    streams = [RowStream(Numbered(0, 10), 0.5), RowStream(Numbered(1, 10), 0.5, teaches=False)]
    data = MixedRows(streams, seed=0)
    names = data.rows(0, 60).ids[:, 0].tolist()
    assert [data.teaches(row) for row in range(60)] == [name == 0 for name in names]
