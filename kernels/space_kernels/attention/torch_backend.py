"""Attention of a SPACE step over the paged KV cache: the reference, which CPUs also run."""

from __future__ import annotations

import torch
from torch import Tensor

from space_kernels.attention.alibi import Alibi
from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.fp8 import as_kept, to_keep, widened
from space_kernels.paging.attention_plan import KEY_BLOCK, AttentionPlan, Bucket, KeyBlock, PlanKey
from space_kernels.paging.step_rows import StepRows

_FLOOR = -1e30
"""Smallest running maximum, so that a fully masked block gives exp(-inf - floor) = 0 instead of exp(-inf + inf)."""


def space_attention(qkv: QKV, pages: KVPages, rows: StepRows, spec: AttentionSpec) -> Tensor:
    """Write the chain rows' keys and values into the pages, then let every row attend. Returns [R, H, E].

    Pages have the dtype of the rows, or float8_e4m3fn: keys and values are then rounded to fp8, except the masks of a
    row's own group.
    Scores, sums and matmuls are float32. Every row visits fixed key blocks of 128 positions, ascending, up to its own
    visible length; mask rows then add the masks of their group up to themselves (online softmax). Masked keys have
    score -inf; unwritten slots are never read. Keys and values that are not finite count as 0, so that NaN in one row
    does not spread to others.

    Bitwise, a row's result depends only on its own query and the keys it sees, not on the other rows of the step.
    """
    query, key, value = qkv
    num_rows, num_heads, head_dim = query.shape
    kv_heads, value_dim = pages.keys.shape[1], value.shape[2]
    plan = AttentionPlan.of(rows, PlanKey(num_heads, kv_heads, head_dim, spec.window, spec.chunk))

    chain = rows.num_chain_rows
    kept_keys, kept_values = as_kept(pages.keys), as_kept(pages.values)
    for kept, new in [(kept_keys, key)] if spec.is_latent else [(kept_keys, key), (kept_values, value)]:
        written = to_keep(new[:chain].reshape(-1, new.shape[2]), pages.keys.dtype)
        kept.view(-1, new.shape[2]).index_copy_(0, plan.writes, written)

    queries = query.reshape(-1, head_dim)
    outputs = []
    for bucket in plan.buckets:
        packed = queries.index_select(0, bucket.queries).float().mul_(spec.scale)
        packed = packed.view(bucket.shape[0], kv_heads, -1, head_dim)
        may_be_masked = spec.window is not None or spec.chunk is not None
        softmax = _OnlineSoftmax(packed, spec.softcap, floor=may_be_masked, sinks=spec.sinks)
        biases = None if spec.alibi is None else _Biases(spec.alibi, rows, bucket)
        for block in bucket.blocks:
            keys = _fetched(kept_keys, block, kv_heads)
            values = keys[..., :value_dim] if spec.is_latent else _fetched(kept_values, block, kv_heads)
            bias = None if biases is None else biases.of_block(block)
            softmax.add(keys, values, block.bound, bias)
        if bucket.step_keys is not None:
            num_groups = bucket.shape[0] * kv_heads
            keys, values = (
                new.reshape(-1, width).index_select(0, bucket.step_keys).nan_to_num_(0.0, 0.0, 0.0).float()
                for new, width in ((key, head_dim), (value, value_dim))
            )
            bias = None if biases is None else biases.of_masks()
            keys, values = keys.view(num_groups, -1, head_dim), values.view(num_groups, -1, value_dim)
            softmax.add(keys, values, bucket.step_bound, bias)
        outputs.append(softmax.result())
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, plan.outputs).view(num_rows, num_heads, value_dim).to(query.dtype)


def _fetched(kept: Tensor, block: KeyBlock, kv_heads: int) -> Tensor:
    """Return a block's keys or values from the pages [num_blocks, G, block_size, D]: [n·G, KEY_BLOCK, D] float32."""
    dim = kept.shape[3]
    found = kept.view(-1, block.run * dim).index_select(0, block.index)
    return widened(found.view(block.num_sequences * kv_heads, KEY_BLOCK, dim))


