"""A few rows through a freshly loaded model, to see that it is what its config says."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from space_model.forward_batch import ForwardBatch, Segment
from space_model.model_error import UnsupportedModel
from space_model.model_facts import ModelFacts
from space_model.paged_attention_interface import Step
from space_model.paged_kv import PagedKV
from space_model.space_model import SpaceModel

_NUM_ROWS = 8
_BLOCK = 16
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def _rows(facts: ModelFacts) -> tuple[ForwardBatch, PagedKV]:
    ids = [(7 * i + 1) % facts.vocab_size for i in range(_NUM_ROWS)]
    batch = ForwardBatch.build([Segment(ids, 0, [0])], block_size=_BLOCK, mask_ids=(), device=facts.device)
    kv = PagedKV.allocate(
        num_layers=facts.num_layers,
        num_blocks=1,
        block_size=_BLOCK,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        dtype=facts.kv_dtype,
        device=facts.device,
    )
    return batch, kv


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, facts: ModelFacts) -> Tensor:
    """[rows, V] float32: what the untouched model says of the probe's rows. Every layer must use our attention."""
    batch, kv = _rows(facts)
    step = Step(batch, kv)
    try:
        out = model(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False, space_step=step)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UnsupportedModel(f"{type(model).__name__} does not run on paged attention: {error}") from error
    if step.layers_seen != list(range(facts.num_layers)):
        raise UnsupportedModel(
            f"{type(model).__name__} has {facts.num_layers} layers, of which {step.layers_seen} attend through "
            "transformers' AttentionInterface; all must, once each and in order."
        )
    logits: Tensor = out.logits[0].float()
    return logits


def check_logits(model: SpaceModel, expected: Tensor) -> None:
    """The assembled model must say the same, to rounding: else its head or its layers do something we do not know."""
    batch, kv = _rows(model.facts)
    found = model.logits(model.forward(batch, kv)[: batch.num_rows])
    # rounding of the network's dtype grows with depth; a missing scale, cap or bias is off by far more
    bound = _TOLERANCE[model.facts.dtype] * float(expected.abs().max()) + 1e-6
    worst = float((found - expected).abs().max())
    if not worst <= bound:
        raise UnsupportedModel(
            f"{model.facts.name} computes other logits here than in transformers (difference {worst:.3g}, "
            f"bound {bound:.3g}): its family does something that this server does not do."
        )
