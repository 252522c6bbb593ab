"""Reads a model family's transformers config: whether it is supported, its sizes, and its logit scale and cap."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.config_check import refuse_config
from space_model.checkpoint.quantized_formats import read_format
from space_model.model_error import UnsupportedModel


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the checkpoint's transformers config. Raises UnsupportedModel."""
    config = parse_config(checkpoint.config, checkpoint.name)
    read_format(checkpoint.config, checkpoint.name)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"Models of type {config.model_type!r} are no causal language models in transformers.")
    if type(config).sub_configs and not hasattr(config, "vocab_size"):
        config, model_class = _text_of(checkpoint, config)
    first = model_class[0] if isinstance(model_class, list | tuple) else model_class
    refuse_config(checkpoint.name, checkpoint.config, config, first)
    return config


_TEXT_PARTS = {
    "gemma3": {
        r"^language_model\.model\.": "model.",
        r"^model\.language_model\.": "model.",
        r"^language_model\.lm_head": "lm_head",
    },
}
"""Vision-language models whose text part is a separate model, and its tensor prefix."""


def key_mapping(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Return from_pretrained's `key_mapping` to the served model's tensor names; None if they are equal."""
    return _TEXT_PARTS.get(str(checkpoint.config.get("model_type")))


def _text_of(checkpoint: Checkpoint, config: PreTrainedConfig) -> tuple[PreTrainedConfig, Any]:
    """Return the text part of a multimodal model's config, and its class. Raises UnsupportedModel."""
    text = config.get_text_config()
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if text is config or model_class is None or config.model_type not in _TEXT_PARTS:
        raise UnsupportedModel(
            f"Models of type {config.model_type!r} see or hear, too; of such, only the text part of those of type "
            f"{', '.join(_TEXT_PARTS)} is served. Use a checkpoint of a model of text alone."
        )
    if text.dtype is None:
        text.dtype = config.dtype
    text.name_or_path = checkpoint.name
    return text, model_class


def parse_config(said: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """Parse config.json with transformers; remote code of the checkpoint `name` (auto_map) is never run.

    Raises UnsupportedModel for a model that transformers does not have.
    """
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
    if own and names and own.lower() not in {each.lower() for each in names}:
        raise UnsupportedModel(
            f"{name} brings its own code (auto_map in config.json: {own}), which is never run, and transformers' "
            f"models of type {kind!r} are {names[0]}: the same weights would say something else. Use a checkpoint of "
            f"{names[0]}."
        )
    fields = {field: value for field, value in said.items() if field not in ("auto_map", "space")}
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


def head_scale(config: PreTrainedConfig) -> float:
    """Return the factor that the family multiplies its logits by."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / float(config.logits_scaling)  # Granite
    return float(getattr(config, "logit_scale", None) or 1.0)  # Cohere


def head_softcap(config: PreTrainedConfig) -> float | None:
    """Return the soft cap of the family's logits, cap·tanh(logit/cap), or None."""
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return query heads, key-value heads, head dimension."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if getattr(config, "multi_query", False):
        kv_heads = 1  # GPTBigCode
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, int(head_dim)


def decoder_layers(base: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the path of the decoder layers in `base`, and the layers."""
    for path, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == base.config.num_hidden_layers:
            return path, module
    raise UnsupportedModel(f"{type(base).__name__} has no list of {base.config.num_hidden_layers} decoder layers.")


def refuse_more_head(model: PreTrainedModel) -> None:
    """Refuse heads with weights beyond one linear, a scale and a cap.

    Raises UnsupportedModel.
    """
    known = {id(weight) for part in (model.base_model, model.get_output_embeddings()) for weight in part.parameters()}
    others = [path for path, weight in model.named_parameters() if id(weight) not in known]
    if others:
        raise UnsupportedModel(
            f"{type(model).__name__} has weights between its last layer and its output head ({others[0]}); only models "
            "whose head is one linear are served."
        )
