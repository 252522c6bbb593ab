"""The packed rows of one step: all sequences' pending ids, drafts and masks in one flat dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby

import numpy as np
import torch
from space_kernels.paging.step_rows import Ints, RowPattern, StepRows, StepTables
from torch import Tensor

from space_model.geometry.draft_layout import DraftLayout

ROW_MULTIPLE = 4  # the number of rows is padded to a multiple of this: smaller matmuls sum in another order (measured)
SegmentShape = tuple[int, DraftLayout, int | None, int | None]
"""A segment's number of chain rows, its layout, its adapter and its LoRA."""

ShapeRun = tuple[SegmentShape, int]
"""A shape and the number of consecutive segments with it; most steps have a single run."""


@dataclass(frozen=True)
class GatedRows:
    """The mask rows of one adapter in a step."""

    adapter: int
    slice: slice  # flat row numbers
    masks: Tensor  # [rows] int64: each row's mask, from 0


@dataclass(frozen=True)
class LoraRows:
    """Rows of sequences with one LoRA in a step: chain rows, or mask rows."""

    lora: int
    slice: slice  # flat row numbers


@dataclass(frozen=True, eq=False)
class BatchPattern:
    """The row layout shared by steps with equal segment shapes."""

    rows: RowPattern
    chain_rows: list[range]  # per segment: flat row numbers of its pending ids and drafts
    mask_rows: list[list[range]]  # per segment and group: flat row numbers of the group's masks
    mask_ids: Ints  # [mask rows and padding] mask ids; 0 for masks without ids
    gated: tuple[GatedRows, ...]  # ascending by adapter; contiguous, up to the last mask row
    loras: tuple[LoraRows, ...]  # ascending, disjoint; a mask row may be in one of `gated`, too

    @property
    def num_mask_rows(self) -> int:
        """Return the number of mask rows of all segments."""
        return len(self.rows.offsets) - self.rows.num_chain_rows


@lru_cache(maxsize=64)
def batch_pattern(
    runs: tuple[ShapeRun, ...], mask_ids: tuple[int, ...], adapter_masks: tuple[int, ...], device: torch.device
) -> BatchPattern:
    """Lay out segments of these shapes. Raises ValueError for more masks than the checkpoint or adapter has."""
    shapes = [shape for shape, count in runs for _ in range(count)]
    chain_rows: list[range] = []
    offsets: list[int] = []
    loras: list[LoraRows] = []
    for num_chain, _, _, lora in shapes:
        chain_rows.append(range(len(offsets), len(offsets) + num_chain))
        offsets.extend(range(num_chain))
        _add_rows(loras, lora, chain_rows[-1])
    num_chain_rows = len(offsets)
    reach = [offset + 1 for offset in offsets]
    group = [-1] * num_chain_rows
    ids: list[int] = []
    num_groups = 0
    mask_rows: list[list[range]] = [[] for _ in shapes]
    mask_runs = [range(0)] * len(shapes)
    masks: list[int] = []  # each mask row's mask, from 0
    bounds: dict[int, range] = {}  # adapter -> its rows
    for number in sorted(range(len(shapes)), key=lambda n: tuple(-1 if a is None else a for a in shapes[n][2:])):
        (num_chain, layout, adapter, lora), first = shapes[number], len(offsets)
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
        _add_rows(loras, lora, mask_runs[number])
        if adapter is not None and len(offsets) > first:
            begun = bounds.get(adapter, range(first, first))
            bounds[adapter] = range(begun.start, len(offsets))
    num_padded = len(offsets) + -len(offsets) % ROW_MULTIPLE
    of_row = [np.array(values, dtype=np.int64) for values in (offsets, reach, group)]
    drafts = np.array([layout.num_drafts for _, layout, _, _ in shapes], dtype=np.int64)
    rows = RowPattern(chain_rows, mask_runs, of_row[0], of_row[1], of_row[2], num_chain_rows, num_padded, drafts=drafts)
    padded_ids = np.array(ids + [0] * (num_padded - len(offsets)), dtype=np.int64)
    gated: list[GatedRows] = []
    if bounds:
        mask_of_row = torch.tensor(masks, dtype=torch.int64, device=device)
        for adapter, run in bounds.items():
            own = mask_of_row[run.start - num_chain_rows : run.stop - num_chain_rows]
            gated.append(GatedRows(adapter, slice(run.start, run.stop), own))
    return BatchPattern(rows, chain_rows, mask_rows, padded_ids, tuple(gated), tuple(loras))


