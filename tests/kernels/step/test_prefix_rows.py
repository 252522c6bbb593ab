"""If only the device knows a step's positions, attention libraries still look up existing pages only."""

import pytest
import torch
from space_kernels.attention.prefix_rows import PrefixRows
from space_kernels.paging.step_tables import PatternTables, StepTables
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.step.state import StateAdmission, StepState, rows
from space_kernels.step.uniform_index import StepIndex
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import batch_pattern

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
    pattern = batch_pattern((((k + 1, layout, None), 1),), (49,) * k, (), CPU)
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
