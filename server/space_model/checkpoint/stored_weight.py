"""Weights that stay as their file has them."""

from __future__ import annotations

from collections.abc import Sequence

from space_kernels.linear.gguf_blocks import Blocks
from space_kernels.linear.packed_int4 import PackedInt4

StoredWeight = Sequence[Blocks | PackedInt4]
"""A weight [out, in]: tensors of the file, below each other."""

PANEL = 16
"""Outputs of a weight that others are joined to come in multiples of this (LANES of cpu_linear.py)."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that compact networks fuse."""
