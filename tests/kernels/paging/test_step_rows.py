"""The tables that a step's kernels read, and when they are uploaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doubles.kernels import MadeUp, full_layout, made_up_step
from space_kernels.attention.library_parts import PrefixRows
from space_kernels.paging.step_rows import PatternTables, StepRows, StepTables
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.step.state import StateAdmission, StepIndex, StepState, rows
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import batch_pattern

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


CPU = torch.device("cpu")


def prefix_of(known: int, *, k: int, block_size: int, window: int, max_pages: int) -> PrefixRows:
    """Build the rows of one sequence with `known` ids and pages up to the last column of the table."""
    pages = min(max_pages, -(-known // block_size))
    state = StepState.empty(
        1, max_drafts=max(k, 1), max_pages=max_pages, block_size=block_size, window=window, vocab_size=50
    )
    sampling_params = SamplingParams(temperature=0.0)
    admission = StateAdmission(
        ids=[1] * known, num_prompt=1, pages=list(range(1, pages + 1)),
        sampling_params=sampling_params,
        num_left=window - known + 1, eos_ids=[], stop_ids=[], max_drafts=k, max_masks=k, drafts=[2] * k,
    )  # fmt: skip
    state.put(0, admission)
    layout = DraftLayout.full(k, k) if k else DraftLayout.plain()
    laid_out = rows(state, StepIndex.of(1, layout))
    pattern = batch_pattern((((k + 1, layout, None, None), 1),), (49,) * k, (), CPU)
    columns = state.page_table[:, :pages]
    tables = StepTables(PatternTables.of(pattern.rows, CPU), laid_out.starts, columns, block_size, laid_out.num_written)
    return PrefixRows.of(tables.as_rows(pattern.rows))


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("k", [0, 1, 3, 5, 31])
def test_a_run_that_ends_behind_the_last_page_has_a_page_to_look_up(k: int, block_size: int) -> None:
    """Drafts without a slot are dead but stay in their run, at the end of the window and of the pages."""
    for before in range(min(k + 2, block_size)):
        for window in (4 * block_size, 5 * block_size):
            known = (
                4 * block_size - before + (window > 4 * block_size)
            )  # where more could come: paused for want of a page
            prefix = prefix_of(known, k=k, block_size=block_size, window=window, max_pages=4)
            for reach in (prefix.short_chains, prefix.masks):
                if reach is not None:
                    assert int(reach.lengths.max()) <= reach.pages.shape[1] * block_size
                    assert reach.pages[:, :4].tolist() == [[1, 2, 3, 4]] * len(reach.pages)
                    assert not reach.pages[:, 4:].any()  # any page that exists
