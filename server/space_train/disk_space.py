"""Check before a run begins that the disk has space for what it writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from space_model.checkpoint.checkpoint import Checkpoint
from transformers import PreTrainedModel

from space_train.estimate import GB
from space_train.networks.trainee import Trainee
from space_train.run_folder import holds_state
from space_train.train_plan import InvalidPlan, Method, TrainPlan

REPORTS = 20e6  # bytes of logs, plots, tokenizer files and own texts


class DiskFull(InvalidPlan):
    """The run writes more than the disk has free."""


def check_disk(out: Path, checkpoint: Checkpoint, meta: PreTrainedModel, plan: TrainPlan, dtype: torch.dtype) -> None:
    """Raise DiskFull if the disk of `out` cannot take the run's state and checkpoint. `meta`: the model on the meta
    device, which is changed; `dtype`: of the checkpoint."""
    trainee = Trainee(meta, plan, [0] * plan.num_masks if plan.method is Method.FULL else [])
    weights = sum(parameter.numel() for parameter in trainee.trained.values())
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    state = weights * 4 * (3 if plan.optimiser == "adamw" else 2)  # float32, with the optimiser's moments
    # Each save writes a new state beside the old one.
    parts = {"the run's state": state * (1 if holds_state(out) else 2)}
    parts["the checkpoint"] = weights * dtype.itemsize
    if not plan.trains_base and any(file.stat().st_dev != place.stat().st_dev for file in checkpoint.weights):
        parts["a copy of the model's weights, which are on another disk"] = sum(
            file.stat().st_size for file in checkpoint.weights
        )
    needed, free = sum(parts.values()) + REPORTS, shutil.disk_usage(place).free
    if needed > free:
        listed = ", ".join(f"{size / GB:.2g} for {part}" for part, size in parts.items())
        raise DiskFull(
            f"The disk of {out} has {free / GB:.2g} GB free, and the run needs {needed / GB:.2g} ({listed}). "
            "Make room, or give another --out."
        )
