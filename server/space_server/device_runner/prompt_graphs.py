"""The forward pass of small prompts, in shapes that are few enough to be captured as CUDA graphs.

Kernel by kernel, a prompt of 50 tokens takes as long as one of 500: the host's launches are the cost. Up to about 128
rows a step mostly reads the weights, so rows of padding are cheap. Prompts are padded to one of a few buckets, and each
is laid out as two sequences on the same pages:

    [c_0 … c_m-1 | padding]   the rows before the last, of which m write keys and values
    [root | M_1 … M_k]        the last row, and the masks behind it

The root is a sequence of its own, so that it and its masks have fixed rows and offsets whatever m is: padding in front
of them would shift windows, and the keys that a library's attention counts from the end of a chain. All chain rows
store their keys and values before any row attends. Masks are laid out whole or not at all: a mask sees those before it
alone, so further ones change no row's bits, and there are two kinds per bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from space_kernels.paging.step_rows import PatternTables, StepTables
from space_kernels.sampling.device_sampling import send
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import BatchPattern, ForwardBatch, batch_pattern
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from torch import Tensor

from space_server.device_runner.device_forward import round_up_pages
from space_server.model_runner import StepModel

PROMPT_BUCKETS = ((1, 16), (1, 32), (1, 64), (4, 16), (1, 128), (4, 32))
"""Prompts, and rows of each before its last: the first that holds a step's is used. Doubling bounds the padding to half
of the rows; beyond 128 rows arithmetic takes as long as reading the weights, and padding would cost."""

_ALIGNED = 4  # values of 32 bits; kernels are compiled for pointers that are aligned to 16 bytes


@dataclass(frozen=True, slots=True)
class PromptKind:
    """Everything that determines the shapes of prompts' forward pass: the key of a CUDA graph."""

    num_prompts: int  # padded
    num_rows: int  # of each, before its last; padded
    num_pages: int  # page-table entries of each that attention reads
    num_masks: int = 0  # behind the last row of each
    adapter: int | None = None  # of the masks; None: the checkpoint's own

    def __str__(self) -> str:
        return (
            f"{self.num_prompts} prompts of at most {self.num_rows + 1} rows and {self.num_masks} masks, with "
            f"{self.num_pages} pages"
        )


