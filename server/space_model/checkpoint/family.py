"""Reads a model family's transformers config: whether it is supported, its sizes, and its logit scale and cap."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from space_model.checkpoint.alibi_llama import ALIBI_LLAMA
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.quantized_formats import read_format
from space_model.checkpoint.recurrent_layers import HYBRIDS, UNSERVED_LAYERS, WITHOUT_ATTENTION, attending_layers
from space_model.checkpoint.text_part import text_names, text_part
from space_model.checkpoint.translation import is_own_class, is_same_class
from space_model.model_error import UnsupportedModel
from space_model.model_facts import LayerKV

_CHUNKED = "chunked_attention"
SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
OWN_ATTENTION = frozenset(
    (
        "biogpt",
        "bloom",
        "codegen",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "llama4_text",
        "mpt",
        "nemotron",
        "stablelm",
        "xglm",
    )
)
"""Families that compute attention themselves, or do not hand it the step, and have a part for that
(networks/own_attention)."""

SERVED_ROPE = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope")
_ROPE_OF_LENGTH = ("dynamic", "longrope", "ntk")
"""RoPE types whose angles depend on the longest sequence of a batch."""


def refuse_config(name: str, said: Mapping[str, Any], config: PreTrainedConfig, model_class: type) -> None:
    """Raises UnsupportedModel with the reason and the cure. `said`: config.json; `config`: as transformers reads it."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"Models of type {kind!r} have an encoder; only decoders are served.")
    causal = said.get("is_causal") is not False and getattr(config, "is_causal", None) is not False
    if not causal or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(  # masked language models and embedding models do not generate text
            f"{name} attends to later tokens, too (is_causal or use_bidirectional_attention in config.json)"
            ": it is no causal language model, and writes no text. Use a checkpoint of one."
        )
    served = SERVED_LAYERS | ({_CHUNKED} if kind == "llama4_text" else set()) | HYBRIDS.get(kind, frozenset())
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - served):
        what = UNSERVED_LAYERS.get(kind) or f"have {', '.join(others)} layers, which are not served"
        raise UnsupportedModel(
            f"Models of type {kind!r} {what}. Use a checkpoint with layers that attend, fully or within a window, "
            f"or are recurrent as those of {', '.join(sorted(HYBRIDS))}."
        )
    if getattr(config, "kv_lora_rank", None) and not getattr(config, "qk_rope_head_dim", None):
        raise UnsupportedModel(
            f"{name} has multi-head latent attention (MLA, kv_lora_rank in config.json) and no qk_rope_head_dim, and "
            f"transformers' models of type {kind!r} compress no keys. Fetch the config.json of the original checkpoint."
        )
    if kind == "longcat_flash":
        raise UnsupportedModel(
            f"Models of type {kind!r} attend twice in each decoder layer; layers that attend once are served. Use a "
            "checkpoint of another family with latent attention, such as DeepSeek-V3."
        )
    if kind == "jetmoe":
        raise UnsupportedModel(
            f"Models of type {kind!r} choose experts in their attention, too, each with queries of its own; experts "
            "are served in MLPs alone. Use another mixture of experts, such as OLMoE or Granite-MoE."
        )
    if kind == "diffusion_gemma_text":
        raise UnsupportedModel(
            f"Models of type {kind!r} write blocks of tokens by diffusion, not one token after another. Use a "
            "checkpoint of Gemma 4."
        )
    if not getattr(model_class, "_supports_attention_backend", False) and kind not in {*OWN_ATTENTION, *HYBRIDS}:
        raise UnsupportedModel(
            f"{model_class.__name__} computes its attention by itself, not through transformers' AttentionInterface, "
            "so its keys and values cannot be paged."
        )
    if kind == "mpt":
        _refuse_mpt(name, config)
    _refuse_rope(name, config)
    _refuse_heads(name, kind, config)
    _refuse_sizes(name, config)


_MPT_AS_HERE = {
    "attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8, "qk_ln": False, "prefix_lm": False,
    "expansion_ratio": 4, "no_bias": True, "logit_scale": None,
}  # fmt: skip
"""What transformers' MPT computes, whatever config.json says."""


def _refuse_mpt(name: str, config: PreTrainedConfig) -> None:
    for field, here in _MPT_AS_HERE.items():
        found = getattr(config.attn_config, field, getattr(config, field, here))
        if found != here:
            raise UnsupportedModel(
                f"{field} in the config.json of {name} is {found!r}, and transformers' MPT computes as if it were "
                f"{here!r}. Use a checkpoint with that, such as mosaicml/mpt-7b."
            )


