"""MPT: queries, then keys, then values, clipped in some checkpoints, and linear biases."""

from __future__ import annotations

from typing import Any

from space_kernels.attention.alibi import Alibi
from torch import Tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from space_model.networks.transformers_network import paged_attention


def prepare(module: Any) -> None:
    """Compute the slopes as transformers does: the bias of the last key but one, negated."""
    module.alibi = Alibi(tuple((-build_mpt_alibi_tensor(module.n_heads, 2)[:, 0, 0]).tolist()))


def forward(module: Any, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    """Stand in for the attention: [1, R, hidden] -> [1, R, hidden]."""
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = fused.unflatten(-1, (3, module.n_heads, module.head_dim))
    query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
    out = paged_attention(module, query, key, value, None, scaling=module.softmax_scale, alibi=module.alibi)[0]
    projected: Tensor = module.out_proj(out.flatten(2))
    return projected, None
