"""Muon for the matrices, AdamW for embeddings, norms and the rest, under one learning-rate multiplier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Optimiser:
    """Two optimisers that step together. Muon (orthogonalised momentum) learns more per token at these sizes."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        muon_rate: float,
        adam_rate: float,
        weight_decay: float = 0.1,
        clip_norm: float = 1.0,
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for module in modules:
            for name, parameter in module.named_parameters():
                is_matrix = parameter.dim() == 2 and "embedding" not in name
                (matrices if is_matrix else others).append(parameter)
        self.parameters, self.clip_norm = matrices + others, clip_norm
        self._optimisers: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self._optimisers["muon"] = torch.optim.Muon(
                matrices, lr=muon_rate, weight_decay=weight_decay, momentum=0.95
            )
        if others:
            self._optimisers["adam"] = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._peaks = {"muon": muon_rate, "adam": adam_rate}

    def step(self, multiplier: float) -> None:
        """One update at `multiplier` times the peak rates; the gradients are clipped, used and cleared."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        for name, optimiser in self._optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = self._peaks[name] * multiplier
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimiser.state_dict() for name, optimiser in self._optimisers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimiser in self._optimisers.items():
            optimiser.load_state_dict(state[name])
