"""A step in one compiled call: network, head, the id that each row samples, and the next drafts of the masks.

Between two steps of a model that does not fit the processor's caches, everything that the host reads comes from memory.
So nothing is allocated, and the arrays of the last steps serve the next, in which most sequences only advance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from ctypes import addressof, byref, c_bool, c_int64, pointer
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from space_kernels.attention.cpu_backend import rows_struct
from space_kernels.build.cpu_library import LogitsStruct, NextDraftsStruct
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.paging.step_rows import Ints
from space_kernels.sampling.sampler import sampling_struct
from space_kernels.sampling.sampling_params import BatchSamplingParams
from space_kernels.step.draft_head import (
    DRAFT_SHARPNESS,
    NUM_CANDIDATES,
    NUM_GREEDY_CANDIDATES,
    CompiledDraftHead,
)
from torch import Tensor

from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import BatchPattern, Segment, SegmentShape, batch_pattern, without_room
from space_model.networks.llama_compiled_network import CompiledLlama, unknown_id
from space_model.networks.network import PagedKV

MOST_ROWS = 32
"""Most rows of logits in one step; a row takes 4·V bytes."""

_SPARE_PAGES = 16
"""Columns of the page table beyond those in use, so that a sequence with a new page has room."""

_MOST_KEPT = 8
"""The most row layouts whose buffers are cached; a layout is the chain and mask rows of each sequence in a step."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MaskSource:
    """The masks of a checkpoint, or of an adapter, with their draft head."""

    head: CompiledDraftHead
    mask_ids: tuple[int, ...]  # of a checkpoint's own masks; empty: an adapter's
    num_masks: int  # in a group


