"""The functions of `state` as Triton kernels, one launch each.

The reference needs about thirty tensor operations for each. At two microseconds per launch, even inside a CUDA graph,
that would be a tenth of a small model's step.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.step import state as step_state
from space_kernels.step.state import (
    DeviceMaskRows,
    DeviceRows,
    StepState,
    chain_choices,
    mask_choices,
    result_width,
)
from space_kernels.step.state_kernels import _advance, _masks, _rows
from space_kernels.step.uniform_index import StepIndex
from space_kernels.step.verification import StepVerification
from space_kernels.step.verification_triton import verify_sequences

__all__ = ["advance", "chain_choices", "mask_choices", "masks", "rows", "verify_step"]

_BLOCK = 128


def rows(state: StepState, index: StepIndex, mask_ids: Tensor | None = None) -> DeviceRows:
    """As `state.rows`."""
    S, k, R = index.num_sequences, index.num_drafts, index.num_padded
    device = state.root.device

    def empty(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    laid_out = DeviceRows(
        ids=empty(R),
        positions=empty(R),
        slots=empty(index.num_chain_rows),
        starts=empty(S, torch.int32),
        num_written=empty(S, torch.int32),
        num_live=empty(S),
        running=empty(S, torch.bool),
    )
    has_ids = mask_ids is not None and index.most_drafts > 0
    _rows[(triton.cdiv(R, _BLOCK),)](
        state.live.view(torch.uint8),
        state.root,
        state.num_known,
        state.num_left,
        state.drafts,
        state.num_drafts,
        state.max_drafts,
        state.page_table,
        state.num_pages,
        index.owner,
        index.offset,
        index.mask,
        mask_ids if mask_ids is not None else index.mask,
        laid_out.ids,
        laid_out.positions,
        laid_out.slots,
        laid_out.starts,
        laid_out.num_written,
        laid_out.num_live,
        laid_out.running.view(torch.uint8),
        S,
        k,
        index.num_chain_rows,
        R,
        state.window,
        state.page_table.shape[1],
        state.drafts.stride(0),
        MASK_IDS=has_ids,
        BLOCK_SIZE=state.block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return laid_out


verify_step = partial(step_state.verify_step, verify=verify_sequences)
"""As `state.verify_step`."""


def masks(state: StepState, index: StepIndex, verification: StepVerification) -> DeviceMaskRows:
    """As `state.masks`."""
    S, most = index.num_sequences, index.most_drafts
    found = DeviceMaskRows(
        *(torch.empty(shape, dtype=torch.int64, device=state.root.device) for shape in ((S, most), S, S))
    )
    _masks[(S,)](
        verification.lengths,
        verification.end,
        state.num_left,
        state.max_drafts,
        state.max_masks,
        index.masks,
        index.mask_starts,
        found.rows,
        found.first,
        found.count,
        index.num_drafts,
        most,
        index.num_rows,
        GROUPS=triton.next_power_of_2(index.num_drafts + 1),
        PLACES=triton.next_power_of_2(max(1, most)),
        num_warps=1,
    )
    return found


def advance(
    state: StepState,
    laid_out: DeviceRows,
    verification: StepVerification,
    drafts: Tensor,
    num_drafts: Tensor,
    banned_ids: Tensor,
) -> Tensor:
    """As `state.advance`."""
    S, K = state.drafts.shape
    result = torch.empty(S, result_width(K), dtype=torch.int32, device=state.root.device)
    k = verification.emitted.shape[1] - 1
    _advance[(S,)](
        state.live.view(torch.uint8),
        state.root,
        state.num_known,
        state.num_left,
        state.drafts,
        state.num_drafts,
        state.history,
        state.counts,
        laid_out.num_live,
        verification.accepted,
        verification.emitted,
        verification.lengths,
        verification.end,
        drafts,
        num_drafts,
        banned_ids,
        result,
        K,
        k,
        drafts.shape[1],
        len(banned_ids),
        state.vocab_size,
        drafts.stride(0),
        state.history.stride(0),
        state.drafts.stride(0),
        HISTORY=state.history.shape[1] > 0,
        COUNTS=state.counts.shape[1] > 0,
        PLACES=triton.next_power_of_2(max(K, k) + 1),
        BANNED=triton.next_power_of_2(max(1, len(banned_ids))),
        num_warps=1,
    )
    return result


def _tuned() -> tuple[Tuned, ...]:
    found = []
    state = ["roots", "num_knowns", "num_lefts", "drafts", "num_drafts", "max_drafts", "num_pages"]
    longs = [*state, "owners", "offsets", "masks", "mask_ids", "ids", "positions", "slots", "num_live"]
    layout = dict.fromkeys(("S", "k", "num_chain_rows", "num_padded", "window", "table_width"), "i32")
    of_rows = dict.fromkeys(longs, "*i64") | layout | {"draft_stride": "i32"}
    of_rows |= {"lives": "*u8", "runnings": "*u8", "page_table": "*i32", "starts": "*i32", "num_written": "*i32"}
    for size in (16, 32):
        for mask_ids in (False, True):
            constants = {"MASK_IDS": mask_ids, "BLOCK_SIZE": size, "BLOCK": _BLOCK}
            found.append(Tuned(_rows, of_rows, constants, 4))
    of_masks = dict.fromkeys(("lengths", "ends", "num_lefts", "max_drafts", "max_masks", "sizes"), "*i64")
    of_masks |= dict.fromkeys(("mask_starts", "flat_rows", "firsts", "counts"), "*i64")
    of_masks |= {"k": "i32", "most": "i32", "num_rows": "i32"}
    state = ["roots", "num_knowns", "num_lefts", "state_drafts", "num_state_drafts", "history"]
    names = [*state, "num_live", "accepteds", "emitteds", "lengths", "ends", "drafts", "num_drafts", "banned"]
    of_state = dict.fromkeys(names, "*i64") | {"lives": "*u8", "counts": "*i32", "result": "*i32"}
    numbers = ("K", "k", "num_proposed", "num_banned", "V", "draft_stride", "history_stride", "state_stride")
    of_state |= dict.fromkeys(numbers, "i32")
    for places in (2, 4, 8, 16):
        found.append(Tuned(_masks, of_masks, {"GROUPS": places, "PLACES": places}, 1))
        for kept in (False, True):
            constants = {"HISTORY": kept, "COUNTS": kept, "PLACES": places, "BANNED": 8}
            found.append(Tuned(_advance, of_state, constants, 1))
    return tuple(found)


TUNED = _tuned()
