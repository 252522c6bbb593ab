"""What a transformers config says about a family: whether we serve it, and what its head does to the logits."""

from __future__ import annotations

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from space_model.checkpoint import Checkpoint
from space_model.model_error import UnsupportedModel
from space_model.quantized_format import read_format

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_UNSERVED_ROPE = {"dynamic", "longrope"}


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The checkpoint's config as transformers sees it; an UnsupportedModel says why it cannot be served."""
    kind = checkpoint.config.get("model_type")
    try:
        config = AutoConfig.from_pretrained(str(checkpoint.folder), trust_remote_code=False, local_files_only=True)
    except (AttributeError, KeyError, OSError, StrictDataclassError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"transformers cannot read the config of {checkpoint.name}: {error}") from error
    read_format(checkpoint.config, checkpoint.name)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"Models of type {kind!r} are no causal language models in transformers.")
    _refuse_layers(kind, config)
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{model_class.__name__} computes its attention by itself, not through transformers' AttentionInterface, "
            "so its keys and values cannot be paged."
        )
    for rope in _rope_types(config):
        if rope in _UNSERVED_ROPE:
            raise UnsupportedModel(
                f"{checkpoint.name} scales its rotary positions by {rope!r}: the angles would depend on the longest "
                "sequence of the batch. Use a checkpoint with linear, llama3 or yarn scaling, or none."
            )
    return config


def _refuse_layers(kind: str | None, config: PreTrainedConfig) -> None:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if others:
        raise UnsupportedModel(
            f"Models of type {kind!r} have {', '.join(others)} layers; only full and sliding attention can be paged."
        )
    if kind in {"gpt_oss"}:
        raise UnsupportedModel(f"Models of type {kind!r} have attention sinks, which paged attention does not do.")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"Models of type {kind!r} have an encoder; only decoders are served.")


def _rope_types(config: PreTrainedConfig) -> list[str]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return [str(part["rope_type"]) for part in [rope, *nested] if "rope_type" in part]


def head_scale(config: PreTrainedConfig) -> float:
    """What the family multiplies its logits by."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / float(config.logits_scaling)  # Granite
    return float(getattr(config, "logit_scale", None) or 1.0)  # Cohere


def head_softcap(config: PreTrainedConfig) -> float | None:
    """The cap of the family's logits: cap·tanh(logit/cap)."""
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Query heads, key-value heads, head dimension."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, int(head_dim)


def decoder_layers(base: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder's layers, and their path in `base`."""
    for path, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == base.config.num_hidden_layers:
            return path, module
    raise UnsupportedModel(f"{type(base).__name__} has no list of {base.config.num_hidden_layers} decoder layers.")