def _refuse_rope(name: str, config: PreTrainedConfig) -> None:
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in ropes.values() if isinstance(value, dict)]
    for rope in by_layer or [ropes]:
        kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta")
        if kind in _ROPE_OF_LENGTH and (by_layer or kind not in SERVED_ROPE):
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
        factor = rope.get("factor")
        if factor is not None and not (isinstance(factor, int | float) and math.isfinite(factor) and factor > 0):
            raise UnsupportedModel(
                f"The factor of rotary positions in the config.json of {name} (rope_scaling) is {factor!r}; it must be "
                "a number above 0. Fetch the config.json of the original checkpoint."
            )


def _refuse_sizes(name: str, config: PreTrainedConfig) -> None:
    window = _field(config, "max_position_embeddings")
    if isinstance(window, int) and window < 1:
        raise UnsupportedModel(
            f"max_position_embeddings in the config.json of {name} is {window}; it must be a whole number above 0. "
            "Fetch the config.json of the original checkpoint."
        )
    for field in ("hidden_act", "hidden_activation"):
        activation = _field(config, field)
        if isinstance(activation, str) and activation not in ACT2FN:
            raise UnsupportedModel(
                f"{field} in the config.json of {name} is {activation!r}, which transformers "
                f"{transformers.__version__} does not have. Fetch the config.json of the original checkpoint."
            )
    chosen = _field(config, "num_experts_per_tok")
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = _field(config, field)
        if config.model_type == "jamba" and count == 1:
            continue  # its layers are dense then, and nothing is chosen
        if isinstance(count, int) and isinstance(chosen, int) and count > 0 and not 1 <= chosen <= count:
            raise UnsupportedModel(
                f"num_experts_per_tok in the config.json of {name} is {chosen}, of {count} experts ({field}); it must "
                f"be 1 to {count}. Fetch the config.json of the original checkpoint."
            )


def _refuse_heads(name: str, kind: str, config: PreTrainedConfig) -> None:
    if isinstance(_field(config, "num_attention_heads"), list | tuple | dict):
        raise UnsupportedModel(
            f"Models of type {kind!r} as in {name} have num_attention_heads that differs by layer, which is not "
            "served. Use a model whose layers have as many query heads."
        )
    hidden = _field(config, "hidden_size")
    for one in _each_layer(config) or [config]:
        found = {field: _field(one, field) for field in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        for field, count in found.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise UnsupportedModel(
                    f"{field} in the config.json of {name} is {count!r}; it must be a whole number above 0."
                )
        heads, kv_heads, head_dim = found.values()
        if heads and kv_heads and heads % kv_heads:
            raise UnsupportedModel(
                f"The config.json of {name} has {heads} heads (num_attention_heads) for {kv_heads} key-value heads "
                "(num_key_value_heads), which do not divide them. Fetch the config.json of the original checkpoint."
            )
        if heads and hidden and not head_dim and hidden % heads:
            raise UnsupportedModel(
                f"The config.json of {name} has a hidden_size of {hidden} for {heads} heads (num_attention_heads), "
                "which do not divide it, and no head_dim. Fetch the config.json of the original checkpoint."
            )


def _each_layer(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the config of each layer, if layers differ in their keys and values; else none."""
    differ = any(
        isinstance(_field(config, field), list | tuple | dict) for field in ("num_key_value_heads", "head_dim")
    )
    by_layer: Any = getattr(config, "per_layer_config", None) if differ else None
    return [] if by_layer is None else [by_layer[number] for number in range(int(config.num_hidden_layers))]


def _field(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of the config; if it differs by layer, transformers raises, and all values are returned."""
    try:
        return getattr(config, name, None)
    except Exception as error:  # its exception class does not exist in older versions of transformers
        if "per-layer" not in str(error):
            raise
        return [str(error)]


def _dtype_name(name: str, field: str, form: str) -> str | None:
    """Return the dtype as transformers spells it; None: that of the weights. Raises UnsupportedModel."""
    if form == "auto":
        return None
    plain = form.removeprefix("torch.")
    if not isinstance(getattr(torch, plain, None), torch.dtype):
        raise UnsupportedModel(
            f"{field} in the config.json of {name} is {form!r}, which is no dtype. Fetch the config.json of the "
            "original checkpoint, or write the dtype of the weights there: float32, bfloat16 or float16."
        )
    return plain


def _with_todays_name(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters in which `su`, as Phi-3 was published with, is `longrope`."""
    return {key: "longrope" if key in ("type", "rope_type") and value == "su" else value for key, value in rope.items()}


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the checkpoint's transformers config. Raises UnsupportedModel."""
    config = parse_config(checkpoint.config, checkpoint.name)
    read_format(checkpoint.config, checkpoint.name)
    if not getattr(config, "is_encoder_decoder", False):
        config = text_part(config) or config
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"Models of type {config.model_type!r} are no causal language models in transformers.")
    first = model_class[0] if isinstance(model_class, list | tuple) else model_class
    refuse_config(checkpoint.name, checkpoint.config, config, first)
    return config


def key_mapping(checkpoint: Checkpoint, config: PreTrainedConfig) -> dict[str, str] | None:
    """Return from_pretrained's `key_mapping` to the names of the served model's tensors; None if they are equal.
    `config`: of the served model."""
    return text_names(checkpoint.config, config) or None


def parse_config(said: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """Parse config.json with transformers; remote code of the checkpoint `name` (auto_map) is never run. Raises
    UnsupportedModel for a model that transformers does not have."""
    kind = said.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UnsupportedModel(f"The config.json of {name} has no model_type: it does not say what model this is.")
    classes = said.get("auto_map")
    if kind not in CONFIG_MAPPING:
        code = "; the code that the checkpoint brings (auto_map in config.json) is never run" if classes else ""
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no models of type {kind!r}{code}. Use a checkpoint of an "
            "architecture that transformers has, or a newer transformers if that has it."
        )
    native = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ())
    names = [native] if isinstance(native, str) else list(native)
    own = str(classes.get("AutoModelForCausalLM") or "") if isinstance(classes, Mapping) else ""
    own = own.rpartition(".")[2]
    # InternLM3 has a class of its own, and transformers Llama's for it
    is_known = is_own_class(own, kind) or any(is_same_class(own, each) for each in names)
    if own and names and not is_known:
        raise UnsupportedModel(
            f"{name} brings its own code (auto_map in config.json: {own}), which is never run, and transformers' "
            f"models of type {kind!r} are {names[0]}: the same weights would say something else. Use a checkpoint of "
            f"{names[0]}."
        )
    fields = {field: value for field, value in said.items() if field not in ("auto_map", "space")}
    for field in ("torch_dtype", "dtype"):
        if isinstance(form := fields.get(field), str):
            fields[field] = _dtype_name(name, field, form)
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := fields.get(field), Mapping):
            fields[field] = _with_todays_name(rope)
    try:
        with tempfile.TemporaryDirectory() as folder:  # AutoConfig reads files, and does more than the class itself
            Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.name_or_path = name
        return config
    except (AttributeError, KeyError, OSError, StrictDataclassError, TypeError, ValueError) as error:
        words = " ".join(str(error).split())[:300].rstrip(".")
        raise UnsupportedModel(
            f"transformers cannot read the config of {name}: {words}. Fetch the config.json of the original checkpoint."
        ) from error


