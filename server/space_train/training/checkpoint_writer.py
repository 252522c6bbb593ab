"""Writes a finished run as a checkpoint folder that `spaceserve serve` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from space_model.adapters.gated_lora import GATED_LORA_FILE
from space_model.checkpoint.checkpoint import Checkpoint
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from space_train.networks.adapters import DraftHead
from space_train.networks.trainee import Trainee

HEAD_FILE = "draft_head.safetensors"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files copied from the base besides its weights: tokenizer, chat template, generation config."""


def write_checkpoint(
    trainee: Trainee,
    weights: Mapping[str, Tensor],
    source: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    acceptance: Sequence[float] = (),
    chat_template: str | None = None,
) -> None:
    """Write `trainee` to the empty `folder`. `weights`: its unsharded state; `source`: the checkpoint it started from;
    `dtype` to write (None: as read); `acceptance`: held-out acceptance of draft 1, 2, …, the server's initial estimate;
    `chat_template`: replaces the source's.

    The files of a frozen base are hard-linked, or copied if the file system has no links. Raises OSError if the disk
    is full.
    """
    model, plan = trainee.decoder.model, trainee.plan
    config = dict(source.config)
    if plan.trains_base:
        _write_weights(model, weights, folder, dtype)
        config["vocab_size"] = len(model.get_input_embeddings().weight)
        if dtype is not None:
            config.pop("dtype", None)
            config["torch_dtype"] = str(dtype).removeprefix("torch.")
    else:
        for file in (*source.weights, *source.folder.glob("model.safetensors.index.json")):
            _link(file, folder / file.name)
    config.pop("space", None)
    if plan.has_masks:
        config["space"] = space_section(trainee)
        if acceptance:
            config["space"]["acceptance"] = [round(chance, 3) for chance in acceptance]
        if trainee.adapters is not None:  # an adapter needs exactly the base weights it was trained on
            config["space"]["base_sha256"] = source.weights_sha256()
    number = torch.float32 if dtype is None else dtype
    if trainee.adapters is not None:
        trainee.adapters.export(number).save(folder / GATED_LORA_FILE)
    if trainee.head is not None:
        _write_head(weights, folder / HEAD_FILE, number)
    for file in folder.glob("*.safetensors"):
        if file.stat().st_nlink == 1:
            file.chmod(0o644)  # safetensors makes files readable by the owner only
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in {file for pattern in COPIED for file in source.folder.glob(pattern)}:
        if file.name != "config.json" and not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, folder / file.name)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")  # overrides the one in the config


def space_section(trainee: Trainee) -> dict[str, Any]:
    """Return the `space` section of config.json."""
    plan, head = trainee.plan, None
    if trainee.head is not None:
        head = {
            "file": HEAD_FILE,
            "form": trainee.head.form.value,
            "hidden": trainee.head.w1.shape[0],
            "embedding_scale": trainee.head.embedding_scale,
        }
    ids = [] if trainee.adapters is not None else trainee.mask_ids
    shared = len(set(ids)) == 1 and len(ids) > 1
    return {
        "num_masks": plan.num_masks,
        "mask_token_ids": ids[:1] if shared else ids,
        "adapter": GATED_LORA_FILE if trainee.adapters is not None else None,
        "draft_head": head,
    }


def _write_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype | None
) -> None:
    """Write all weights of the model in transformers' shards."""
    prefix = "decoder.model."
    state: dict[str, Tensor] = {}
    written: dict[tuple[int, torch.Size], Tensor] = {}  # keep tied weights one tensor, so that the file has them once
    for name, tensor in weights.items():
        if name.startswith(prefix):
            key = tensor.data_ptr(), tensor.shape
            if key not in written:
                wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
                written[key] = tensor.detach().to(wanted)
            state[name.removeprefix(prefix)] = written[key]
    # transformers rejects some generation configs on save that it accepts on load; the source's file is copied instead.
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder, state_dict=state)
    (folder / "generation_config.json").unlink(missing_ok=True)


def _write_head(weights: Mapping[str, Tensor], file: Path, dtype: torch.dtype) -> None:
    tensors = {
        f"draft_head.{name}.weight": weights[f"head.{name}"].detach().cpu().to(dtype).contiguous()
        for name in ("w1", "w2")
    }
    save_file(tensors, file, metadata={"format": "pt"})


def read_head(head: DraftHead, file: Path) -> None:
    """Load the weights in `file` into `head`, which has the same size."""
    tensors = load_file(file)
    with torch.no_grad():
        head.w1.copy_(tensors["draft_head.w1.weight"])
        head.w2.copy_(tensors["draft_head.w2.weight"])


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file.resolve())
    except OSError:
        shutil.copyfile(file, target)
