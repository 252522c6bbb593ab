"""Our paged attention, registered as a transformers attention implementation."""

from __future__ import annotations

from dataclasses import dataclass, field

from space_kernels.attention.torch_backend import space_attention
from space_kernels.dispatch import Attention
from torch import Tensor, nn
from transformers import AttentionInterface

from space_model.geometry.forward_batch import ForwardBatch
from space_model.model_error import UnsupportedModel
from space_model.networks.paged_kv import PagedKV

ATTENTION_NAME = "spaceserve"

_MEANINGLESS_HERE = {"position_ids", "cache_position", "use_cache", "is_causal"}
"""Keywords to ignore: the batch already defines rows and masks."""


@dataclass
class AttentionStep:
    """What every layer's attention needs, passed through the model's forward as one keyword argument."""

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
    space_step: AttentionStep | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """query [1, H, R, D], key and value [1, G, R, D] -> [1, R, H, D]."""
    if space_step is None:
        raise UnsupportedModel(
            f"{type(module).__name__} is not handed what its model is called with (keywords of forward), so its keys "
            "and values cannot be paged."
        )
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModel(
            f"{type(module).__name__} attends to later tokens, too: the model is no causal language model, and writes "
            "no text. Use a checkpoint of one."
        )
    _, heads, _, size = space_step.kv.keys[0].shape
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] == size or key.shape[1] != heads:
        raise UnsupportedModel(
            f"{type(module).__name__} has {key.shape[1]} heads of keys, of size {key.shape[-1]}, and values of size "
            f"{value.shape[-1]}, where config.json says {heads} of size {size} (num_key_value_heads, head_dim): pages "
            "hold keys and values of one size, the same in all layers."
        )
    asked = {name for name, value in others.items() if value is not None and value is not False}
    unknown = sorted(asked - _MEANINGLESS_HERE)
    if unknown or attention_mask is not None or dropout:
        what = ", ".join(unknown) or ("a mask of its own" if attention_mask is not None else "dropout")
        raise UnsupportedModel(
            f"The attention of {type(module).__name__} asks for {what}, which paged attention does not do"
            f"{' (s_aux: attention sinks)' if 's_aux' in unknown else ''}."
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
