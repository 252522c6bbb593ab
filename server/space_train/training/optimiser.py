"""AdamW for everything, or Muon for the matrices and AdamW for the rest, under one learning-rate multiplier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

SWITCHES = {"adam": "--learning-rate", "muon": "--muon-rate"}


class Diverged(RuntimeError):
    """The gradient of an update is not finite; the weights are unchanged."""


class Optimiser:
    """One or two optimisers that step together. Muon (orthogonalised momentum) learns more per token
    in small models."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        adam_rate: float,
        muon_rate: float | None = None,
        weight_decay: float = 0.1,
        clip_norm: float = 1.0,
    ) -> None:
        """`parameters` by name; with a `muon_rate`, Muon gets all matrices except embeddings."""
        matrices, others = list[nn.Parameter](), list[nn.Parameter]()
        for name, parameter in parameters.items():
            is_matrix = parameter.dim() == 2 and not any(word in name for word in ("embed", "lm_head"))
            (matrices if is_matrix and muon_rate is not None else others).append(parameter)
        self.parameters, self.clip_norm = matrices + others, clip_norm
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            rate = muon_rate or 0.0
            self.parts["muon"] = torch.optim.Muon(matrices, lr=rate, weight_decay=weight_decay, momentum=0.95)
        if others:
            decay = 0.0 if muon_rate is not None else weight_decay
            self.parts["adam"] = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=decay)
        self._peaks = {"muon": muon_rate or 0.0, "adam": adam_rate}

    def step(self, multiplier: float) -> None:
        """Clip the gradients, update at `multiplier` times the peak rates, and clear the gradients. Raises Diverged,
        with weights unchanged, if they are not finite; all processes raise, as they share the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(length):
            cure = " and ".join(f"a lower {SWITCHES[name]} than {self._peaks[name]:g}" for name in sorted(self.parts))
            raise Diverged(
                f"The gradient of the update has the norm {length}, so that nothing was learnt from it. "
                f"Begin anew with {cure}."
            )
        for name, optimiser in self.parts.items():
            for group in optimiser.param_groups:
                group["lr"] = self._peaks[name] * multiplier
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: optimiser.state_dict() for name, optimiser in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimiser in self.parts.items():
            optimiser.load_state_dict(state[name])
