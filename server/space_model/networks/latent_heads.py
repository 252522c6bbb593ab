"""Multi-head latent attention (MLA) over pages of compressed keys: the products that expand them go to the queries.

A token's page slot holds its latent c [L] and its rotated part r [rope]. Each head's key is (U·c, r) and its value V·c,
with U and V its parts of kv_b_proj, so scores and outputs need no expanded key (DeepSeek-V2, arXiv 2405.04434, 2.1.2):

    score  = q·U·c + q_rope·r = (q·U, q_rope) · (c, r)
    output = V · Σ weight·c

All rows are computed so, chain rows and masks, in a prompt and while decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from space_kernels.linear.head_linears import HeadLinears
from torch import Tensor, nn

from space_model.stored_weights import numbers_of

EXPANSION = "kv_b_proj"
"""The linear of an attention module that expands a latent to the keys and values of all heads."""


class LatentHeads:
    """What one attention module does to its queries before it attends, and to the outputs behind."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._sizes = [int(module.qk_nope_head_dim), int(module.qk_rope_head_dim)]
        self._shape = int(module.num_heads), self._sizes[0] + int(module.v_head_dim), int(module.kv_lora_rank)
        self.latent_dim = int(module.kv_lora_rank)
        self._dense: Tensor | None = None  # of a linear that is none of torch's

    def queries(self, query: Tensor) -> Tensor:
        """[1, H, R, nope + rope] -> [1, H, R, L + rope]"""
        plain, turned = torch.split(query, self._sizes, dim=-1)
        expansion = getattr(self._module, EXPANSION)
        if isinstance(expansion, Expansion):
            return expansion.queries(plain[0], turned[0])[None]
        return torch.cat([plain @ self._numbers(expansion, query.dtype)[:, : self._sizes[0]], turned], dim=-1)

    def outputs(self, attended: Tensor) -> Tensor:
        """[R, H, L] -> [R, H, value]"""
        expansion = getattr(self._module, EXPANSION)
        if isinstance(expansion, Expansion):
            return expansion.outputs(attended)
        by_head = attended.transpose(0, 1) @ self._numbers(expansion, attended.dtype)[:, self._sizes[0] :].mT
        return by_head.transpose(0, 1)

    def _numbers(self, expansion: Any, dtype: torch.dtype) -> Tensor:
        """Return [H, nope + value, L]; those of a library's linear come out of a product with the identity, once."""
        if type(expansion) is nn.Linear:
            return expansion.weight.view(self._shape)
        if self._dense is None:
            some = next(tensor for tensor in (*expansion.parameters(), *expansion.buffers()))
            identity = torch.eye(self.latent_dim, dtype=dtype, device=some.device)
            self._dense = expansion(identity).T.contiguous().view(self._shape)
        return self._dense

    def row_invariant(self, expansion: nn.Module) -> Expansion:
        """Return what replaces the expanding linear on a CPU."""
        return Expansion(numbers_of(expansion).view(self._shape), self._sizes[0])


def is_absorbed(model: nn.Module, path: str) -> bool:
    """Return whether the linear at `path` is one by which queries are multiplied instead of keys."""
    parent, _, name = path.rpartition(".")
    return name == EXPANSION and hasattr(model.get_submodule(parent), "expand_kv")


def expansions(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the linears by which queries are multiplied instead of keys. They stay plain numbers."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            yield module.get_submodule(EXPANSION)


class Expansion(nn.Module):
    """Both parts of the expansion, head by head, as row-invariant linears. They are held as plain numbers."""

    def __init__(self, weight: Tensor, key_dim: int) -> None:
        """weight [H, nope + value, L]; `key_dim`: nope."""
        super().__init__()
        self.keys = HeadLinears([head[:key_dim].t() for head in weight])
        self.values = HeadLinears([head[key_dim:] for head in weight])

    def queries(self, plain: Tensor, turned: Tensor) -> Tensor:
        """[H, R, nope], [H, R, rope] -> [H, R, L + rope], in memory row by row"""
        num_heads, num_rows, turned_dim = turned.shape
        joined = plain.new_empty(num_rows, num_heads, self.keys.out_features + turned_dim).transpose(0, 1)
        joined[..., self.keys.out_features :] = turned
        self.keys(plain, joined[..., : self.keys.out_features])
        return joined

    def outputs(self, attended: Tensor) -> Tensor:
        """[R, H, L] -> [R, H, value]"""
        num_rows, num_heads, _ = attended.shape
        out = attended.new_empty(num_rows, num_heads, self.values.out_features)
        self.values(attended.transpose(0, 1), out.transpose(0, 1))
        return out
