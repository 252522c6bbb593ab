"""Loads a checkpoint as a whole transformers model, streaming the weights to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import key_mapping
from space_model.checkpoint.weight_stream import JoinedRows, WeightStream, send
from space_model.networks.llama_parts import FAMILIES
from space_model.quantization.quantized_model import (
    Loaded,
    QuantizedWeights,
    log_dense,
    open_weights,
    without_quantization,
)


def stream_model(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    as_kept: bool = False,
    copies: bool | None = None,
) -> Loaded:
    """Return the model with its dequantised weights of `dtype` on `device`; no weight is held twice.

    `as_kept`: weights stay on the host as views of their files, in the files' dtype; `copies`: see WeightStream.
    """
    plain = without_quantization(config) if hasattr(config, "quantization_config") else config
    model_class = _class_of(plain)
    if getattr(model_class, "config_class", None) is plain.sub_configs.get("text_config"):
        plain = plain.get_text_config()
    with open_weights(checkpoint) as files:
        joined = None
        if config.model_type in FAMILIES and not isinstance(files, QuantizedWeights):
            joined = JoinedRows(lambda name: files.shape(name)[0] if name in files else None)
        if any(getattr(plain, name, None) for name in ("num_local_experts", "num_experts")):
            copies = True  # transformers stacks experts, and nothing would release the pages of their views
        stream = WeightStream(files, device, joined=joined, as_kept=as_kept, copies=copies)
        model, found = model_class.from_pretrained(
            None,
            config=plain,
            state_dict=stream.unread(),
            dtype=dtype,
            output_loading_info=True,
            key_mapping=key_mapping(checkpoint),
            ignore_mismatched_sizes=True,  # reports mismatched shapes instead of only raising
        )
        found["unexpected_keys"] = set(found["unexpected_keys"]) | set(files.unused())
        log_dense(checkpoint, files, model.parameters(), dtype)
    return model, found


def settle(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Move the remaining host tensors to `device`, one weight after another; shared weights stay shared."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.device.type == device.type:
                continue
            if weight not in moved:
                place = torch.empty(weight.shape, dtype=dtype, device=device)
                send(weight.detach(), place)
                moved[weight] = nn.Parameter(place, requires_grad=False)
            setattr(module, name, moved[weight])
    model.to(device)  # buffers keep their dtype


def _class_of(config: PreTrainedConfig) -> Any:
    """Return the model class of this config; of several, the one that the config names."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = [one for one in found if one.__name__ in (getattr(config, "architectures", None) or ())]
    return (named or found)[0]
