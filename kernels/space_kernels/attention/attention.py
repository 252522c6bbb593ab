"""What an attention backend takes: `attention(qkv, pages, rows, spec)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from space_kernels.attention.alibi import Alibi
from space_kernels.paging.step_rows import StepRows


class QKV(NamedTuple):
    """The queries, keys and values of a step's rows in one layer; R is padded. E is D unless a backend says more."""

    query: Tensor  # [R, H, D]
    key: Tensor  # [R, G, D]
    value: Tensor  # [R, G, E]


class KVPages(NamedTuple):
    """One layer's part of the paged KV cache."""

    keys: Tensor  # [num_blocks, G, block_size, D]
    values: Tensor  # [num_blocks, G, block_size, E]; of latent attention the keys


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes."""

    scale: float  # factor of the scores
    window: int | None = None  # positions a row sees back, its own included; None: all
    softcap: float | None = None  # scores become softcap·tanh(score/softcap)
    alibi: Alibi | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    """[H] float32: a score of each head that adds to its sum of weights, as of a key whose value is 0."""
    is_latent: bool = False
    """Multi-head latent attention (MLA): the first E numbers of a key are its value, and have no pages of their own."""
    chunk: int | None = None  # a row sees keys of its own chunk of so many positions, counted from 0; None: of all


def refuse_rare(spec: AttentionSpec, backend: str) -> None:
    """Raises ValueError if the spec has linear biases or chunks, or is latent attention, which `backend` does not
    compute."""
    if spec.alibi is not None:
        raise ValueError(f"Attention {backend!r} has no linear biases (ALiBi); use --attention torch.")
    if spec.is_latent:
        raise ValueError(f"Attention {backend!r} has no latent attention (MLA); use --attention torch.")
    if spec.chunk is not None:
        raise ValueError(f"Attention {backend!r} has no chunked attention (Llama 4); use --attention torch.")


Attention = Callable[[QKV, KVPages, StepRows, AttentionSpec], Tensor]
"""`space_attention` of one backend, or its variant for pages that already hold the step's keys: returns [R, H, E]."""
