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


# chain rows of all segments            mask rows of all segments                     padding
# [0 ........... num_chain_rows)        [num_chain_rows ........ num_rows)            [num_rows ... R)
#  pending ids, drafts; K, V written     group after group; K, V live in the step      id 0; writes nothing, unread
@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one step on the device, and what each of them sees. Built once, shared by all layers."""

    ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    chain_rows: list[range]  # per segment: flat row numbers of its pending ids and drafts
    mask_rows: list[list[range]]  # per segment and group: flat row numbers of the group's masks
    num_chain_rows: int
    num_mask_rows: int
    rows: StepRows

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
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """Pack the segments.

        `mask_ids[j-1]` is the id of mask j. Every chain row's position must lie in `pages`: a ValueError names the
        first segment for which that is not so.
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
        mask_rows: list[list[range]] = []
        mask_runs: list[range] = []
        for number, segment in enumerate(segments):
            first = len(ids)
            root = segment.start + len(segment.ids) - segment.layout.num_drafts - 1
            of_segment = []
            for g, count in enumerate(segment.layout.masks):
                if count > len(mask_ids):
                    raise ValueError(f"Segment {number} lays out {count} masks; the checkpoint has {len(mask_ids)}.")
                of_segment.append(range(len(ids), len(ids) + count))
                ids.extend(mask_ids[:count])
                positions.extend(range(root + g + 1, root + g + 1 + count))
                visible.extend([root + g + 1] * count)
                group.extend([num_groups] * count)
                num_groups += 1
            mask_rows.append(of_segment)
            mask_runs.append(range(first, len(ids)))
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
        )
