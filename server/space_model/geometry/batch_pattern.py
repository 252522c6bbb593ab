"""The part of a packed step that is independent of ids, positions and pages; cached per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from space_kernels.paging.step_rows import Ints, RowPattern
from torch import Tensor

from space_model.geometry.draft_layout import DraftLayout

ROW_MULTIPLE = 4
"""The number of rows is padded to a multiple of this: smaller matmuls sum in another order (measured)."""

SegmentShape = tuple[int, DraftLayout, int | None]
"""A segment's number of chain rows, layout and adapter."""

ShapeRun = tuple[SegmentShape, int]
"""A shape and the number of consecutive segments with it; most steps have a single run."""


@dataclass(frozen=True)
class GatedRows:
    """The mask rows of one adapter in a step."""

    adapter: int
    slice: slice  # flat row numbers
    masks: Tensor  # [rows] int64: each row's mask, from 0


@dataclass(frozen=True, eq=False)
class BatchPattern:
    """The row layout shared by steps with equal segment shapes."""

    rows: RowPattern
    chain_rows: list[range]  # per segment: flat row numbers of its pending ids and drafts
    mask_rows: list[list[range]]  # per segment and group: flat row numbers of the group's masks
    mask_ids: Ints  # [mask rows and padding] mask ids; 0 for masks without ids
    gated: tuple[GatedRows, ...]  # ascending by adapter; contiguous, up to the last mask row

    @property
    def num_mask_rows(self) -> int:
        """Return the number of mask rows of all segments."""
        return len(self.rows.offsets) - self.rows.num_chain_rows


@lru_cache(maxsize=64)
def batch_pattern(
    runs: tuple[ShapeRun, ...],
    mask_ids: tuple[int, ...],
    adapter_masks: tuple[int, ...],
    device: torch.device,
) -> BatchPattern:
    """Lay out segments of these shapes. Raises ValueError for more masks than the checkpoint or adapter has."""
    shapes = [shape for shape, count in runs for _ in range(count)]
    chain_rows: list[range] = []
    offsets: list[int] = []
    for num_chain, _, _ in shapes:
        chain_rows.append(range(len(offsets), len(offsets) + num_chain))
        offsets.extend(range(num_chain))
    num_chain_rows = len(offsets)
    reach = [offset + 1 for offset in offsets]
    group = [-1] * num_chain_rows
    ids: list[int] = []
    num_groups = 0
    mask_rows: list[list[range]] = [[] for _ in shapes]
    mask_runs = [range(0)] * len(shapes)
    masks: list[int] = []  # each mask row's mask, from 0
    bounds: dict[int, range] = {}  # adapter -> its rows
    for number in sorted(range(len(shapes)), key=lambda n: -1 if (a := shapes[n][2]) is None else a):
        (num_chain, layout, adapter), first = shapes[number], len(offsets)
        known = len(mask_ids) if adapter is None else adapter_masks[adapter]
        for g, count in enumerate(layout.masks):
            if count > known:
                owner = "the checkpoint" if adapter is None else f"adapter {adapter}"
                raise ValueError(f"Segment {number} lays out {count} masks; {owner} has {known}.")
            base = num_chain - layout.num_drafts + g  # slots up to the row that the group follows
            mask_rows[number].append(range(len(offsets), len(offsets) + count))
            ids.extend(mask_ids[:count] if adapter is None else [0] * count)
            masks.extend(range(count))
            offsets.extend(range(base, base + count))
            reach.extend([base] * count)
            group.extend([num_groups] * count)
            num_groups += 1
        mask_runs[number] = range(first, len(offsets))
        if adapter is not None and len(offsets) > first:
            begun = bounds.get(adapter, range(first, first))
            bounds[adapter] = range(begun.start, len(offsets))
    num_padded = len(offsets) + -len(offsets) % ROW_MULTIPLE
    rows = RowPattern(
        chain_runs=chain_rows,
        mask_runs=mask_runs,
        offsets=np.array(offsets, dtype=np.int64),
        reach=np.array(reach, dtype=np.int64),
        group=np.array(group, dtype=np.int64),
        num_chain_rows=num_chain_rows,
        num_padded=num_padded,
    )
    padding = [0] * (num_padded - len(offsets))
    return BatchPattern(
        rows=rows,
        chain_rows=chain_rows,
        mask_rows=mask_rows,
        mask_ids=np.array(ids + padding, dtype=np.int64),
        gated=_gated(bounds, masks, num_chain_rows, device) if bounds else (),
    )


def _gated(
    bounds: dict[int, range], masks: Sequence[int], num_chain_rows: int, device: torch.device
) -> tuple[GatedRows, ...]:
    of_row = torch.tensor(masks, dtype=torch.int64, device=device)
    return tuple(
        GatedRows(adapter, slice(run.start, run.stop), of_row[run.start - num_chain_rows : run.stop - num_chain_rows])
        for adapter, run in bounds.items()
    )