class SampledStep:
    """Steps without pending ids: `pack`, then `run`, which returns an id for each chain row and none of the banned
    ones, then `drafts`. The ids' bits are those of the network's forward pass, its head and `sample_rows`."""

    def __init__(
        self,
        network: CompiledLlama,
        head: CompiledLinear,
        vocab_size: int,
        kv: PagedKV,
        banned: Tensor,
        *,
        sources: Mapping[int | None, MaskSource] | None = None,
        head_rows: int = 0,
    ):
        """`head`: [V and padding, hidden] -> logits; `banned` [B] int64; `sources`: by adapter, None for the
        checkpoint's own masks; `head_rows`: of logits of chain and mask rows together, up to which one product is
        cheaper than two. Raises ValueError for a network that ranks share."""
        library = network.whole_library
        if library is None:
            raise ValueError("Ranks compute a network layer after layer.")
        self._network, self._head, self._kv, self._banned = network, head, kv, banned
        self._forward, self._vocab_size = library.forward_sampled, vocab_size
        self._sources, self._head_rows = sources or {}, head_rows
        self._values = torch.empty(MOST_ROWS, head.out_features)  # of logits; memory is used as far as it is written
        self._rows: _Rows | None = None
        self._kept: OrderedDict[tuple[Any, ...], _Rows] = OrderedDict()

    def drafts_for(self, adapter: int | None) -> bool:
        """Return whether `run` drafts from these masks: there is a compiled draft head."""
        return adapter in self._sources

    def num_logits(self, layouts: Sequence[DraftLayout]) -> int:
        """Return how many rows of logits a step with these layouts needs; `pack` supports MOST_ROWS."""
        num_chain = sum([1 + layout.num_drafts for layout in layouts])
        num_masks = sum([layout.num_masks for layout in layouts])
        if num_chain + num_masks <= self._head_rows:
            return num_chain + num_masks
        return num_chain + len(layouts) * max([max(layout.masks) for layout in layouts])

    def pack(self, segments: Sequence[Segment], sampling: BatchSamplingParams) -> None:
        """Lay out the rows of the next `run`: logits of at most MOST_ROWS. Masks are of one source, for which
        `drafts_for` is true; no LoRA acts on the rows. `sampling`: of each segment, without edits and typical-p; the
        same object as long as nothing changes in it. Every row's position must be within `pages`; else a ValueError
        names the first segment."""
        counts = [len(segment.ids) for segment in segments]
        block_size = self._kv.block_size
        layouts = [segment.layout for segment in segments]
        key = (*counts, *([layout.masks for layout in layouts] if any(one.num_masks for one in layouts) else ()))
        rows = self._rows
        most = max([len(one.pages) for one in segments])
        if rows is None or rows.key != key or rows.sampling is not sampling or rows.num_pages < most:
            rows = self._rows = self._laid_out(key, most, segments, sampling)
        ids, starts, pages, positions = rows.ids, rows.starts, rows.pages, rows.positions
        first = farthest = 0
        for number, segment in enumerate(segments):
            start, count = segment.start, counts[number]
            if not count or start + count > len(segment.pages) * block_size:
                raise without_room(number, segment, block_size)
            if segment.pages is not pages[number]:
                rows.take_pages(number, segment.pages)
            starts[number] = start
            if count == 1:
                ids[first] = segment.ids[0]
            else:
                ids[first : first + count] = [*segment.ids]
            if positions is not None:
                positions[first : first + count] = range(start + 1, start + count + 1)
            first += count
            farthest = max(farthest, start + count + max(segment.layout.masks))
        rows.num_positions = farthest

    def run(self) -> list[int] | None:
        """Compute the rows: their K and V are in the pages, and the ids of chain rows are returned; None where one of
        them has no valid id, for NaN or because every id is banned. Raises IndexError for an id without an
        embedding."""
        rows = self._rows
        assert rows is not None
        network = self._network.struct(self._kv, rows.num_positions)
        if rows.low is not None:
            rows.low.zero_()
        num_valid = self._forward(byref(network), *rows.arguments, torch.get_num_threads())
        if num_valid < 0:
            raise unknown_id(network)
        return rows.chosen[:] if num_valid == len(rows.chosen) else None

    @property
    def pattern(self) -> BatchPattern:
        """Return the layout of the rows of the last `pack`."""
        assert self._rows is not None
        return self._rows.pattern

    @property
    def hidden(self) -> Tensor:
        """Return [R, hidden] after the final norm, of the rows of the last `run`; the next one overwrites it."""
        assert self._rows is not None
        return self._rows.hidden

    def drafts(self) -> list[list[int]]:
        """Return the next drafts of each segment of the last `run`, as many as its masks give behind the drafts that it
        accepted."""
        rows = self._rows
        assert rows is not None
        most, drafts = rows.most_masks, rows.drafts[:]
        return [drafts[n * most : n * most + count] for n, count in enumerate(rows.num_drafts)]

    def _laid_out(
        self, key: tuple[Any, ...], most_pages: int, segments: Sequence[Segment], sampling: BatchSamplingParams
    ) -> _Rows:
        """Return rows of this pattern; all of the segments are still to be filled in."""
        rows = self._kept.pop(key, None)
        if rows is None or rows.sampling is not sampling or rows.num_pages < most_pages:
            rows = _Rows(self, key, segments, sampling, most_pages + _SPARE_PAGES)
        self._kept[key] = rows
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return rows


