"""The packed rows of one step: all sequences' pending ids, drafts and masks in one flat dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

import numpy as np
import torch
from space_kernels.paging.step_rows import Ints, StepRows
from space_kernels.paging.step_tables import StepTables
from torch import Tensor

from space_model.geometry.batch_pattern import BatchPattern, GatedRows, SegmentShape, batch_pattern
from space_model.geometry.draft_layout import DraftLayout

__all__ = ["ForwardBatch", "GatedRows", "Segment"]


@dataclass(slots=True)
class Segment:
    """One sequence's rows in one step: pending ids, drafts, masks.

    Pending ids are not computed yet; the last is the root if it ends the known ids.
    """

    ids: Sequence[int]  # chain rows: pending ids, then the drafts (layout.num_drafts of them)
    start: int  # absolute position of ids[0]: the number of ids already computed
    pages: Sequence[int] | Ints  # block numbers of the sequence, from position 0 on
    layout: DraftLayout = field(
        default_factory=DraftLayout.plain
    )  # plain for a prefill chunk that does not reach the root
    adapter: int | None = None  # the adapter that the masks belong to; None: the checkpoint's own masks, by id
    owner: int | None = None  # sequence number, under which its pages are cached between steps; None: not cached


# chain rows of all segments            mask rows of all segments                     padding
# [0 ........... num_chain_rows)        [num_chain_rows ........ num_rows)            [num_rows ... R)
#  pending ids, drafts; K, V written     group after group; K, V live in the step;     id 0; writes nothing, unread
#                                        those with ids first, then adapter 0, 1, …
@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one step on the device, and their attention masks. Built once, shared by all layers."""

    ids: Tensor  # [R] int64; 0 for masks without ids
    positions: Tensor  # [R] int64
    pattern: BatchPattern
    rows: StepRows
    segments: Sequence[Segment] = ()  # the packed segments

    @property
    def chain_rows(self) -> list[range]:
        """Return each segment's chain rows: flat row numbers of its pending ids and drafts."""
        return self.pattern.chain_rows

    @property
    def mask_rows(self) -> list[list[range]]:
        """Return the flat row numbers of the masks, by segment and group."""
        return self.pattern.mask_rows

    @property
    def gated(self) -> tuple[GatedRows, ...]:
        """Return the adapters' mask rows, ascending by adapter: contiguous, up to num_rows."""
        return self.pattern.gated

    @property
    def num_chain_rows(self) -> int:
        """Return the number of pending ids and drafts."""
        return self.pattern.rows.num_chain_rows

    @property
    def num_mask_rows(self) -> int:
        """Return the number of masks."""
        return self.pattern.num_mask_rows

    @property
    def num_rows(self) -> int:
        """Return the number of rows without padding."""
        return len(self.pattern.rows.offsets)

    @classmethod
    def of_tensors(cls, ids: Tensor, positions: Tensor, pattern: BatchPattern, tables: StepTables) -> ForwardBatch:
        """Build a batch from rows laid out on the device, in the pattern's order; the host does not know their
        positions.

        ids and positions [R], R padded. Only attention that reads `StepTables` supports such a batch.
        """
        return cls(ids=ids, positions=positions, pattern=pattern, rows=tables.as_rows(pattern.rows))

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

        `mask_ids[j-1]` is the id of mask j; `adapter_masks[n]` adapter n's number of masks. Every chain row's position
        must be within `pages`; else a ValueError names the first segment.
        """
        shapes: list[SegmentShape] = []
        for number, segment in enumerate(segments):
            count, layout = len(segment.ids), segment.layout
            if count <= layout.num_drafts or segment.start + count > len(segment.pages) * block_size:
                raise ValueError(
                    f"Segment {number} has {count} chain rows from position {segment.start}, "
                    f"{layout.num_drafts} drafts and {len(segment.pages)} pages of {block_size}: it needs more "
                    f"chain rows than drafts, and a slot for each."
                )
            shapes.append((count, layout, segment.adapter))
        runs = tuple((shape, len([*alike])) for shape, alike in groupby(shapes))
        device = torch.device(device)
        pattern = batch_pattern(runs, tuple(mask_ids), tuple(adapter_masks), device)
        rows = StepRows(
            pattern=pattern.rows,
            starts=np.array([segment.start for segment in segments], dtype=np.int64),
            pages=[segment.pages for segment in segments],
            block_size=block_size,
            device=device,
        )
        num_chain_rows, num_rows = pattern.rows.num_chain_rows, len(pattern.rows.offsets)
        packed = np.zeros((2, pattern.rows.num_padded), dtype=np.int64)  # ids, positions
        ids_of_chains = chain.from_iterable([segment.ids for segment in segments])
        packed[0, :num_chain_rows] = np.fromiter(ids_of_chains, np.int64, num_chain_rows)
        packed[0, num_chain_rows:] = pattern.mask_ids
        packed[1, :num_rows] = rows.positions
        ids, positions = torch.from_numpy(packed).to(device).unbind()
        return cls(ids=ids, positions=positions, pattern=pattern, rows=rows, segments=segments)
