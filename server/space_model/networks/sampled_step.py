"""A step without masks in one compiled call: network, head, and the id that each row samples.

Between two steps of a model that does not fit the processor's caches, everything that the host reads comes from memory.
So nothing is allocated, and the arrays of the last step serve the next, in which most sequences only advance by an id.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_bool, c_int64
from itertools import groupby
from typing import Any

import numpy as np
import torch
from space_kernels.attention.cpu_backend import rows_struct
from space_kernels.build.cpu_library import LogitsStruct
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.paging.step_rows import Ints
from space_kernels.sampling.sampler import sampling_struct
from space_kernels.sampling.sampling_params import BatchSamplingParams
from torch import Tensor

from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import BatchPattern, Segment, batch_pattern, without_room
from space_model.networks.llama_compiled_network import CompiledLlama, unknown_id
from space_model.networks.network import PagedKV

MOST_ROWS = 32
"""Most rows of a step: the buffer of logits takes V · 4 bytes a row."""

_SPARE_PAGES = 16
"""Columns of the page table beyond those in use, so that a sequence with a new page has room."""

_CPU = torch.device("cpu")


class SampledStep:
    """Steps of chain rows alone: `pack`, then `run`, which returns an id for each row and none of the banned ones. Its
    bits are those of the network's forward pass, its head and `sample_rows`."""

    def __init__(self, network: CompiledLlama, head: CompiledLinear, vocab_size: int, kv: PagedKV, banned: Tensor):
        """`head`: [V and padding, hidden] -> logits; `banned` [B] int64. Raises ValueError for a network that ranks
        share."""
        library = network.whole_library
        if library is None:
            raise ValueError("Ranks compute a network layer after layer.")
        self._network, self._head, self._kv, self._banned = network, head, kv, banned
        self._forward, self._vocab_size = library.forward_sampled, vocab_size
        self._rows: _Rows | None = None

    def pack(self, segments: Sequence[Segment], sampling: BatchSamplingParams) -> None:
        """Lay out the rows of the next `run`: at most MOST_ROWS. Their layouts have no masks, and no LoRA acts on them.
        `sampling`: of each segment, without edits and typical-p; the same object as long as nothing changes in it.
        Every row's position must be within `pages`; else a ValueError names the first segment."""
        counts = [len(segment.ids) for segment in segments]
        block_size = self._kv.block_size
        rows = self._rows
        most = max([len(one.pages) for one in segments])
        if rows is None or rows.counts != counts or rows.sampling is not sampling or rows.num_pages < most:
            rows = self._rows = self._laid_out(most, counts, sampling)
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
            farthest = max(farthest, start + count)
        rows.num_positions = farthest

    def run(self) -> list[int] | None:
        """Compute the rows: their K and V are in the pages, and their ids are returned; None where one of them has no
        valid id, for NaN or because every id is banned. Raises IndexError for an id without an embedding."""
        rows = self._rows
        assert rows is not None
        network = self._network.struct(self._kv, rows.num_positions)
        num_valid = self._forward(byref(network), *rows.arguments, torch.get_num_threads())
        if num_valid < 0:
            raise unknown_id(network)
        return rows.chosen[:] if num_valid == len(rows.chosen) else None

    def _laid_out(self, most_pages: int, counts: list[int], sampling: BatchSamplingParams) -> _Rows:
        """Return rows in these numbers; all of the segments are still to be filled in."""
        runs = tuple(((count, DraftLayout.plain(), None, None), len([*alike])) for count, alike in groupby(counts))
        return _Rows(self, batch_pattern(runs, (), (), _CPU), counts, sampling, most_pages + _SPARE_PAGES)


class _Rows:
    """The rows of consecutive steps with equal numbers of rows, and the buffers of their computation."""

    def __init__(
        self,
        step: SampledStep,
        pattern: BatchPattern,
        counts: list[int],
        sampling: BatchSamplingParams,
        num_pages: int,
    ) -> None:
        num_rows, num_sequences = pattern.rows.num_chain_rows, len(counts)
        if num_rows > MOST_ROWS:
            raise ValueError(f"A step in one call has at most {MOST_ROWS} rows; got {num_rows}.")
        self.counts, self.sampling, self.num_pages, self.num_positions = counts, sampling, num_pages, 0
        self.positions: Ints | None = None  # of the sampled tokens; None: the greatest ids are wanted
        samples: Any = None
        arrays: tuple[np.ndarray[Any, Any], ...] = ()
        if not sampling.is_plain_argmax:
            self.positions = np.zeros(num_rows, dtype=np.int64)
            of_rows = [params for params, count in zip(sampling, counts, strict=True) for _ in range(count)]
            struct, arrays = sampling_struct(of_rows, self.positions)
            samples = byref(struct)
        self.ids, self.chosen = (c_int64 * num_rows)(), (c_int64 * num_rows)()
        self.starts = (c_int64 * num_sequences)()
        self.pages: list[Sequence[int] | Ints | None] = [None] * num_sequences  # as `_table` has them
        self._table = (c_int64 * (num_sequences * num_pages))()
        valid = (c_bool * num_rows)()
        rows = rows_struct(pattern.rows, addressof(self.starts), addressof(self._table), num_pages)
        network, head = step._network, step._head
        buffers, *tensors = network.buffers(network.struct(step._kv, 0), addressof(self.ids), pattern.rows.num_padded)
        values = torch.empty(num_rows, head.out_features)
        banned = step._banned
        logits = LogitsStruct(
            values.data_ptr(), num_rows, head.out_features, step._vocab_size, banned.data_ptr(), len(banned)
        )
        self.arguments: tuple[Any, ...] = (
            *(byref(rows), byref(buffers), byref(head.struct), byref(logits), samples),
            *(addressof(self.chosen), addressof(valid)),
        )
        self._held = pattern, tensors, values, valid, banned, arrays  # what the structs point to

    def take_pages(self, number: int, pages: Sequence[int] | Ints) -> None:
        """Write the pages of a sequence into the table. An array of pages never changes; a list may have grown."""
        begin = number * self.num_pages
        self._table[begin : begin + len(pages)] = [int(page) for page in pages]
        self.pages[number] = pages if isinstance(pages, np.ndarray) else None
