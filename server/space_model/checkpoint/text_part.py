"""The text part of a model that also sees or hears: its config, its class, and the names of its tensors.

transformers has a causal language model for most text parts. For the others (Qwen2-VL's, for instance) one is made
here: the text model and a linear head, as in the whole model. Text alone has the same position in each section of
multimodal rotary positions, and transformers' text models make the sections of one row of positions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
)

from space_model.model_error import UnsupportedModel

_TEXT_NAMES = {
    r"^(?:thinker\.)?(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^thinker\.lm_head\.": "lm_head.",
    r"^(?:thinker\.)?(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
    r"^thinker\.model\.": "model.",
}
"""Names of a text part's tensors in the files of whole models, by all versions of transformers -> its own names."""

_OWN_NAMES = {
    "molmo2": {
        r"^(?:model\.)?transformer\.blocks\.": "model.layers.",
        r"^(?:model\.)?transformer\.ln_f\.": "model.norm.",
        r"^(?:model\.)?transformer\.": "model.",
    }
}

_CROSSING = "cross_attention_layers"

_NEVER_TEXT_ALONE = {
    "blip-2": "write about an image, with which every prompt begins",
    "instructblip": "write about an image, with which every prompt begins",
    "instructblipvideo": "write about a video, with which every prompt begins",
    "shieldgemma2": "classify images, and write no text",
    "voxtral_realtime": "write down what they hear, and every token is conditioned on sound",
}


def is_text_part(declared: Mapping[str, Any], config: PreTrainedConfig) -> bool:
    """Return whether the model of `config` is the text part of what config.json (`declared`) describes."""
    return bool(config.model_type != declared.get("model_type"))


def text_names(declared: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, str]:
    """Return patterns of the whole model's names of tensors, and what replaces them, one after another, in the text
    part of `config`; empty if config.json (`declared`) describes a model of text alone."""
    if not is_text_part(declared, config):
        return {}
    names: dict[str, str] = {}
    crossing = (declared.get("text_config") or {}).get(_CROSSING, getattr(type(config)(), _CROSSING, None)) or []
    new = 0
    for layer in range(int(config.num_hidden_layers) + len(crossing)) if crossing else ():
        place = f"image_layers.{layer}." if layer in crossing else f"model.layers.{new}."
        names[rf"^(?:model\.)?language_model\.(?:model\.)?layers\.{layer}\."] = place
        new += layer not in crossing
    return names | _TEXT_NAMES | _OWN_NAMES.get(str(declared.get("model_type")), {})


def text_name(name: str, names: Mapping[str, str]) -> str:
    """Return a tensor's name in the text part alone. `names`: of `text_names`."""
    for pattern, prefix in names.items():
        name = re.sub(pattern, prefix, name)
    return name


def text_part(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the model's text part as the whole model computes it; None if it is text alone. Raises
    UnsupportedModel."""
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    if text is config:
        whole = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
        if MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None and getattr(whole, "__name__", "").endswith(
            "ForCausalLM"
        ):
            AutoModelForCausalLM.register(type(config), whole, exist_ok=True)  # transformers lists it there alone
        return None
    if config.model_type in _NEVER_TEXT_ALONE:
        raise UnsupportedModel(
            f"Models of type {config.model_type!r} {_NEVER_TEXT_ALONE[config.model_type]}. Use a checkpoint of a model "
            "that also takes text alone."
        )
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))  # the whole model's field decides
    if crossing := getattr(text, _CROSSING, None):  # layers that only see images: text alone passes them by
        text.num_hidden_layers -= len(crossing)
        setattr(text, _CROSSING, [])
    if text.dtype is None:
        text.dtype = config.dtype
    text.name_or_path = config.name_or_path
    is_unpublished = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) is None
    if is_unpublished:
        base = _text_model(config, text)
        if base is not None:
            AutoModelForCausalLM.register(type(text), _with_head(base, type(text)), exist_ok=True)
    is_own = type(text).__module__ == type(config).__module__ or is_unpublished  # no family with checkpoints of its own
    if is_own and get_checkpoint_conversion_mapping(text.model_type) is None:
        inner = [one for one in get_checkpoint_conversion_mapping(config.model_type) or () if _is_inner(one)]
        if inner:
            register_checkpoint_conversion_mapping(text.model_type, inner)
    return text


def _is_inner(conversion: Any) -> bool:
    """Return whether a conversion of the whole model's tensors is one within layers, the text part's among them."""
    both = [conversion.source_patterns, conversion.target_patterns]
    patterns = [one for found in both for one in ([found] if isinstance(found, str) else found)]
    return not any(re.match(r"\^|\\?\.?model\b", one) or "language_model" in one for one in patterns)


def _text_model(config: PreTrainedConfig, text: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of the text part without its head; None if transformers' whole model has none."""
    try:
        found = MODEL_MAPPING.get(type(text), None)
    except ValueError:  # the table names a class that transformers does not have
        found = None
    if found is not None:
        return found  # type: ignore[no-any-return]
    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    for one in vars(sys.modules[whole.__module__]).values() if whole is not None else ():
        is_class = isinstance(one, type) and issubclass(one, PreTrainedModel)
        if is_class and one.__name__.endswith("TextModel") and getattr(one, "config_class", None) is type(text):
            return one  # type: ignore[no-any-return]
    return None


def _with_head(base: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return a causal language model class: `base`, then a linear head and the family's scale of logits."""
    common: Any = base.__mro__[1]  # the family's PreTrainedModel: its initialisation, and what it supports

    def __init__(self: Any, config: PreTrainedConfig) -> None:
        common.__init__(self, config)
        self.model = base._from_config(config)
        if not hasattr(self.model, "embed_tokens"):
            raise UnsupportedModel(f"{base.__name__} is no decoder from ids to a last hidden state.")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self: Any, input_ids: Tensor | None = None, *, logits_to_keep: int | Tensor = 0, **others: Any
    ) -> CausalLMOutputWithPast:
        out = self.model(input_ids=input_ids, **others)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        scaling = getattr(self.config, "logits_scaling", None)
        return CausalLMOutputWithPast(
            logits=logits / scaling if scaling else logits, past_key_values=out.past_key_values
        )

    members = {
        "__module__": __name__,
        "__init__": __init__,
        "forward": forward,
        "config_class": config_class,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    return type(f"{base.__name__.removesuffix('Model')}ForCausalLM", (common, GenerationMixin), members)
