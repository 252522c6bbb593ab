"""Falcon: heads fused group by group (40B, 180B, 11B), with one key-value head for all (7B), or head by head with
linear biases (falcon-rw)."""

from __future__ import annotations

from typing import Any

import torch
from space_kernels.attention.alibi import Alibi, Bias
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear, apply_rotary_pos_emb, build_alibi_tensor

from space_model.networks.transformers_network import paged_attention


def use_plain_linears(model: PreTrainedModel) -> None:
    """Replace the linears that add their bias after rounding; their weights stay where they are."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is FalconLinear:
                plain = nn.Linear.__new__(nn.Linear)
                plain.__dict__.update(child.__dict__)
                setattr(parent, name, plain)


def prepare(module: Any) -> None:
    """Compute the slopes as transformers does, in bfloat16; its biases are scaled as the scores are."""
    module.alibi = None
    if module.config.alibi:
        slopes = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), module.num_heads, torch.float32)[:, 0, 1]
        module.alibi = Alibi(tuple(slopes.tolist()), Bias.ROUNDED_POSITION, factor=module.inv_norm_factor)


def forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Stand in for the attention: [1, R, hidden] -> [1, R, hidden]."""
    query, key, value = _heads(module, module.query_key_value(hidden_states))
    if module.alibi is None and position_embeddings is not None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out = paged_attention(module, query, key, value, None, scaling=module.inv_norm_factor, alibi=module.alibi)[0]
    projected: Tensor = module.dense(out.flatten(2))
    return projected, None


# new architecture   | query 0 .. Q-1 of group 0 | key 0 | value 0 | query 0 .. Q-1 of group 1 | key 1 | value 1 | …
# multi-query        | query 0 .. H-1 | key | value |
# neither            | query 0 | key 0 | value 0 | query 1 | key 1 | value 1 | …
def _heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, R, fused] -> [1, H, R, D], [1, G, R, D], [1, G, R, D]"""
    heads, groups, size = module.num_heads, module.num_kv_heads, module.head_dim
    by_group = fused.view(*fused.shape[:2], groups, heads // groups + 2, size)
    query = by_group[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), by_group[..., -2, :].transpose(1, 2), by_group[..., -1, :].transpose(1, 2)
