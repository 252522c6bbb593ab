"""Families that make queries, keys and values as others do, and compute the scores themselves: CodeGen, GPT-J, GPT-Neo,
GPT-NeoX Japanese."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from space_model.networks.transformers_network import paged_attention


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, None]:
    """Stand in for `_attn`: query, key and value [1, H, R, D] -> [1, H, R, D]."""
    scaling, window = getattr(module, "scaling", None), getattr(module, "sliding_window", None)
    query, key = query.to(value.dtype), key.to(value.dtype)  # CodeGen rotates in float32, and keeps the model's dtype
    out = paged_attention(module, query, key, value, None, scaling=scaling, sliding_window=window)[0]
    return out.transpose(1, 2), None


def prepare_gpt_neo(module: Any) -> None:
    """GPT-Neo's scores have no scale, and its local layers are sliding windows."""
    module.layer_idx, module.scaling = module.layer_id, 1.0
    if module.attention_type == "local":
        module.sliding_window = module.config.window_size
