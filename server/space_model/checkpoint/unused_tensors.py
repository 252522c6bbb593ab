"""Checks tensors of a checkpoint that the model does not use: which may be ignored, and what the others are.

A tensor that is ignored silently can make outputs wrong: the scales of quantised weights, an unmerged adapter, the
biases of another config.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.text_part import text_name, text_names
from space_model.model_error import UnsupportedModel

_log = logging.getLogger(__name__)

MAY_BE_LEFT_OUT: tuple[tuple[str, str], ...] = (
    (
        r"(^|\.)((rotary_emb|rotary_embedding|rotary_pos_emb|rope)\.)?"
        r"((original_)?inv_freq|cos_cached|sin_cached|rope_freqs|freqs_cis|freqs)$",
        "angles of rotary positions, which follow from config.json",
    ),
    (r"(^|\.)(attn|attention|self_attn)\.(masked_bias|bias)$", "causal masks, which every step makes for itself"),
    (r"(^|\.)(position_ids|token_type_ids|embeddings\.version)$", "counters, which every step makes for itself"),
    (
        r"^(model\.|base_model\.)?(vision_tower|vision_model|vision_encoder|visual|vision|vit|image_encoder|"
        r"multi_modal_projector|mm_projector|vision_projector|connector|patch_merger|aligner|image_newline|"
        r"vision_embed_tokens|embed_vision|perceiver|resampler|mlp1)(\.|$)",
        "the part that sees images: only text is served",
    ),
    (
        r"^(model\.)?(audio_tower|audio_encoder|audio_projector|audio_projection|embed_audio|speech_encoder|"
        r"speech_projector|talker|token2wav|code2wav|embed_tokens_extend)(\.|$)",
        "the part that hears or speaks: only text is served",
    ),
    (
        r"(^|\.)mtp(_block|_layers|_emb_norm|_hidden_norm|_linear_proj)?\.",
        "layers that predict tokens further on (MTP)",
    ),
    (r"(^|\.)num_batches_tracked$", "counters of training"),
)
"""Name patterns, and why outputs do not change without such tensors. transformers has more for some families."""

OTHER_PARTS = "parts of a model that sees or hears beside its text part: only text is served"
MTP_LAYERS = "layers that predict tokens further on (MTP), behind the last layer: --draft-model mtp drafts by them"

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?)\.(\d+)\.")
_ADAPTER = re.compile(
    r"(^|\.)(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|ia3_l|base_layer|hada_w\d|lokr_w\d|oft_[rR]|"
    r"modules_to_save|prompt_embeddings)(\.|$|_)"
)
_SCALE = re.compile(
    r"(^|[._])(scales?|scale_inv|scale_2|zero_point|zeros|qweight|qzeros|g_idx|absmax|quant_map|quant_state|SCB|"
    r"amax|pre_quant_scale|scaling_factor|weight_packed|weight_shape)(\.|$)"
)
_OTHER_HEADS = re.compile(r"^(v_head|value_head|score|reward_head|classifier|qa_outputs|regression_head)(\.|$)")


def check_found(
    checkpoint: Checkpoint, model: PreTrainedModel, found: Mapping[str, Any], needless: Collection[str] = ()
) -> None:
    """Check what transformers reports as missing, unexpected or mismatched. Raises UnsupportedModel unless all can be
    ignored. `needless`: tensor suffixes that do not affect a module's weight."""
    refuse_unused(checkpoint, model, (name for name in found["unexpected_keys"] if not name.endswith(tuple(needless))))
    if found["mismatched_keys"]:
        odd = sorted((str(name), tuple(kept), tuple(wanted)) for name, kept, wanted in found["mismatched_keys"])
        name, kept, wanted = odd[0]
        more = f" ({len(odd) - 1} more tensors have other shapes)" if len(odd) > 1 else ""
        raise UnsupportedModel(
            f"{name} of {checkpoint.name} has the shape {kept}; config.json makes it {wanted}{more}. Fetch the "
            "config.json that belongs to these weights."
        )
    refuse_missing(checkpoint.name, found["missing_keys"])


