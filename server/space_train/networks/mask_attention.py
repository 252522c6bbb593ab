"""Attention of a frozen base's passes on a CPU, in blocks that read only the keys that some row of theirs sees.

A pass has rows of one text each. Real rows see the real rows before them in their document; masks see the real rows up
to their root, and their own group. So a block of consecutive rows sees a range of real keys, and those of its own mask
rows. Query heads that share a key head are rows of one product. Real keys get no gradient, as nothing before them is
trained.

Letters: `B` texts, `R` rows, `H` query heads, `G` key heads, `D` head dimension, `L` real keys, `K` keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from space_kernels.training import attention_back
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from space_train.data.train_batch import AnchorRows

NAME = "space_blocks"
"""The attention function, as transformers knows it: sdpa, or in blocks inside `in_blocks`."""

ROWS = 128  # of a block, at most, but for a longer group of masks


@dataclass(frozen=True)
class RowBlock:
    """Rows of one text, and the keys that they see."""

    text: int
    rows: slice
    real: slice  # of the real keys
    own: slice  # of all keys: those of the block's own masks; empty for real rows
    bias: Tensor  # [1, 1, H/G·rows, K] 0 or -inf, real keys first

    def keys(self, whole: Tensor) -> Tensor:
        """[B, G, L+R, D] -> [G, K, D]"""
        text = whole[self.text]
        return text[:, self.real] if self.own.start == self.own.stop else _joined(text, self.real, self.own)


def _joined(text: Tensor, real: slice, own: slice) -> Tensor:
    return torch.cat((text[:, real], text[:, own]), dim=1)


def real_blocks(document: Tensor, heads_per_key: int, dtype: torch.dtype) -> list[RowBlock]:
    """Return the blocks of the real rows; `document` [B, L]: the text of each token, padding included."""
    blocks, length = [], document.shape[1]
    starts = _starts(document)
    places = torch.arange(length)
    for text in range(len(document)):
        for begin in range(0, length, ROWS):
            end = min(begin + ROWS, length)
            first = int(starts[text, begin:end].min())
            keys, rows = places[first:end], places[begin:end, None]
            seen = (keys <= rows) & (keys >= starts[text, begin:end, None])
            bias = _bias(seen, heads_per_key, dtype)
            blocks.append(RowBlock(text, slice(begin, end), slice(first, end), slice(0, 0), bias))
    return blocks


def mask_blocks(anchors: AnchorRows, document: Tensor, heads_per_key: int, dtype: torch.dtype) -> list[RowBlock]:
    """Return the blocks of the mask rows, each of whole groups."""
    blocks, length = [], document.shape[1]
    starts = _starts(document)
    places = torch.arange(length)
    for text in range(len(document)):
        root, depth, group = anchors.root[text], anchors.depth[text], anchors.group[text]
        start = starts[text][root]
        for begin, end in _group_ranges(group.tolist()):
            rows = slice(begin, end)
            low, high = int(start[rows].min()), int(root[rows].max()) + 1
            keys = places[low:high]
            sees_real = (keys <= root[rows, None]) & (keys >= start[rows, None])
            sees_own = (group[rows, None] == group[rows]) & (depth[rows] <= depth[rows, None])
            bias = _bias(torch.cat((sees_real, sees_own), dim=1), heads_per_key, dtype)
            blocks.append(RowBlock(text, rows, slice(low, high), slice(length + begin, length + end), bias))
    return blocks


def _starts(document: Tensor) -> Tensor:
    """[B, L] where the document of each token starts; of consecutive tokens of the same document."""
    places = torch.arange(document.shape[1]).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return torch.where(begins, places, 0).cummax(dim=1).values


def _group_ranges(group: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows of whole groups, as many as fit in ROWS."""
    begin = 0
    while begin < len(group):
        end = min(begin + ROWS, len(group))
        while end < len(group) and end > begin and group[end] == group[end - 1]:
            end -= 1
        if end == begin:  # one group alone is longer
            end = begin + next((i for i, g in enumerate(group[begin:]) if g != group[begin]), len(group) - begin)
        yield begin, end
        begin = end


def _bias(seen: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return bias.repeat(heads_per_key, 1)[None, None]


_current: ContextVar[Sequence[RowBlock] | None] = ContextVar("blocks of the current pass", default=None)


@contextmanager
def in_blocks(blocks: Sequence[RowBlock] | None) -> Iterator[None]:
    """Context of a pass whose attention goes by `blocks`, which cover its rows; None: by its mask."""
    token = _current.set(blocks)
    try:
        yield
    finally:
        _current.reset(token)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """The attention function for transformers: query [B, H, R, D], key and value [B, G, K, D] -> [B, R, H, D]."""
    blocks = _current.get()
    if blocks is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **keywords)
        return whole
    scale = keywords.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    dtype = blocks[0].bias.dtype  # autocast's, as for sdpa
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attended: Tensor = _BlockAttention.apply(query, key, value, blocks, scale)  # type: ignore[no-untyped-call]
    return attended, None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _BlockAttention(torch.autograd.Function):
    """Attention by blocks: forward as sdpa, whose log-sums are kept; backward recomputes the weights from them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[RowBlock], scale: float
    ) -> Tensor:
        B, H, R, D = query.shape
        out = query.new_empty(B, R, H, D)
        log_sums = []
        for block in blocks:
            rows = _rows_of(query, block, key.shape[1])
            keys, values = block.keys(key), block.keys(value)
            some, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                rows[None], keys[None], values[None], 0.0, False, attn_mask=block.bias, scale=scale
            )
            _put_rows(out, block, some[0])
            log_sums.append(log_sum)
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(query, key, value, *log_sums)
            ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *log_sums = ctx.saved_tensors
        G, scale = key.shape[1], ctx.scale
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        gradient = gradient.transpose(1, 2)
        for block, log_sum in zip(ctx.blocks, log_sums, strict=True):
            rows, keys, values = _rows_of(query, block, G), block.keys(key), block.keys(value)
            moved = _rows_of(gradient, block, G)
            scores = torch.baddbmm(block.bias[0], rows, keys.mT, alpha=scale)
            weights, moves = attention_back(scores, torch.bmm(moved, values.mT), log_sum[0], scale)
            of_rows = of_query[block.text, :, block.rows]
            of_rows.copy_(torch.bmm(moves, keys).view_as(of_rows))
            if block.own.stop > block.own.start:
                num_real = block.real.stop - block.real.start
                of_key[block.text, :, block.own] = torch.bmm(moves[..., num_real:].mT, rows)
                of_value[block.text, :, block.own] = torch.bmm(weights[..., num_real:].mT, moved)
        return of_query, of_key, of_value, None, None


def _rows_of(heads: Tensor, block: RowBlock, num_keys: int) -> Tensor:
    """[B, H, R, D] -> [G, H/G·rows, D]: the block's rows, of all heads that share a key head."""
    some = heads[block.text, :, block.rows]
    return some.reshape(num_keys, -1, some.shape[-1])


def _put_rows(out: Tensor, block: RowBlock, rows: Tensor) -> None:
    """Write [G, H/G·rows, D] to `out` [B, R, H, D]."""
    place = out[block.text, block.rows]
    place.copy_(rows.reshape(place.shape[1], place.shape[0], -1).transpose(0, 1))
