"""Attention with linear biases (ALiBi, Press et al. 2022): scores that fall with the distance of a key."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor


class Bias(IntEnum):
    """What a slope is multiplied by. The softmax sees these as equal, but for rounding."""

    DISTANCE = 0  # the key's position minus the row's own
    POSITION = 1  # the key's position
    ROUNDED_POSITION = 2  # the key's position, with slope, position and product rounded to bfloat16


@dataclass(frozen=True, slots=True)
class Alibi:
    """What is added to the scores of each query head after scale and cap, a function of positions alone."""

    slopes: tuple[float, ...]  # [H]
    form: Bias = Bias.DISTANCE
    factor: float = 1.0  # of a rounded bias

    def bias(self, own: Tensor, keys: Tensor) -> Tensor:
        """own [S, P], keys [S, N] positions -> [S, H, P, N] float32; P is 1 unless distances count."""
        slopes, keys = self.on(own.device)[:, None, None], keys[:, None, None]
        if self.form is Bias.DISTANCE:
            return slopes * (keys - own[:, None, :, None]).float()
        if self.form is Bias.POSITION:
            return slopes * keys.float()
        return (slopes.bfloat16() * keys.bfloat16()).float().mul_(self.factor)

    def on(self, device: torch.device) -> Tensor:
        """Return the slopes on a device, as they are multiplied: [H] float32."""
        return _on(self.slopes, self.form is Bias.ROUNDED_POSITION, device)


@lru_cache(maxsize=256)
def _on(slopes: tuple[float, ...], rounded: bool, device: torch.device) -> Tensor:
    found = torch.tensor(slopes, dtype=torch.float32, device=device)
    return found.bfloat16().float() if rounded else found
