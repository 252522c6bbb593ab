"""Refuses unsupported models by their config, before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from space_model.model_error import UnsupportedModel

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
SERVED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
_ROPE_OF_LENGTH = ("dynamic", "longrope", "su", "ntk")
"""RoPE types whose angles depend on the longest sequence of a batch; `su` is an old name of longrope."""


def refuse_config(name: str, said: Mapping[str, Any], config: PreTrainedConfig, model_class: type) -> None:
    """Raises UnsupportedModel with the reason and the cure.

    `said`: the raw config.json; `config`: as transformers reads it.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"Models of type {kind!r} have an encoder; only decoders are served.")
    _refuse_both_ways(name, said, config)
    _refuse_layers(kind, config)
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{model_class.__name__} computes its attention by itself, not through transformers' AttentionInterface, "
            "so its keys and values cannot be paged."
        )
    _refuse_rope(name, config)
    _refuse_heads(name, kind, config)


def _refuse_both_ways(name: str, said: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse bidirectional attention: masked language models and embedding models do not generate text."""
    both_ways = (
        said.get("is_causal") is False
        or getattr(config, "is_causal", None) is False
        or getattr(config, "use_bidirectional_attention", None) in (True, "all")
    )
    if both_ways:
        raise UnsupportedModel(
            f"{name} attends to later tokens, too (is_causal or use_bidirectional_attention in config.json)"
            ": it is no causal language model, and writes no text. Use a checkpoint of one."
        )


def _refuse_layers(kind: str, config: PreTrainedConfig) -> None:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS)
    if others:
        raise UnsupportedModel(
            f"Models of type {kind!r} have {', '.join(others)} layers; only full and sliding attention can be paged."
        )
    if kind in {"gpt_oss"}:
        raise UnsupportedModel(f"Models of type {kind!r} have attention sinks, which paged attention does not do.")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(
            f"Models of type {kind!r} have multi-head latent attention (MLA, kv_lora_rank in config.json), whose keys "
            "and values have different sizes; pages hold keys and values of one size. Use a model with grouped-query "
            "attention."
        )


def _refuse_rope(name: str, config: PreTrainedConfig) -> None:
    for rope in _ropes(config):
        kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta")
        if kind in _ROPE_OF_LENGTH:
            raise UnsupportedModel(
                f"{name} scales its rotary positions by {kind!r}: the angles would depend on the longest "
                "sequence of the batch. Use a checkpoint with linear, llama3 or yarn scaling, or none."
            )
        if kind not in SERVED_ROPE:
            raise UnsupportedModel(
                f"{name} scales its rotary positions by {kind!r} (rope_scaling in config.json), which is none of "
                f"{', '.join(SERVED_ROPE)}. Correct config.json, or use another checkpoint."
            )
        if theta is not None and not (isinstance(theta, int | float) and math.isfinite(theta) and theta > 0):
            raise UnsupportedModel(
                f"rope_theta in the config.json of {name} is {theta!r}; it must be above 0 (10000 in most models). "
                "Fetch the config.json of the original checkpoint."
            )


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE parameters in config.json: one set, or one per layer type."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _refuse_heads(name: str, kind: str, config: PreTrainedConfig) -> None:
    found = {field: _field(config, field) for field in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    for field, count in found.items():
        if isinstance(count, list | tuple | dict):
            raise UnsupportedModel(
                f"Models of type {kind!r} as in {name} have {field} that differs by layer; pages hold the keys and "
                "values of all layers alike. Use a model whose layers have the same heads."
            )
        if count is not None and (not isinstance(count, int) or count < 1):
            raise UnsupportedModel(
                f"{field} in the config.json of {name} is {count!r}; it must be a whole number above 0."
            )
    hidden = _field(config, "hidden_size")
    heads, kv_heads, head_dim = found.values()
    if heads and kv_heads and heads % kv_heads:
        raise UnsupportedModel(
            f"The config.json of {name} has {heads} heads (num_attention_heads) for {kv_heads} key-value heads "
            "(num_key_value_heads), which do not divide them. Fetch the config.json of the original checkpoint."
        )
    if heads and hidden and not head_dim and hidden % heads:
        raise UnsupportedModel(
            f"The config.json of {name} has a hidden_size of {hidden} for {heads} heads (num_attention_heads), which "
            "do not divide it, and no head_dim. Fetch the config.json of the original checkpoint."
        )


def _field(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of the config; if it differs by layer, transformers raises, and all values are returned."""
    try:
        return getattr(config, name, None)
    except Exception as error:  # its exception class does not exist in older versions of transformers
        if "per-layer" not in str(error):
            raise
        return [str(error)]
