"""Training starts from the weights that the checkpoint has, all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import UnsupportedModel
from space_model.testing import tiny_checkpoint
from space_train.session import load_base
from space_train.train_plan import TrainPlan


def test_training_starts_from_no_checkpoint_with_tensors_that_have_no_place(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    file = path / "model.safetensors"
    odd = {"model.layers.1.mlp.up_proj.weight_scale": torch.zeros(1)}
    save_file(load_file(file) | odd, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight_scale in model\.safetensors, for which"):
        load_base(Checkpoint.open(path), TrainPlan())
