"""Checks quantised checkpoints: training works if transformers can run them and their weights stay frozen."""

from __future__ import annotations

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.quantized_formats import BlockFp8, read_format
from space_model.model_error import UnsupportedModel
from space_model.quantization.quantized_model import has_kernels

from space_train.train_plan import TrainPlan


def check_can_start_from(checkpoint: Checkpoint, plan: TrainPlan) -> None:
    """Raise UnsupportedModel if a quantised base's weights would be trained, or its library is not installed."""
    form = read_format(checkpoint.config, checkpoint.name)
    if form is None or (isinstance(form, BlockFp8) and form.library):  # transformers dequantises these
        return
    said = f"{checkpoint.name} is quantised ({checkpoint.config['quantization_config']['quant_method']})"
    cure = "Train the model that it was quantised from."
    if plan.trains_base:
        raise UnsupportedModel(f"{said}, so that its weights cannot move, as method {plan.method} has them do. {cure}")
    if not has_kernels(form):
        lacks = (
            f"{form.library}, which computes with such weights, is not here" if form.library else "nothing trains so"
        )
        raise UnsupportedModel(f"{said}, and {lacks}. {cure}")