def refuse_missing(name: str, missing: Collection[str]) -> None:
    """Raises UnsupportedModel if the checkpoint `name` lacks tensors; the first is named."""
    if missing:
        raise UnsupportedModel(
            f"The weights of {name} lack {min(missing)} ({len(missing)} tensors missing). Fetch the whole checkpoint "
            "again, or the config.json that belongs to these weights."
        )


def refuse_unused(checkpoint: Checkpoint, model: PreTrainedModel, names: Iterable[str]) -> None:
    """Check the checkpoint's tensors `names`, which `model` does not use: each must be ignorable. Raises
    UnsupportedModel, which names the first that is not, its file, what it is, and what to do."""
    renames = text_names(checkpoint.config, model.config)
    text = _text_modules(model) if renames else None
    reasons = {name: _reason(text_name(name, renames), model, text) for name in names}
    refused = sorted(name for name, reason in reasons.items() if reason is None)
    if refused:
        name = refused[0]
        more = f" (and {len(refused) - 1} tensors more)" if len(refused) > 1 else ""
        file = _file_with(checkpoint, name)
        raise UnsupportedModel(
            f"{checkpoint.name} has {name}{more}{'' if file is None else f' in {file}'}, for which "
            f"{type(model).__name__} has no place as config.json describes it. {_explanation(name, model.config)}"
        )
    for said, count in sorted(Counter(reason for reason in reasons.values() if reason is not None).items()):
        _log.info("%s: %d tensors are left out: %s", checkpoint.name, count, said)


def _text_modules(model: PreTrainedModel) -> frozenset[str]:
    """Return the paths of the modules right below the text part of a whole model, and of its head."""
    prefix, base = model.base_model_prefix, model.base_model
    names = [name for name, _ in model.named_children()] + [f"{prefix}.{name}" for name, _ in base.named_children()]
    return frozenset(names) - {prefix}


def _reason(name: str, model: PreTrainedModel, text: frozenset[str] | None) -> str | None:
    """Return why this tensor may be ignored; None if it may not. `text`: the modules of which all tensors must be used
    in a model that has other parts, too; None: it is text alone."""
    for pattern, reason in MAY_BE_LEFT_OUT:
        if re.search(pattern, name):
            return reason
    for part in (model, model.base_model):
        for pattern in getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ():
            if re.search(pattern, name):
                return f"as transformers does for {type(part).__name__}"
    layers = int(model.config.num_hidden_layers)
    further = int(getattr(model.config, "num_nextn_predict_layers", 0) or 0)
    layer = _LAYER.search(name)
    if layer is not None and layers <= int(layer[1]) < layers + further:
        return MTP_LAYERS
    if text is None or _ADAPTER.search(name) or _OTHER_HEADS.search(name):
        return None
    is_text = any(name == module or name.startswith(f"{module}.") for module in text)
    return None if is_text else OTHER_PARTS


def _explanation(name: str, config: PreTrainedConfig) -> str:
    layer = _LAYER.search(name)
    if _ADAPTER.search(name):
        return (
            "It belongs to an adapter that is not merged into its weights: merge it with peft's merge_and_unload(), "
            "save the model, and serve that."
        )
    if _SCALE.search(name):
        return (
            "It belongs to quantised weights, and neither config.json nor a file beside it says how they are "
            "quantised (quantization_config): fetch the whole checkpoint again, or use the one it was made from."
        )
    if layer is not None and int(layer[1]) >= int(config.num_hidden_layers):
        return (
            f"It belongs to layer {layer[1]}, and num_hidden_layers is {config.num_hidden_layers}, counted from 0: "
            "fetch the config.json that belongs to these weights."
        )
    if _OTHER_HEADS.search(name):
        return (
            "It is the head of a model that scores or classifies text: use a checkpoint of the causal language model."
        )
    if name.endswith(".bias"):
        return (
            "The model has no such bias: fetch the config.json that belongs to these weights (attention_bias, "
            "mlp_bias), or use a checkpoint of an architecture that transformers has."
        )
    return (
        "The weights are of another architecture than config.json says: fetch the config.json that belongs to them, "
        "or use a checkpoint of an architecture that transformers has."
    )


def _file_with(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the file that has the tensor; None if transformers renamed it."""
    for file in checkpoint.weights:
        try:
            with safe_open(file, framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                    return file.name
        except SafetensorError:
            continue
    return None
