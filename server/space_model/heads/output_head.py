"""From hidden states to logits: the head's weights and the family's scale and cap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from space_kernels.build.cpu_library import cpu_library
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.cuda_linear import CudaLinear
from space_kernels.linear.int8_linear import Int8Linear
from space_kernels.linear.packed_linear import PackedLinear, pad_rows
from torch import Tensor, nn
from torch.nn import functional as F

from space_model.mapped_files import let_go

_VOCABULARY_TILE = 64
"""The packed head is padded with zero rows to a multiple of this, so that element-wise work on logits has no tail."""


class OutputHead:
    """logits = cap(scale · hidden·Eᵀ + bias), float32."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        packed: bool = True,
        int8: bool = False,
        keeps_rows: bool = True,
        linear: Callable[[Tensor, Tensor | None], nn.Module] = CudaLinear,
    ) -> None:
        """weight [V, hidden]: kept for gathered rows; the CPU's full matmul uses a packed copy.

        `packed` False: no copy, for a head with gathered rows only; `int8`: the copy is int8 with scales;
        `keeps_rows` False: no gathered rows are needed. `linear` replaces the full matmul.
        """
        self.weight = weight.detach() if keeps_rows else None
        self.bias = None if bias is None else bias.detach()
        self.vocab_size = len(weight)
        self._scale, self._softcap = scale, softcap
        self._linear: nn.Module
        if packed and weight.device.type == "cpu":
            missing = -len(weight) % _VOCABULARY_TILE
            padded_bias = None if self.bias is None else F.pad(self.bias, (0, missing))
            padded = F.pad(weight.detach(), (0, 0, 0, missing))
            library = cpu_library() if CompiledLinear.takes(padded) else None
            if library is not None:
                self._linear = CompiledLinear(library, padded, padded_bias, wide=True, int8=int8)
            elif int8:
                self._linear = Int8Linear(padded, padded_bias, wide=True)
            else:
                self._linear = PackedLinear(padded, padded_bias)
            let_go(weight)
        else:
            self._linear = linear(weight.detach(), self.bias)

    @property
    def is_plain(self) -> bool:
        """Return whether the logits are a plain matmul without bias, scale or cap."""
        return self.bias is None and self._scale == 1.0 and self._softcap is None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32; a row's logits do not depend on the other rows."""
        padded = hidden if isinstance(self._linear, CompiledLinear) else pad_rows(hidden)
        logits = self._linear(padded)
        return self._finish(logits.float())[: len(hidden), : self.vocab_size]

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32: the logits of those ids."""
        if self.weight is None:
            raise RuntimeError("The rows of this head were not kept: there is no draft head to rescore with.")
        logits_at = _logits_at
        if hidden.is_cuda:
            from space_kernels.step.draft_head_triton import logits_of as logits_at
        logits = logits_at(hidden, self.weight, ids)
        if self.bias is not None:
            logits = logits + self.bias[ids]
        return self._finish(logits)

    def _finish(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits = logits.mul_(self._scale)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)


def _logits_at(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """hidden [N, hidden], ids [N, M] -> [N, M] float32: each row times its own rows of the weight."""
    rows = F.embedding(ids, weight)  # [N, M, hidden]
    return torch.bmm(rows.float(), hidden.float().unsqueeze(-1)).squeeze(-1)
