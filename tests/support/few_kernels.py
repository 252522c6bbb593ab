"""Operations for a simulated device that leave out kernels of which the interpreter takes long."""

from __future__ import annotations

from dataclasses import replace

import torch
from space_kernels.attention.attention import QKV, KVPages
from space_kernels.dispatch import Ops, ops_for
from space_kernels.layers import layers
from space_kernels.layers.layers import HeadCounts, HeadNorm
from space_model.model_facts import ModelFacts
from torch import Tensor


def rotated(
    fused: Tensor,
    angles: tuple[Tensor, Tensor],
    pages: KVPages,
    slots: Tensor,
    heads: HeadCounts,
    norm: HeadNorm | None = None,
) -> QKV:
    """As `layers.rotary_store` without the store, which attention does here."""
    rows = fused.view(len(fused), heads.query + 2 * heads.kv, -1)
    turned = rows[:, : heads.query + heads.kv]
    (first, second), (cos, sin) = turned.chunk(2, dim=-1), (of_row[:, None] for of_row in angles)
    turned.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    return QKV(*torch.split(rows, [heads.query, heads.kv, heads.kv], dim=1))


def few_kernels(facts: ModelFacts) -> Ops:
    """Triton's attention and products; torch's own operations between them, which take the interpreter's time."""
    return replace(
        ops_for("cuda", exact=True),
        attend=None,
        rotary_store=rotated,
        rms_norm=layers.rms_norm,
        add_rms_norm=layers.add_rms_norm,
        swiglu=layers.swiglu,
    )