class _Biases:
    """The linear biases of one bucket's rows."""

    def __init__(self, alibi: Alibi, rows: StepRows, bucket: Bucket) -> None:
        self._alibi, self._bucket = alibi, bucket
        self._positions = torch.from_numpy(rows.positions).to(rows.device)
        _, kv_heads, _, shared = bucket.shape
        first = bucket.queries.view(bucket.shape)[:, 0, :, 0]
        self._own = self._positions[first // (kv_heads * shared)]  # [S, P]

    def of_block(self, block: KeyBlock) -> Tensor:
        """Return [n, G, P or 1, Q, KEY_BLOCK]."""
        begin = torch.from_numpy(block.begin).to(self._own.device)
        lanes = torch.arange(KEY_BLOCK, device=self._own.device)
        return self._grouped(self._own[: block.num_sequences], begin[:, None] + lanes)

    def of_masks(self) -> Tensor:
        """Return [S, G, P or 1, Q, N]."""
        sequences, kv_heads = self._bucket.shape[:2]
        assert self._bucket.step_keys is not None
        masks = self._bucket.step_keys.view(sequences, kv_heads, -1)[:, 0] // kv_heads
        return self._grouped(self._own, self._positions[masks])

    def _grouped(self, own: Tensor, keys: Tensor) -> Tensor:
        bias = self._alibi.bias(own, keys)  # [n, H, P or 1, N]
        _, kv_heads, _, shared = self._bucket.shape
        return bias.view(len(bias), kv_heads, shared, *bias.shape[2:]).transpose(2, 3)


class _OnlineSoftmax:
    """Running maximum, sum and weighted values of each row; a block of masked keys changes none of them."""

    def __init__(self, queries: Tensor, softcap: float | None, *, floor: bool, sinks: Tensor | None = None) -> None:
        """queries [S, G, M, D], scaled; M: rows, and the heads of a row that share keys. `floor`: required if a row's
        first block may be masked completely. `sinks` [H], as of AttentionSpec."""
        self._queries, self._softcap, self._floor = queries.flatten(0, 1), softcap, floor
        self._kv_heads = queries.shape[1]
        self._sinks = None if sinks is None else sinks.view(self._kv_heads, -1)  # [G, Q]
        self._state: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, keys: Tensor, values: Tensor, bound: Tensor | None, bias: Tensor | None = None) -> None:
        """Add keys and values [n·G, N, D] of the first n sequences.
        bound [m, 1, P, 1, N]: upper bounds of the scores of the last m of these: -inf where masked, else inf.
        bias [n, G, P or 1, Q, N]: added to the scores."""
        scores = torch.bmm(self._queries[: len(keys)], keys.transpose(1, 2))  # [n·G, M, N]
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if bias is not None:
            n, kv_heads, _, shared, num_keys = bias.shape
            scores.view(n, kv_heads, -1, shared, num_keys).add_(bias)
        if bound is not None:
            m, _, num_rows, _, num_keys = bound.shape
            bounded = scores[-m * self._kv_heads :].view(m, self._kv_heads, num_rows, -1, num_keys)  # [m, G, P, Q, N]
            torch.minimum(bounded, bound, out=bounded)
        peak = scores.amax(-1, keepdim=True)
        if self._floor:
            peak.clamp_min_(_FLOOR)
        if self._state is None:
            weights = scores.sub_(peak).exp_()
            self._state = peak, weights.sum(-1, keepdim=True), torch.bmm(weights, values)
            return
        top, total, output = (tensor[: len(keys)] for tensor in self._state)
        torch.maximum(top, peak, out=peak)
        shrink = top.sub_(peak).exp_()
        weights = scores.sub_(peak).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        output.mul_(shrink).baddbmm_(weights, values)
        top.copy_(peak)

    def result(self) -> Tensor:
        """Return the weighted values divided by the sum of weights, [S·G·M, D]."""
        if self._state is None:
            raise ValueError("No keys were given.")
        top, total, output = self._state
        if self._sinks is not None:
            kv_heads, sharing = self._sinks.shape
            sinks = self._sinks.repeat(len(total) // kv_heads, total.shape[1] // sharing)[:, :, None]  # [S·G, M, 1]
            total = (sinks - top).exp_().add_(total)
        return output.div_(total).flatten(0, 1)
