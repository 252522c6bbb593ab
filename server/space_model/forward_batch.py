"""One step's rows, packed: every sequence's pending ids, drafts and masks in one flat dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from space_kernels.paging import StepRows
from torch import Tensor

from space_model.draft_layout import DraftLayout

ROW_MULTIPLE = 4
"""Rows of a step are a multiple of this: products of fewer rows take another order of summation (measured)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in one step: its pending ids, its drafts, its masks.

    The pending ids are those not computed yet; the last of them is the root if it closes the known ids.
    """

    ids: Sequence[int]  # chain rows: pending ids, then the drafts (layout.num_drafts of them)
    start: int  # absolute position of ids[0]: the number of ids already computed
    pages: Sequence[int]  # block numbers of the sequence, position 0 onwards
    layout: DraftLayout = field(
        default_factory=DraftLayout.plain
    )  # plain for a prefill chunk that does not reach the root
    adapter: int | None = None  # whose masks the layout's are; None: the checkpoint's own, by their ids


@dataclass(frozen=True)
class GatedRows:
    """The mask rows that one adapter acts on in a step."""

    adapter: int
    slice: slice  # flat row numbers
    masks: Tensor  # [rows] int64: which mask each row is, from 0


# chain rows of all segments            mask rows of all segments                     padding
# [0 ........... num_chain_rows)        [num_chain_rows ........ num_rows)            [num_rows ... R)
#  pending ids, drafts; K, V written     group after group; K, V live in the step;     id 0; writes nothing, unread
#                                        those with ids first, then adapter 0, 1, …
@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one step on the device, and what each of them sees. Built once, shared by all layers."""

    ids: Tensor  # [R] int64; 0 for masks without ids
    positions: Tensor  # [R] int64
    chain_rows: list[range]  # per segment: flat row numbers of its pending ids and drafts
    mask_rows: list[list[range]]  # per segment and group: flat row numbers of the group's masks
    num_chain_rows: int
    num_mask_rows: int
    rows: StepRows
    gated: tuple[GatedRows, ...] = ()  # by adapter, ascending: adjacent, up to num_rows

    @property
    def num_rows(self) -> int:
        """Rows without padding."""
        return self.num_chain_rows + self.num_mask_rows

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        *,
        block_size: int,
        mask_ids: Sequence[int],
        adapter_masks: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """Pack the segments.

        `mask_ids[j-1]` is the id of mask j; `adapter_masks[n]` how many masks adapter n has. Every chain row's position
        must lie in `pages`: a ValueError names the first segment for which that is not so.
        """
        ids: list[int] = []
        positions: list[int] = []
        chain_rows: list[range] = []
        for number, segment in enumerate(segments):
            count, end = len(segment.ids), segment.start + len(segment.ids)
            if count <= segment.layout.num_drafts or end > len(segment.pages) * block_size:
                raise ValueError(
                    f"Segment {number} has {count} chain rows from position {segment.start}, "
                    f"{segment.layout.num_drafts} drafts and {len(segment.pages)} pages of {block_size}: it needs more "
                    f"chain rows than drafts, and a slot for each."
                )
            chain_rows.append(range(len(ids), len(ids) + count))
            ids.extend(segment.ids)
            positions.extend(range(segment.start, end))
        num_chain_rows = len(ids)
        visible = [position + 1 for position in positions]

        group = [-1] * num_chain_rows
        num_groups = 0
        mask_rows: list[list[range]] = [[] for _ in segments]
        mask_runs = [range(0)] * len(segments)
        masks: list[int] = []  # which mask each mask row is, from 0
        bounds: dict[int, range] = {}  # adapter -> its rows
        for number in sorted(range(len(segments)), key=lambda n: -1 if (a := segments[n].adapter) is None else a):
            segment, first = segments[number], len(ids)
            known = len(mask_ids) if segment.adapter is None else adapter_masks[segment.adapter]
            root = segment.start + len(segment.ids) - segment.layout.num_drafts - 1
            of_segment = []
            for g, count in enumerate(segment.layout.masks):
                if count > known:
                    owner = "the checkpoint" if segment.adapter is None else f"adapter {segment.adapter}"
                    raise ValueError(f"Segment {number} lays out {count} masks; {owner} has {known}.")
                of_segment.append(range(len(ids), len(ids) + count))
                ids.extend(mask_ids[:count] if segment.adapter is None else [0] * count)
                masks.extend(range(count))
                positions.extend(range(root + g + 1, root + g + 1 + count))
                visible.extend([root + g + 1] * count)
                group.extend([num_groups] * count)
                num_groups += 1
            mask_rows[number] = of_segment
            mask_runs[number] = range(first, len(ids))
            if segment.adapter is not None and len(ids) > first:
                begun = bounds.get(segment.adapter, range(first, first))
                bounds[segment.adapter] = range(begun.start, len(ids))
        num_rows = len(ids)

        padding = [0] * (-num_rows % ROW_MULTIPLE)
        on_device = torch.tensor([ids + padding, positions + padding], dtype=torch.int64, device=device)
        rows = StepRows(
            positions=np.array(positions, dtype=np.int64),
            visible=np.array(visible, dtype=np.int64),
            chain_runs=chain_rows,
            mask_runs=mask_runs,
            group=np.array(group, dtype=np.int64),
            pages=[segment.pages for segment in segments],
            num_chain_rows=num_chain_rows,
            num_padded=num_rows + len(padding),
            block_size=block_size,
            device=torch.device(device),
        )
        return cls(
            ids=on_device[0],
            positions=on_device[1],
            chain_rows=chain_rows,
            mask_rows=mask_rows,
            num_chain_rows=num_chain_rows,
            num_mask_rows=num_rows - num_chain_rows,
            rows=rows,
            gated=_gated(bounds, masks, num_chain_rows, device) if bounds else (),
        )


def _gated(
    bounds: dict[int, range], masks: list[int], num_chain_rows: int, device: torch.device | str
) -> tuple[GatedRows, ...]:
    of_row = torch.tensor(masks, dtype=torch.int64, device=device)
    return tuple(
        GatedRows(adapter, slice(run.start, run.stop), of_row[run.start - num_chain_rows : run.stop - num_chain_rows])
        for adapter, run in bounds.items()
    )