_WITHOUT_POSITIONS = 8192
"""Served window of models that have no positions, unless another is asked for: what FalconMamba was trained with."""


def positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions are served unless more are asked for; None if config.json does not say."""
    names = "max_position_embeddings", "max_seq_len", "seq_length"  # MPT has the second, BLOOM the third or none
    found = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return int(rope["original_max_position_embeddings"])  # beyond it all angles are others (networks/fixed_rope)
    if found is None and config.model_type == "bloom":
        return 2048
    if config.model_type in WITHOUT_ATTENTION:
        return _WITHOUT_POSITIONS
    return None if found is None else int(found)


def longest(config: PreTrainedConfig) -> int | None:
    """Return how many positions may be asked for; None if config.json does not say, or the model has none. A factor in
    `rope_scaling` stretches those trained, of YaRN the original ones, as the makers of such configs ask for it."""
    rope, trained = getattr(config, "rope_parameters", None) or {}, positions(config)
    if rope.get("rope_type") == "longrope":
        return int(config.max_position_embeddings)
    if config.model_type in WITHOUT_ATTENTION:
        return None
    factor = float(rope.get("factor") or 1.0) if rope.get("rope_type") in ("dynamic", "linear", "yarn") else 1.0
    if trained is None or factor <= 1.0:
        return trained
    original = rope.get("original_max_position_embeddings") if rope["rope_type"] == "yarn" else trained
    return max(trained, int((original or trained) * factor))


def has_linear_biases(config: PreTrainedConfig) -> bool:
    """Return whether attention has linear biases instead of rotary positions (ALiBi)."""
    return config.model_type in (ALIBI_LLAMA, "bloom", "mpt") or (config.model_type == "falcon" and bool(config.alibi))


def head_scale(config: PreTrainedConfig) -> float:
    """Return the factor that the family multiplies its logits by."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / float(config.logits_scaling)  # Granite
    if config.model_type == "falcon_h1":
        return float(config.lm_head_multiplier)
    return float(getattr(config, "logit_scale", None) or 1.0)  # Cohere


