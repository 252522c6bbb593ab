"""Our paged attention, registered where transformers looks attention functions up."""

from __future__ import annotations

from dataclasses import dataclass, field

from space_kernels.attention import space_attention
from space_kernels.dispatch import Attention
from torch import Tensor, nn
from transformers import AttentionInterface

from space_model.forward_batch import ForwardBatch
from space_model.model_error import UnsupportedModel
from space_model.paged_kv import PagedKV

ATTENTION_NAME = "spaceserve"

_MEANINGLESS_HERE = {"position_ids", "cache_position", "use_cache", "is_causal"}
"""Keywords that say nothing the step does not say itself: which rows there are and what each sees."""


@dataclass
class Step:
    """What the attention of every layer needs: passed through the model's forward as one keyword."""

    batch: ForwardBatch
    kv: PagedKV
    attention: Attention = space_attention
    layers_seen: list[int] = field(default_factory=list)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    space_step: Step,
    **others: object,
) -> tuple[Tensor, None]:
    """query [1, H, R, D], key and value [1, G, R, D] -> [1, R, H, D]."""
    asked = {name for name, value in others.items() if value is not None and value is not False}
    unknown = sorted(asked - _MEANINGLESS_HERE)
    if unknown or attention_mask is not None or dropout:
        what = ", ".join(unknown) or ("a mask of its own" if attention_mask is not None else "dropout")
        raise UnsupportedModel(
            f"The attention of {type(module).__name__} asks for {what}, which paged attention does not do "
            "(s_aux: attention sinks)."
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    space_step.layers_seen.append(layer)
    out = space_step.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        space_step.kv.keys[layer],
        space_step.kv.values[layer],
        space_step.batch.rows,
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
