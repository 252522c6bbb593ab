"""Recognises and describes PEFT folders: they are not models, and most are not gated adapters either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from space_model.checkpoint.checkpoint_file import read_object
from space_model.model_error import CheckpointNotFound

PEFT_CONFIG, PEFT_WEIGHTS, PEFT_MASKS = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "mask_embeddings.safetensors",
)

_NO_WEIGHTS = {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"}
"""PEFT types that extend the prompt or its keys, and cannot be merged into base weights."""


def describe_peft(folder: Path) -> str:
    """Return a description such as `a LoRA adapter of peft for meta-llama/Llama-3.2-1B`."""
    config = read_object(folder / PEFT_CONFIG)
    return f"{_kind(config)} of peft for {_base(config)}"


def how_to_merge(folder: Path) -> str:
    """Return how to merge the adapter in this folder into a model."""
    config = read_object(folder / PEFT_CONFIG)
    if str(config.get("peft_type")).upper() in _NO_WEIGHTS:
        return "It cannot be merged into weights, and prompts of its kind are not served: serve the base without it."
    return (
        f"Merge it into its base, and serve the result: peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})"
        ".merge_and_unload().save_pretrained(NEW_FOLDER), with the base's tokenizer beside it."
    )


def is_gated(folder: Path) -> bool:
    """Return whether the folder has mask embeddings, which a gated adapter has beyond a LoRA."""
    return (folder / PEFT_MASKS).is_file()


def refuse_as_model(folder: Path, section: object) -> None:
    """Refuse an adapter's folder as a model, unless its `space` section declares the adapter as a draft adapter.

    Raises CheckpointNotFound.
    """
    if not (folder / PEFT_CONFIG).is_file() or (isinstance(section, dict) and section.get("adapter") is not None):
        return
    said = describe_peft(folder)
    if is_gated(folder):
        base = _base(read_object(folder / PEFT_CONFIG))
        raise CheckpointNotFound(
            f"{folder} is a gated adapter, and no model: it drafts for {base}. Serve that one with it: "
            f"--model {base} --adapter NAME={folder}"
        )
    if any(folder.glob("model*.safetensors")):
        raise CheckpointNotFound(
            f"{folder} has a model and {said} beside it, which is not applied to it ({PEFT_CONFIG}). "
            f"{how_to_merge(folder)} Or move {PEFT_CONFIG} out of the folder, if the model is meant without it."
        )
    raise CheckpointNotFound(f"{folder} is {said}, and no model: it has no weights of its own. {how_to_merge(folder)}")


def _kind(config: dict[str, Any]) -> str:
    kind = str(config.get("peft_type") or "unnamed").upper()
    if kind == "LORA":
        return "a DoRA adapter" if config.get("use_dora") else "a LoRA adapter"
    return f"an adapter of type {kind}"


def _base(config: dict[str, Any]) -> str:
    return str(config.get("base_model_name_or_path") or "its base")
