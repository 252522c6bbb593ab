"""Llama with linear biases (ALiBi) instead of rotary positions, as Baichuan of 13B: transformers has no such model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from space_kernels.attention.alibi import Alibi
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.llama.modeling_llama import LlamaAttention, repeat_kv

ALIBI_LLAMA = "alibi_llama"


class AlibiLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """The fields of Llama; those of rotary positions have no effect."""

    model_type = ALIBI_LLAMA


class AlibiLlamaAttention(LlamaAttention):  # type: ignore[misc]
    """Llama's, with scores that fall with the distance of a key."""

    def __init__(self, config: AlibiLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        slopes = _get_alibi_slopes(config.num_attention_heads, torch.device("cpu"))
        self.alibi = Alibi(tuple(slopes.tolist()))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: object = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """[B, R, hidden] -> [B, R, hidden]"""
        query, key, value = (
            linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        usual: Callable[..., Any] = _attend
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, usual)
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, alibi=self.alibi, **keywords)
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected, None


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, alibi: Alibi, **_: object
) -> tuple[Tensor, None]:
    """query [B, H, R, D], key and value [B, G, K, D], the last R of the K keys the rows' own -> [B, R, H, D]"""
    key, value = (repeat_kv(part, module.num_key_value_groups) for part in (key, value))
    rows, keys = query.shape[2], key.shape[2]
    positions = torch.arange(keys, device=query.device)
    distance = positions - positions[keys - rows :, None]  # [R, K], at most 0 for what is seen
    slopes = torch.tensor(alibi.slopes, dtype=query.dtype, device=query.device)[:, None, None]
    scores = query @ key.mT * module.scaling + slopes * distance
    scores = scores if mask is None else scores + mask
    wide = torch.promote_types(query.dtype, torch.float32)
    return (scores.softmax(-1, dtype=wide).to(value.dtype) @ value).transpose(1, 2), None


class AlibiLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama, with the attention of this file."""

    config_class = AlibiLlamaConfig
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = False

    def __init__(self, config: AlibiLlamaConfig) -> None:
        super().__init__(config)
        layers: nn.ModuleList = self.model.layers
        for number, layer in enumerate(layers):
            layer.self_attn = AlibiLlamaAttention(config, number)
        self.post_init()


AutoConfig.register(ALIBI_LLAMA, AlibiLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(AlibiLlamaConfig, AlibiLlamaForCausalLM, exist_ok=True)
