"""Several sources of rows as one."""

import pytest
import torch
from space_train.data.rows import PERIOD, ExampleRows, MixedRows, RowStream, with_own_texts
from torch import Tensor


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


def test_each_stream_is_read_in_its_own_order_without_gaps() -> None:
    ids = mixed(0.7, 0.3).rows(0, 200).ids
    for name in (0, 1):
        own = ids[ids[:, 0] == name, 1]
        assert own.tolist() == list(range(len(own)))


def test_any_part_can_be_asked_for() -> None:
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


def test_all_rows_may_be_of_its_own_texts_which_are_an_epoch_then() -> None:
    data = MixedRows(with_own_texts(Numbered(0, 60), Numbered(1, 7), 1.0), seed=0)
    assert len(data) == 7
    assert set(data.rows(0, 7).ids[:, 0].tolist()) == {1}


def test_a_stream_without_a_share_is_not_read_and_none_at_all_is_refused() -> None:
    assert set(mixed(1.0, 0.0).rows(0, 50).ids[:, 0].tolist()) == {0}
    with pytest.raises(ValueError, match="no source of rows"):
        mixed(0.0)


def test_the_ordinary_loss_learns_from_no_row_of_text_that_the_model_wrote() -> None:
    streams = [RowStream(Numbered(0, 10), 0.5), RowStream(Numbered(1, 10), 0.5, teaches=False)]
    data = MixedRows(streams, seed=0)
    names = data.rows(0, 60).ids[:, 0].tolist()
    assert [data.teaches(row) for row in range(60)] == [name == 0 for name in names]
