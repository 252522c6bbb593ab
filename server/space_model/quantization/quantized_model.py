"""Loads a quantised checkpoint as a transformers model with packed weights, if a library supports them; else warns.

The warning says what holding the weights dequantised costs.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import key_mapping
from space_model.checkpoint.quantized_formats import QuantizedFormat
from space_model.quantization.quantized_weights import has_kernels

_log = logging.getLogger(__name__)

Loaded = tuple[PreTrainedModel, dict[str, Any]]
"""A model, and transformers' report of missing and unexpected weights."""


def stays_packed(form: QuantizedFormat, device: torch.device) -> bool:
    """Return whether weights stay packed: on a GPU, if the library with the kernels is installed."""
    return device.type == "cuda" and has_kernels(form)


def read_packed(
    checkpoint: Checkpoint, config: PreTrainedConfig, form: QuantizedFormat, dtype: torch.dtype, device: torch.device
) -> Loaded | None:
    """Return the model with packed weights, loaded by transformers' quantizer; None if that is not possible."""
    try:
        model, found = packed_class(config).from_pretrained(
            str(checkpoint.folder),
            config=config,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=key_mapping(checkpoint),
            ignore_mismatched_sizes=True,
        )
        ends = tuple(f".{part}" for part in form.needless)
        found["unexpected_keys"] = {name for name in found["unexpected_keys"] if not name.endswith(ends)}
    except (ImportError, RuntimeError, ValueError) as error:
        _log.warning("%s: %s cannot multiply by its %s weights: %s", checkpoint.name, form.library, form.name, error)
        return None
    head = getattr(model.get_output_embeddings(), "weight", None)
    if model.dtype is not dtype or not isinstance(head, Tensor) or not head.is_floating_point():
        what = f"wants {model.dtype} instead of {dtype}" if model.dtype is not dtype else "packs the output head"
        _log.warning("%s: %s %s", checkpoint.name, form.library, what)
        return None
    _log.info("%s: %s weights stay packed; %s multiplies by them", checkpoint.name, form.name, form.library)
    return model, found


def packed_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class of models with this config."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def say_dense(
    checkpoint: Checkpoint, form: QuantizedFormat, count: int, kept: int, held: int, dtype: torch.dtype
) -> None:
    """Log the cost of holding quantised weights dequantised."""
    packed = f". On a GPU with {form.library} installed they stay packed" if form.library else ""
    _log.warning(
        "%s: %d %s weights are held as plain %s: %.1f MiB in memory for %.1f MiB on disk, and as much to read at every "
        "step%s",
        checkpoint.name,
        count,
        form.name,
        str(dtype).removeprefix("torch."),
        held / 2**20,
        kept / 2**20,
        packed,
    )


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the same config without quantisation."""
    fields = config.to_dict()
    fields.pop("quantization_config", None)
    return type(config).from_dict(fields)
