"""Attention of a SPACE step over paged keys and values: the reference definition, and what the CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor

from space_kernels.attention_plan import KEY_BLOCK, AttentionPlan, Bucket, PlanKey
from space_kernels.paging import StepRows

_FLOOR = -1e30
"""Least running maximum: a row that sees nothing of a block keeps exp(-inf - floor) = 0 instead of exp(-inf + inf)."""


def space_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: StepRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write the chain rows' keys and values into the pages, then let every row attend. Returns [R, H, D].

    query [R, H, D], key and value [R, G, D], R padded; pages [num_blocks, G, block_size, D] in the same dtype.
    Scores, sums and products are float32. Every row goes through fixed key blocks of 256 positions, ascending, up to
    its own visible length; mask rows then join the masks of their group seen so far (online softmax). What a row must
    not see has the score -inf and the value 0, whatever lies there: unwritten slots may hold NaN.

    A row's result depends on its own query and on the keys it sees, bitwise: not on the other rows of the step.
    `window`: positions a row looks back, its own included. `softcap`: scores become softcap·tanh(score/softcap).
    """
    num_rows, num_heads, head_dim = query.shape
    kv_heads, block_size = key_pages.shape[1], key_pages.shape[2]
    plan = AttentionPlan.of(rows, PlanKey(num_heads, kv_heads, window))

    chain = rows.num_chain_rows
    key_pages.view(-1, head_dim).index_copy_(0, plan.writes, key[:chain].reshape(-1, head_dim))
    value_pages.view(-1, head_dim).index_copy_(0, plan.writes, value[:chain].reshape(-1, head_dim))

    queries = query.reshape(-1, head_dim)
    pages = key_pages.view(-1, block_size * head_dim), value_pages.view(-1, block_size * head_dim)
    outputs = [
        _attend(queries, key.reshape(-1, head_dim), value.reshape(-1, head_dim), pages, bucket, scale, softcap, window)
        for bucket in plan.buckets
    ]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, plan.outputs).view(num_rows, num_heads, head_dim).to(query.dtype)


def _attend(
    queries: Tensor,
    step_keys: Tensor,
    step_values: Tensor,
    pages: tuple[Tensor, Tensor],
    bucket: Bucket,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """One bucket's rows over the pages, then over the masks of the step. Returns [S·G·P·Q, D] float32."""
    num_sequences, kv_heads, num_rows, queries_per_kv = bucket.shape
    head_dim = queries.shape[-1]
    packed = queries.index_select(0, bucket.queries).float().mul_(scale)
    packed = packed.view(num_sequences * kv_heads, num_rows * queries_per_kv, head_dim)

    softmax = _OnlineSoftmax(floor=window is not None)
    for block in bucket.blocks:
        n = block.num_sequences
        keys = pages[0].index_select(0, block.pages).view(n * kv_heads, KEY_BLOCK, head_dim).float()
        values = pages[1].index_select(0, block.pages).view(n * kv_heads, KEY_BLOCK, head_dim).float()
        if block.stale is not None:
            values.view(n, kv_heads, KEY_BLOCK, head_dim).masked_fill_(block.stale, 0.0)
        scores = _scores(packed[: n * kv_heads], keys, softcap)
        if block.hidden is not None:
            scores.view(n, kv_heads, num_rows, queries_per_kv, -1).masked_fill_(block.hidden, -torch.inf)
        softmax.add(scores, values)

    if bucket.step_keys is not None and bucket.step_hidden is not None:
        keys = step_keys.index_select(0, bucket.step_keys).view(num_sequences * kv_heads, -1, head_dim).float()
        values = step_values.index_select(0, bucket.step_keys).view(num_sequences * kv_heads, -1, head_dim).float()
        scores = _scores(packed, keys, softcap)
        scores.view(num_sequences, kv_heads, num_rows, queries_per_kv, -1).masked_fill_(bucket.step_hidden, -torch.inf)
        # chain rows weigh these values with 0; a mask row gone wrong must not reach them as 0·NaN
        softmax.add(scores, values.nan_to_num_(0.0, 0.0, 0.0))
    return softmax.result().view(-1, head_dim)


def _scores(queries: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    """[B, M, D] x [B, N, D] -> [B, M, N]"""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


class _OnlineSoftmax:
    """Running maximum, sum and weighted values of each row; a block of hidden keys leaves all three as they are."""

    def __init__(self, *, floor: bool) -> None:
        self._floor = floor  # needed only where a row's first block may be hidden from it whole
        self._state: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Join scores [B, M, N] (overwritten) and values [B, N, D]; B may be a leading part of the first call's."""
        peak = scores.amax(-1, keepdim=True)
        if self._floor:
            peak.clamp_min_(_FLOOR)
        if self._state is None:
            weights = scores.sub_(peak).exp_()
            self._state = peak, weights.sum(-1, keepdim=True), torch.bmm(weights, values)
            return
        top, total, output = (tensor[: len(scores)] for tensor in self._state)
        torch.maximum(top, peak, out=peak)
        shrink = top.sub_(peak).exp_()
        weights = scores.sub_(peak).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        output.mul_(shrink).baddbmm_(weights, values)
        top.copy_(peak)

    def result(self) -> Tensor:
        """[B, M, D]: the weighted values over the sum of weights."""
        if self._state is None:
            raise ValueError("No keys were given.")
        _, total, output = self._state
        return output.div_(total)
