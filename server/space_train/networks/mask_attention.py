"""Attention of a frozen base's passes on a CPU, in query blocks that read only the keys that their rows see.

A real row sees the real rows before it in its document; a mask row sees the real rows up to its root and its own
group. Consecutive rows therefore see one range of real keys and one range of mask keys. Query heads that share a key
head are rows of one matmul. Real keys and values get no gradient, because nothing before them is trained.

Letters: `B` texts, `R` rows, `H` query heads, `G` key heads, `D` head dimension, `L` real keys, `K` keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from space_kernels.training import attention_backward
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from space_train.data.train_batch import AnchorRows

NAME = "space_blocks"
"""Name of `attention` in transformers: sdpa, or by query blocks within `query_blocks`."""

Q_BLOCK_SIZE = 128  # rows of a query block at most; a longer group of masks is one block


@dataclass(frozen=True)
class QueryBlock:
    """Consecutive rows of one text, and the keys that they see."""

    text: int
    rows: slice
    real_keys: slice
    mask_keys: slice | None  # those of the block's own rows; None for real rows
    attn_mask: Tensor  # [1, 1, H/G·rows, K] 0 or -inf, real keys first

    def gather(self, keys: Tensor) -> Tensor:
        """Return the keys (or values) of the block: [B, G, L+R, D] -> [G, K, D]."""
        text = keys[self.text]
        if self.mask_keys is None:
            return text[:, self.real_keys]
        return torch.cat((text[:, self.real_keys], text[:, self.mask_keys]), dim=1)


def real_query_blocks(document: Tensor, heads_per_key: int, dtype: torch.dtype) -> list[QueryBlock]:
    """Return the query blocks of the real rows. `document` [B, L]: the document of each token, padding included."""
    blocks, length = [], document.shape[1]
    starts = _starts(document)
    places = torch.arange(length)
    for text in range(len(document)):
        for begin in range(0, length, Q_BLOCK_SIZE):
            end = min(begin + Q_BLOCK_SIZE, length)
            first = int(starts[text, begin:end].min())
            keys, rows = places[first:end], places[begin:end, None]
            seen = (keys <= rows) & (keys >= starts[text, begin:end, None])
            attn_mask = _attn_mask(seen, heads_per_key, dtype)
            blocks.append(QueryBlock(text, slice(begin, end), slice(first, end), None, attn_mask))
    return blocks


def mask_query_blocks(
    anchors: AnchorRows, document: Tensor, heads_per_key: int, dtype: torch.dtype
) -> list[QueryBlock]:
    """Return the query blocks of the mask rows, each of whole groups."""
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
            attn_mask = _attn_mask(torch.cat((sees_real, sees_own), dim=1), heads_per_key, dtype)
            mask_keys = slice(length + begin, length + end)
            blocks.append(QueryBlock(text, rows, slice(low, high), mask_keys, attn_mask))
    return blocks


def _starts(document: Tensor) -> Tensor:
    """[B, L] the place at which the document of each token starts."""
    places = torch.arange(document.shape[1]).expand_as(document)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return torch.where(begins, places, 0).cummax(dim=1).values


def _group_ranges(group: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of whole groups, as many as fit in Q_BLOCK_SIZE. `group`: of each row."""
    begin = 0
    while begin < len(group):
        end = min(begin + Q_BLOCK_SIZE, len(group))
        while end < len(group) and end > begin and group[end] == group[end - 1]:
            end -= 1
        if end == begin:  # one group alone is longer
            end = begin + next((i for i, g in enumerate(group[begin:]) if g != group[begin]), len(group) - begin)
        yield begin, end
        begin = end


def _attn_mask(seen: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    attn_mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return attn_mask.repeat(heads_per_key, 1)[None, None]


_current: ContextVar[Sequence[QueryBlock] | None] = ContextVar("query blocks of the current pass", default=None)


@contextmanager
def query_blocks(blocks: Sequence[QueryBlock] | None) -> Iterator[None]:
    """Compute attention by `blocks` inside the context; they must cover all rows of the pass. With None, attention uses
    the attention mask of the pass."""
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
    dtype = blocks[0].attn_mask.dtype  # autocast's, as for sdpa
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attended: Tensor = _QueryBlockAttention.apply(query, key, value, blocks, scale)  # type: ignore[no-untyped-call]
    return attended, None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _QueryBlockAttention(torch.autograd.Function):
    """The forward pass runs torch's sdpa kernel on each query block and saves its logsumexp. The backward pass
    recomputes the attention weights from it."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[QueryBlock], scale: float
    ) -> Tensor:
        B, H, R, D = query.shape
        out = query.new_empty(B, R, H, D)
        logsumexps = []
        for block in blocks:
            rows = _rows_of(query, block, key.shape[1])
            keys, values = block.gather(key), block.gather(value)
            attended, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                rows[None], keys[None], values[None], 0.0, False, attn_mask=block.attn_mask, scale=scale
            )
            _put_rows(out, block, attended[0])
            logsumexps.append(logsumexp)
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(query, key, value, *logsumexps)
            ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        query, key, value, *logsumexps = ctx.saved_tensors
        G, scale = key.shape[1], ctx.scale
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_output = grad_output.transpose(1, 2)
        for block, logsumexp in zip(ctx.blocks, logsumexps, strict=True):
            rows, keys, values = _rows_of(query, block, G), block.gather(key), block.gather(value)
            grad_rows = _rows_of(grad_output, block, G)
            scores = torch.baddbmm(block.attn_mask[0], rows, keys.mT, alpha=scale)
            grad_weights = torch.bmm(grad_rows, values.mT)
            weights, grad_scores = attention_backward(scores, grad_weights, logsumexp[0], scale)
            place = grad_query[block.text, :, block.rows]
            place.copy_(torch.bmm(grad_scores, keys).view_as(place))
            if block.mask_keys is not None:
                num_real = block.real_keys.stop - block.real_keys.start
                grad_key[block.text, :, block.mask_keys] = torch.bmm(grad_scores[..., num_real:].mT, rows)
                grad_value[block.text, :, block.mask_keys] = torch.bmm(weights[..., num_real:].mT, grad_rows)
        return grad_query, grad_key, grad_value, None, None


def _rows_of(heads: Tensor, block: QueryBlock, num_keys: int) -> Tensor:
    """Return the block's rows, heads that share a key head together: [B, H, R, D] -> [G, H/G·rows, D]."""
    some = heads[block.text, :, block.rows]
    return some.reshape(num_keys, -1, some.shape[-1])


def _put_rows(out: Tensor, block: QueryBlock, rows: Tensor) -> None:
    """Write [G, H/G·rows, D] to `out` [B, R, H, D]."""
    place = out[block.text, block.rows]
    place.copy_(rows.reshape(place.shape[1], place.shape[0], -1).transpose(0, 1))
