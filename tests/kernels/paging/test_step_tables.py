"""The tables that a step's kernels read, and when they are uploaded."""

import numpy as np
import torch
from doubles.kernels import MadeUp, full_layout, made_up_step
from space_kernels.paging.step_rows import StepRows
from space_kernels.paging.step_tables import PatternTables, StepTables

SEQUENCES = [
    MadeUp(cached=5, num_chain=3, groups=[(0, 2), (1, 0), (2, 1)], seed=1),
    MadeUp(cached=40, num_chain=1, seed=2),
    MadeUp(cached=31, num_chain=2, groups=[(0, 1), (1, 3)], seed=3),
]


def rows_of(rows: StepRows, starts: list[int], pages: list[np.ndarray]) -> StepRows:
    return StepRows(rows.pattern, np.array(starts), pages, rows.block_size, rows.device)


def test_every_row_says_whose_it_is_and_where_its_group_begins() -> None:
    rows = made_up_step(SEQUENCES).rows
    tables = PatternTables.of(rows.pattern, torch.device("cpu"))
    assert tables.owner.tolist() == [0, 0, 0, 1, 2, 2] + [0] * 3 + [2] * 4
    assert tables.offset.tolist() == [0, 1, 2, 0, 0, 1, 1, 2, 3, 1, 2, 3, 4]
    assert tables.reach.tolist() == [1, 2, 3, 1, 1, 2, 1, 1, 3, 1, 2, 2, 2]
    assert tables.group_first.tolist()[6:] == [6, 6, 8, 9, 10, 10, 10]
    assert all(first > row for row, first in enumerate(tables.group_first.tolist()[:6]))
    assert tables.chain_first.tolist() == [0, 3, 4]
    assert tables.mask_first.tolist() == [6, 9, 9]
    assert tables.num_masks.tolist() == [3, 0, 4]
    assert {tensor.dtype for tensor in vars(tables).values() if isinstance(tensor, torch.Tensor)} == {torch.int32}


def test_slots_are_those_of_the_pages() -> None:
    rows = made_up_step(SEQUENCES).rows
    tables = StepTables.of(rows)
    assert tables.slots().tolist() == rows.chain_slots().tolist()
    fewer = StepTables(tables.pattern, tables.starts, tables.page_table, 16, torch.tensor([1, 0, 2], dtype=torch.int32))
    assert [slot >= 0 for slot in fewer.slots().tolist()] == [True, False, False, False, True, True]


def test_a_pattern_is_uploaded_once_and_pages_when_somebody_got_another() -> None:
    rows = made_up_step(SEQUENCES).rows
    pages = [np.array(held) for held in rows.pages]
    first = rows_of(rows, [5, 40, 31], pages)
    then = rows_of(rows, [6, 41, 32], pages)
    grown = rows_of(rows, [7, 42, 33], [*pages[:2], np.array([*pages[2], 0])])
    tables = [StepTables.of(step) for step in (first, then, grown)]
    assert StepTables.of(first) is tables[0]
    assert tables[0].pattern is tables[1].pattern is tables[2].pattern
    assert tables[0].page_table is tables[1].page_table
    assert tables[2].capacity == tables[1].capacity + 16
    assert tables[2].page_table is not tables[1].page_table
    assert tables[1].starts.tolist() == [6, 41, 32]


def test_tiles_cover_every_packed_row_once_the_last_first() -> None:
    rows = made_up_step([MadeUp(cached=9, num_chain=50, groups=full_layout(2)[:1]), *SEQUENCES]).rows
    tables = PatternTables.of(rows.pattern, torch.device("cpu"))
    assert tables.tiles(2, 16).tolist() == [[0, n] for n in range(6, -1, -1)] + [[1, 0], [2, 0], [3, 0]]
    assert tables.tiles(2, 16) is tables.tiles(2, 16)
    assert len(tables.tiles(1, 64)) == 4
