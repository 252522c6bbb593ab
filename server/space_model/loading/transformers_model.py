"""A checkpoint as a whole transformers model, for training and for comparisons with transformers' own generation."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.quantized_formats import read_format
from space_model.checkpoint.unused_tensors import check_found
from space_model.loading.load_progress import show_load_progress_on_terminals
from space_model.loading.whole_model import stream_model
from space_model.model_error import UnsupportedModel


def read_whole_model(checkpoint: Checkpoint, dtype: torch.dtype | None) -> PreTrainedModel:
    """Read a checkpoint as a transformers model in `dtype`, None: as saved. Raises UnsupportedModel if it cannot be
    read, or if a tensor is missing or has no place in it."""
    config = family.read_config(checkpoint)
    if checkpoint.gguf is not None:
        chosen: torch.dtype = config.dtype if dtype is None else dtype
        made, found = stream_model(checkpoint, config, chosen, torch.device("cpu"), copies=True)
        check_found(checkpoint, made, found)
        return made
    renames = family.key_mapping(checkpoint, config)
    try:
        show_load_progress_on_terminals()
        model, found = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=renames,
            ignore_mismatched_sizes=True,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"The weights of {checkpoint.name} cannot be read: {error}") from error
    form = read_format(checkpoint.config, checkpoint.name)
    check_found(checkpoint, model, found, () if form is None else [f".{part}" for part in form.needless])
    loaded: PreTrainedModel = model
    if renames is not None:  # what is trained is the text part alone, and is written with its own names
        loaded._weight_conversions = get_model_conversion_mapping(loaded)
    return loaded
