"""BLOOM: queries, keys and values of a head in turn, and linear biases."""

from __future__ import annotations

from typing import Any

import torch
from space_kernels.attention.alibi import Alibi, Bias
from torch import Tensor
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from space_model.networks.transformers_network import paged_attention


def prepare(module: Any) -> None:
    """Compute the slopes as transformers does."""
    slopes = _get_alibi_slopes(module.num_heads, torch.device("cpu"))
    module.alibi = Alibi(tuple(slopes.tolist()), Bias.POSITION)


def forward(module: Any, hidden_states: Tensor, residual: Tensor, **_: object) -> tuple[Tensor, None]:
    """Stand in for the attention: hidden_states and residual [1, R, hidden] -> [1, R, hidden], the residual added."""
    fused = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = (part.transpose(1, 2) for part in fused.unbind(3))
    out = paged_attention(module, query, key, value, None, scaling=module.inv_norm_factor, alibi=module.alibi)[0]
    return residual + module.dense(out.flatten(2)), None