def _add_rows(loras: list[LoraRows], lora: int | None, rows: range) -> None:
    """Add rows of one LoRA, or of none, behind those before."""
    if lora is None or not rows:
        return
    last = loras[-1] if loras else None
    if last is not None and last.lora == lora and last.slice.stop == rows.start:
        loras[-1] = LoraRows(lora, slice(last.slice.start, rows.stop))
    else:
        loras.append(LoraRows(lora, slice(rows.start, rows.stop)))


__all__ = ["ForwardBatch", "GatedRows", "LoraRows", "Segment"]


@dataclass(slots=True)
class Segment:
    """One sequence's rows in one step: pending ids, drafts, masks. Pending ids are not computed yet; the last is the
    root if it ends the known ids."""

    ids: Sequence[int]  # chain rows: pending ids, then the drafts (layout.num_drafts of them)
    start: int  # absolute position of ids[0]: the number of ids already computed
    pages: Sequence[int] | Ints  # block numbers of the sequence, from position 0 on
    layout: DraftLayout = field(
        default_factory=DraftLayout.plain
    )  # plain for a prefill chunk that does not reach the root
    adapter: int | None = None  # the adapter that the masks belong to; None: the checkpoint's own masks, by id
    owner: int | None = None  # sequence number, under which its pages are cached between steps; None: not cached
    lora: int | None = None  # number of the LoRA that acts on all its rows; None: the weights alone
    state: int = 0  # slot of its recurrent states, where layers have some
    is_long: bool = False  # has the rotary angles of a long sequence (LongRoPE)


def without_room(number: int, segment: Segment, block_size: int) -> ValueError:
    """Return the error of segment `number`, which has too few chain rows or slots."""
    return ValueError(
        f"Segment {number} has {len(segment.ids)} chain rows from position {segment.start}, "
        f"{segment.layout.num_drafts} drafts and {len(segment.pages)} pages of {block_size}: it needs more "
        f"chain rows than drafts, and a slot for each."
    )


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
    long_rows: Tensor | None = None  # [R] bool: rows with the rotary angles of long sequences; None: no row has

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
    def loras(self) -> tuple[LoraRows, ...]:
        """Return the rows that LoRAs act on, ascending."""
        return self.pattern.loras

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
        positions. ids and positions [R], R padded. Only attention that reads `StepTables` supports such a batch."""
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
        """Pack the segments. `mask_ids[j-1]` is the id of mask j; `adapter_masks[n]` adapter n's number of masks. Every
        chain row's position must be within `pages`; else a ValueError names the first segment."""
        shapes: list[SegmentShape] = []
        for number, segment in enumerate(segments):
            count, layout = len(segment.ids), segment.layout
            if count <= layout.num_drafts or segment.start + count > len(segment.pages) * block_size:
                raise without_room(number, segment, block_size)
            shapes.append((count, layout, segment.adapter, segment.lora))
        runs = tuple((shape, len([*alike])) for shape, alike in groupby(shapes))
        device = torch.device(device)
        pattern = batch_pattern(runs, tuple(mask_ids), tuple(adapter_masks), device)
        starts = np.array([segment.start for segment in segments], dtype=np.int64)
        states = np.array([segment.state for segment in segments], dtype=np.int64)
        rows = StepRows(
            pattern.rows, starts, [segment.pages for segment in segments], block_size, device, states=states
        )
        num_chain_rows, num_rows = pattern.rows.num_chain_rows, len(pattern.rows.offsets)
        packed = np.zeros((2, pattern.rows.num_padded), dtype=np.int64)  # ids, positions
        ids_of_chains = chain.from_iterable([segment.ids for segment in segments])
        packed[0, :num_chain_rows] = np.fromiter(ids_of_chains, np.int64, num_chain_rows)
        packed[0, num_chain_rows:] = pattern.mask_ids
        packed[1, :num_rows] = rows.positions
        ids, positions = (torch.from_numpy(row) for row in packed)
        if device.type != "cpu":
            ids, positions = torch.from_numpy(packed).to(device).unbind()  # one copy
        long_rows = _long_rows(segments, pattern, device) if any(one.is_long for one in segments) else None
        return cls(ids, positions, pattern, rows, segments, long_rows)


def _long_rows(segments: Sequence[Segment], pattern: BatchPattern, device: torch.device) -> Tensor:
    """Return [R] bool: the rows of long segments."""
    found = np.zeros(pattern.rows.num_padded, dtype=np.bool_)
    for segment, chain_rows, groups in zip(segments, pattern.chain_rows, pattern.mask_rows, strict=True):
        for rows in (chain_rows, *groups):
            found[rows.start : rows.stop] = segment.is_long
    return torch.from_numpy(found).to(device)