class PromptForward:
    """Runs small prompts through the network from buffers at fixed addresses.
    `send` fills them, `take` is what a graph captures, and `hidden` returns what it found."""

    def __init__(self, model: StepModel, kv: PagedKV, *, max_pages: int) -> None:
        """`max_pages`: of a sequence."""
        self._model, self._kv, self._max_pages = model, kv, max_pages
        facts = self._facts = model.facts
        self._pattern = lru_cache(maxsize=None)(self._new_pattern)  # CUDA graphs read its tensors, so none is evicted
        most_masks = max(_num_masks(facts, adapter) for adapter in (None, *range(len(facts.adapters))))
        most_rows = max(prompts * (rows + 1 + most_masks) for prompts, rows in PROMPT_BUCKETS) + _ALIGNED
        most_prompts = max(prompts for prompts, _ in PROMPT_BUCKETS)
        tables = 2 * most_prompts * (max_pages + 2) + 3 * _ALIGNED
        self._inputs = torch.zeros(3 * most_rows + tables, dtype=torch.int32, device=facts.device)
        self._hidden = torch.zeros(most_rows, facts.hidden_size, dtype=facts.dtype, device=facts.device)
        self._nothing = torch.zeros(0, dtype=torch.int32, device=facts.device)

    def _new_pattern(self, num_prompts: int, num_rows: int, num_masks: int, adapter: int | None) -> BatchPattern:
        """Lay out the prompts' rows before the last, then the last of each with its masks."""
        facts = self._facts
        before = (num_rows, DraftLayout.plain(), None, None), num_prompts
        last = (1, DraftLayout.full(0, num_masks), adapter, None), num_prompts
        adapter_masks = tuple(one.num_masks for one in facts.adapters)
        return batch_pattern((before, last), facts.mask_ids, adapter_masks, facts.device)

    def _pattern_of(self, kind: PromptKind) -> BatchPattern:
        return self._pattern(kind.num_prompts, kind.num_rows, kind.num_masks, kind.adapter)

    def kind_of(self, batch: ForwardBatch) -> PromptKind | None:
        """Return the smallest kind that holds these segments. None: they are too many or too long, none has pending ids
        before its last, or some have drafts, LoRAs, rotary angles of their own, or masks of different adapters."""
        segments = batch.segments
        most = max((len(one.ids) for one in segments), default=0) - 1
        if most < 1 or any(one.layout.num_drafts or one.lora is not None or one.is_long for one in segments):
            return None
        fitting = (one for one in PROMPT_BUCKETS if one[0] >= len(segments) and one[1] >= most)
        bucket = next(fitting, None)
        adapters = {one.adapter for one in segments if one.layout.num_masks}
        if bucket is None or len(adapters) > 1:
            return None
        used = max(-(-(one.start + len(one.ids)) // self._kv.block_size) for one in segments)
        return self.kind(bucket, used, adapters)

    def kind(self, bucket: tuple[int, int], num_pages: int, adapters: set[int | None]) -> PromptKind:
        """Return the kind of a bucket. `adapters`: of its masks, at most one; empty: there are no masks."""
        adapter = next(iter(adapters), None)
        num_masks = _num_masks(self._facts, adapter) if adapters else 0
        return PromptKind(*bucket, round_up_pages(num_pages, self._max_pages), num_masks, adapter)

    @property
    def largest(self) -> list[PromptKind]:
        """The kinds that use most memory: of most rows, and of the longest prompt."""
        facts, adapters = self._facts, set[int | None]()
        if facts.most_masks:
            all_adapters = (None, *range(len(facts.adapters)))
            adapters.add(max(all_adapters, key=lambda one: _num_masks(facts, one)))
        most_rows = max(PROMPT_BUCKETS, key=lambda one: (one[0] * one[1], one[0]))
        longest = max(PROMPT_BUCKETS, key=lambda one: one[1])
        return [self.kind(bucket, self._max_pages, adapters) for bucket in (most_rows, longest)]

    def clear(self) -> None:
        """Forget the prompts sent last: until the next are, `take` computes no row of a prompt and writes nothing."""
        self._inputs.zero_()

    def send(self, batch: ForwardBatch, kind: PromptKind) -> None:
        """Send the segments of a step, in one asynchronous copy."""
        pattern, segments = self._pattern_of(kind), batch.segments
        num_prompts, block_size, last = kind.num_prompts, self._kv.block_size, self._facts.window - 1
        end = self._end(kind)
        inputs = torch.zeros(end + batch.pattern.rows.num_padded, dtype=torch.int32)
        ids, positions, starts, written, table = (part.numpy() for part in self._split(inputs, kind))
        index = inputs[end:].numpy()  # row of `batch` -> row of `pattern`
        ids[pattern.rows.num_chain_rows :] = pattern.mask_ids
        for number, segment in enumerate(segments):
            count, root = len(segment.ids) - 1, num_prompts * kind.num_rows + number
            first, at = number * kind.num_rows, segment.start + len(segment.ids) - 1
            ids[first : first + count], ids[root] = segment.ids[:count], segment.ids[count]
            positions[first : first + kind.num_rows] = np.arange(segment.start, segment.start + kind.num_rows)
            masks = pattern.mask_rows[num_prompts + number][0]
            positions[root], positions[masks.start : masks.stop] = at, np.arange(at + 1, at + 1 + len(masks))
            starts[number], starts[num_prompts + number] = segment.start, at
            written[number], written[num_prompts + number] = count, 1
            pages = segment.pages[: -(-(at + 1) // block_size)]
            table[number, : len(pages)] = table[num_prompts + number, : len(pages)] = pages
            chain = batch.chain_rows[number]
            index[chain.start : chain.stop - 1], index[chain.stop - 1] = np.arange(first, first + count), root
            for rows in batch.mask_rows[number]:
                index[rows.start : rows.stop] = np.arange(masks.start, masks.start + len(rows))
        np.minimum(positions, last, out=positions)  # of padding, and of masks that are not asked for
        send(self._inputs[: len(inputs)], inputs)

    @torch.inference_mode()
    def take(self, kind: PromptKind) -> Tensor:
        """Run what was sent; `hidden` tells the result. Returns an empty tensor."""
        pattern = self._pattern_of(kind)
        ids, positions, starts, written, table = self._split(self._inputs, kind)
        on_device = PatternTables.of(pattern.rows, self._inputs.device)
        tables = StepTables(on_device, starts, table, self._kv.block_size, written)
        batch = ForwardBatch.of_tensors(ids.long(), positions.long(), pattern, tables)
        found = self._model.forward(batch, self._kv)
        self._hidden[: len(found)].copy_(found)
        return self._nothing

    def hidden(self, batch: ForwardBatch, kind: PromptKind) -> Tensor:
        """Return [R, hidden] of the step's rows; padding rows hold any values."""
        end = self._end(kind)
        return self._hidden.index_select(0, self._inputs[end : end + batch.pattern.rows.num_padded])

    def _split(self, inputs: Tensor, kind: PromptKind) -> tuple[Tensor, ...]:
        """Return ids [R], positions [R], starts [2S], num_written [2S] and the page table [2S, P]: views."""
        found, begin = [], 0
        for size in self._sizes(kind):
            found.append(inputs[begin : begin + size])
            begin += -(-size // _ALIGNED) * _ALIGNED
        *columns, table = found
        return *columns, table.view(2 * kind.num_prompts, kind.num_pages)

    def _sizes(self, kind: PromptKind) -> tuple[int, ...]:
        num_rows, twice = self._pattern_of(kind).rows.num_padded, 2 * kind.num_prompts
        return num_rows, num_rows, twice, twice, twice * kind.num_pages

    def _end(self, kind: PromptKind) -> int:
        return sum(-(-size // _ALIGNED) * _ALIGNED for size in self._sizes(kind))


def _num_masks(facts: ModelFacts, adapter: int | None) -> int:
    """Return the masks of an adapter, or of the checkpoint itself."""
    return len(facts.mask_ids) if adapter is None else facts.adapters[adapter].num_masks
