"""XGLM: queries, keys and values from a linear each; its positions are added to the embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.xglm.modeling_xglm import XGLMAttention

from space_model.networks.transformers_network import paged_attention


def forward(module: Any, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    """Stand in for the attention: [1, R, hidden] -> [1, R, hidden]."""
    query, key, value = (
        linear(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        for linear in (module.q_proj, module.k_proj, module.v_proj)
    )
    out = paged_attention(module, query * module.scaling, key, value, None, scaling=1.0)[0]
    projected: Tensor = module.out_proj(out.flatten(2))
    return projected, None


def outside(module: Any, hidden_states: Tensor, **named: Any) -> Any:
    """Return what transformers' own computes. Its least score is a constant of the default dtype, which is too narrow
    for rows in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(hidden_states.dtype)
    try:
        return XGLMAttention.forward(module, hidden_states, **named)
    finally:
        torch.set_default_dtype(before)
