"""A finished run as a checkpoint folder that `spaceserve serve` loads as it is."""

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

from space_train.networks.draft_head import DraftHead
from space_train.networks.trainee import Trainee

HEAD_FILE = "draft_head.safetensors"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Of the base, besides its weights: tokenizers of every kind, chat templates, how it generates."""


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
    """Write `trainee` to `folder`, which is empty. `weights`: its state, whole; `source`: what it was trained from;
    `dtype` to write (None: as read); `acceptance`: of draft 1, 2, …, as held-out text says: a server begins with it;
    `chat_template`: instead of the source's.

    Where the base did not move its files are linked, or copied where the file system has no links. Raises OSError where
    there is no room.
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
        if trainee.adapters is not None:  # it drafts for the weights that it was trained on, which stay as they are
            config["space"]["base_sha256"] = source.weights_sha256()
    number = torch.float32 if dtype is None else dtype
    if trainee.adapters is not None:
        trainee.adapters.export(number).save(folder / GATED_LORA_FILE)
    if trainee.head is not None:
        _write_head(weights, folder / HEAD_FILE, number)
    for file in folder.glob("*.safetensors"):
        if file.stat().st_nlink == 1:
            file.chmod(0o644)  # safetensors writes files that only their owner can read
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in {file for pattern in COPIED for file in source.folder.glob(pattern)}:
        if file.name != "config.json" and not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, folder / file.name)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")  # it wins over the config's


def space_section(trainee: Trainee) -> dict[str, Any]:
    """The `space` section of config.json."""
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
    """All weights of the model, in shards of transformers' own."""
    prefix = "decoder.model."
    state: dict[str, Tensor] = {}
    written: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights stay one tensor, or both would be in the file
    for name, tensor in weights.items():
        if name.startswith(prefix):
            key = tensor.data_ptr(), tensor.shape
            if key not in written:
                wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
                written[key] = tensor.detach().to(wanted)
            state[name.removeprefix(prefix)] = written[key]
    # transformers refuses to write some generation configs that it reads; the source's is copied as it is.
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
    """Give `head` the weights in `file`, which are of its size."""
    tensors = load_file(file)
    with torch.no_grad():
        head.w1.copy_(tensors["draft_head.w1.weight"])
        head.w2.copy_(tensors["draft_head.w2.weight"])


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file.resolve())
    except OSError:
        shutil.copyfile(file, target)