def head_softcap(config: PreTrainedConfig) -> float | None:
    """Return the soft cap of the family's logits, cap·tanh(logit/cap), or None."""
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return query heads, key-value heads, head dimension, as attention over the pages has them; of layers that differ,
    those of the widest heads."""
    layers = _each_layer(config)
    return max((_sizes(one) for one in layers), key=lambda found: (found[2], found[1])) if layers else _sizes(config)


def _sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    if config.model_type in WITHOUT_ATTENTION:
        return 0, 0, 0
    heads = int(config.num_attention_heads)
    if (latent := latent_dim(config)) is not None:
        return heads, 1, latent + int(config.qk_rope_head_dim)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if getattr(config, "new_decoder_architecture", False):
        kv_heads = int(config.num_kv_heads)  # Falcon
    elif getattr(config, "multi_query", False):
        kv_heads = 1  # GPTBigCode, Falcon
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, int(head_dim)


def latent_dim(config: PreTrainedConfig) -> int | None:
    """Return how many numbers of a key are its value in multi-head latent attention (MLA); None: it is no such."""
    rank = getattr(config, "kv_lora_rank", None)
    return int(rank) if rank else None


def is_chunked(config: PreTrainedConfig) -> bool:
    """Return whether some layers see chunks of positions alone (Llama 4)."""
    return _CHUNKED in (getattr(config, "layer_types", None) or ())


def kv_layers(config: PreTrainedConfig) -> tuple[LayerKV, ...]:
    """Return what the pages hold of each layer; empty if layers are alike and each has keys and values of its own."""
    modes: Sequence[str | None] = getattr(config, "kv_sharing_modes", None) or ()
    layers = _each_layer(config)
    if attends := attending_layers(config):
        _, kv_heads, head_dim = _sizes(config)
        return tuple(LayerKV(kv_heads * does, head_dim, number) for number, does in enumerate(attends))
    if config.model_type == "mimo_v2_flash":  # sliding layers have twice as many heads of keys and values
        _, kv_heads, head_dim = _sizes(config)
        counts = [kv_heads * (2 if kind == "sliding_attention" else 1) for kind in config.layer_types]
        return tuple(LayerKV(count, head_dim, n, int(config.v_head_dim)) for n, count in enumerate(counts))
    if not layers and "reuse" not in modes:
        return ()
    count = int(config.num_hidden_layers)
    shapes = [_sizes(one)[1:] for one in layers or [config] * count]
    stored: dict[str, int] = {}  # layer type -> its last layer that stores keys and values
    found = []
    for number, shape in enumerate(shapes):
        mode = modes[number] if modes else None
        if mode == "store":
            stored[config.layer_types[number]] = number
        found.append(LayerKV(*shape, number if mode != "reuse" else stored[config.layer_types[number]]))
    return tuple(found)


def kv_numbers(config: PreTrainedConfig) -> int:
    """Return the numbers that the pages of all layers hold for each token."""
    if layers := kv_layers(config):
        own = [one for number, one in enumerate(layers) if one.source == number]
        return sum(one.kv_heads * (one.head_dim + one.value_dim) for one in own)
    _, kv_heads, head_dim = sizes(config)
    return int(config.num_hidden_layers) * kv_heads * head_dim * (2 if latent_dim(config) is None else 1)


def has_odd_values(config: PreTrainedConfig) -> bool:
    """Return whether values are a part of the keys (MLA), or of another size, which few kinds of attention have."""
    return latent_dim(config) is not None or any(one.value_dim != one.head_dim for one in kv_layers(config))


def name_base(model: PreTrainedModel) -> None:
    """Set `base_model_prefix` to the model's own decoder. Llama 4's class has that of the whole multimodal model."""
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"


def decoder_layers(base: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the path of the decoder layers in `base`, and the layers."""
    for path, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == base.config.num_hidden_layers:
            return path, module
    raise UnsupportedModel(f"{type(base).__name__} has no list of {base.config.num_hidden_layers} decoder layers.")


def refuse_more_head(model: PreTrainedModel) -> None:
    """Refuse heads with weights beyond one linear, a scale and a cap. Raises UnsupportedModel."""
    known = {id(weight) for part in (model.base_model, model.get_output_embeddings()) for weight in part.parameters()}
    others = [path for path, weight in model.named_parameters() if id(weight) not in known]
    if others:
        raise UnsupportedModel(
            f"{type(model).__name__} has weights between its last layer and its output head ({others[0]}); only models "
            "whose head is one linear are served."
        )