class _Rows:
    """The rows of steps with equal layouts, and the buffers of their computation."""

    def __init__(
        self,
        step: SampledStep,
        key: tuple[Any, ...],
        segments: Sequence[Segment],
        sampling: BatchSamplingParams,
        num_pages: int,
    ) -> None:
        layouts = [segment.layout for segment in segments]
        adapter = next((segment.adapter for segment in segments if segment.layout.num_masks), None)
        source = step._sources.get(adapter) if any(layout.num_masks for layout in layouts) else None
        counts = [len(segment.ids) for segment in segments]
        num_logits = step.num_logits(layouts) if source is not None else sum(counts)
        if num_logits > MOST_ROWS:
            raise ValueError(f"A step in one call has at most {MOST_ROWS} rows; got {num_logits}.")
        pattern = _pattern(counts, layouts, adapter, source)
        num_rows, num_sequences = pattern.rows.num_chain_rows, len(counts)
        self.key, self.sampling, self.num_pages, self.num_positions = key, sampling, num_pages, 0
        self.positions: Ints | None = None  # of the sampled tokens; None: the greatest ids are wanted
        samples: Any = None
        arrays: tuple[np.ndarray[Any, Any], ...] = ()
        if not sampling.is_plain_argmax:
            self.positions = np.zeros(num_rows, dtype=np.int64)
            of_rows = [params for params, count in zip(sampling, counts, strict=True) for _ in range(count)]
            struct, arrays = sampling_struct(of_rows, self.positions)
            samples = byref(struct)
        self.ids, self.chosen = (c_int64 * pattern.rows.num_padded)(), (c_int64 * num_rows)()
        self.ids[num_rows:] = pattern.mask_ids.tolist()
        self.starts = (c_int64 * num_sequences)()
        self.pages: list[Sequence[int] | Ints | None] = [None] * num_sequences  # as `_table` has them
        self._table = (c_int64 * (num_sequences * num_pages))()
        valid = (c_bool * num_rows)()
        rows = rows_struct(pattern.rows, addressof(self.starts), addressof(self._table), num_pages)
        network, head, banned = step._network, step._head, step._banned
        buffers, *tensors = network.buffers(network.struct(step._kv, 0), addressof(self.ids), pattern.rows.num_padded)
        self.pattern, self.hidden = pattern, tensors[-1]
        self.low = network.gate(buffers, pattern, tensors)  # [rows, A·x of mask rows]; None: there are no such rows
        logits = LogitsStruct(
            step._values.data_ptr(), num_rows, head.out_features, step._vocab_size, banned.data_ptr(), len(banned)
        )
        self.most_masks = max([max(layout.masks) for layout in layouts])
        self.drafts, self.num_drafts = (c_int64 * (num_sequences * self.most_masks))(), (c_int64 * num_sequences)()
        drafting: Any = None
        if source is not None:
            joined = num_logits == num_rows + pattern.num_mask_rows
            drafting = byref(self._next(source, pattern, layouts, joined=joined, vocab_size=step._vocab_size))
        self.arguments: tuple[Any, ...] = (
            *(byref(rows), byref(buffers), byref(head.struct), byref(logits), samples, drafting),
            *(addressof(self.chosen), addressof(valid)),
        )
        self._held = tensors, valid, banned, arrays  # what the structs point to, beside the pattern

    def _next(
        self,
        source: MaskSource,
        pattern: BatchPattern,
        layouts: Sequence[DraftLayout],
        *,
        joined: bool,
        vocab_size: int,
    ) -> NextDraftsStruct:
        """Return the C struct of the drafts of the next step."""
        first, count = np.zeros((2, pattern.rows.num_chain_rows), dtype=np.int64)
        for layout, chain, groups in zip(layouts, pattern.chain_rows, pattern.mask_rows, strict=True):
            for accepted, row in enumerate(chain):
                choice = layout.next_drafts(accepted)
                if choice is not None:
                    first[row], count[row] = groups[choice.group].start + choice.first_mask - 1, choice.num_drafts
        bounds = np.array([*accumulate(map(len, pattern.chain_rows), initial=0)], dtype=np.int64)
        unread = np.zeros(len(layouts), dtype=np.int64)
        sampling, arrays = sampling_struct(self.sampling, unread)
        self._arrays = first, count, bounds, arrays
        return NextDraftsStruct(
            pointer(source.head.struct),
            len(layouts),
            min(NUM_CANDIDATES, vocab_size),
            min(NUM_GREEDY_CANDIDATES, vocab_size),
            self.most_masks,
            bounds.ctypes.data,
            first.ctypes.data,
            count.ctypes.data,
            joined,
            None if self.positions is None else pointer(sampling),
            DRAFT_SHARPNESS,
            addressof(self.drafts),
            addressof(self.num_drafts),
        )

    def take_pages(self, number: int, pages: Sequence[int] | Ints) -> None:
        """Write the pages of a sequence into the table. An array of pages never changes; a list may have grown."""
        begin = number * self.num_pages
        self._table[begin : begin + len(pages)] = [int(page) for page in pages]
        self.pages[number] = pages if isinstance(pages, np.ndarray) else None


def _pattern(
    counts: Sequence[int], layouts: Sequence[DraftLayout], adapter: int | None, source: MaskSource | None
) -> BatchPattern:
    """Return the pattern of these rows; where there are no masks, drafts are rows like pending ids."""
    shapes: list[SegmentShape] = [(count, DraftLayout.plain(), None, None) for count in counts]
    if source is not None:
        shapes = [(count, layout, adapter, None) for count, layout in zip(counts, layouts, strict=True)]
    runs = tuple((shape, len([*alike])) for shape, alike in groupby(shapes))
    adapter_masks = () if source is None or adapter is None else (0,) * adapter + (source.num_masks,)
    return batch_pattern(runs, () if source is None else source.mask_ids, adapter_masks, _CPU)
