"""Llama 4: chunks on layers with rotary positions, and queries scaled by position on the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from space_model.networks.transformers_network import CurrentStep, paged_attention


def prepare(module: Any) -> None:
    """Read the layer's chunk from the config."""
    is_chunked = module.config.layer_types[module.layer_idx] == "chunked_attention"
    module.chunk = int(module.config.attention_chunk_size) if is_chunked else None


def forward(module: Any, hidden_states: Tensor, position_embeddings: Tensor, **_: object) -> tuple[Tensor, None]:
    """Stand in for the attention: [1, R, hidden] -> [1, R, hidden]. transformers scales queries by the number of a row
    in the call, which is no position of a step's."""
    query, key, value = (
        linear(hidden_states).unflatten(-1, (-1, module.head_dim))
        for linear in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.use_rope:
        query, key = apply_rotary_emb(query, key, position_embeddings)
    if hasattr(module, "qk_norm"):
        query, key = module.qk_norm(query), module.qk_norm(key)
    step = CurrentStep.of(module).step
    if module.attn_temperature_tuning and not module.use_rope and step is not None:
        periods = torch.floor((step.batch.positions.float() + 1.0) / module.floor_scale)
        scales = torch.log1p(periods) * module.attn_scale + 1.0
        query = (query * scales[None, :, None, None]).to(query.dtype)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    out = paged_attention(
        module, query, key, value, None, scaling=module.scaling, sliding_window=None, chunk=module.chunk
    )[0]
    projected: Tensor = module.o_proj(out.flatten(2))
    return projected, None
