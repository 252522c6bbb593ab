"""Cosines and sines of all positions so far, computed in pieces that are always alike."""

from __future__ import annotations

import torch
from torch import Tensor

from space_kernels.layers.rotary import angles

_PIECE = 1024
"""Positions computed at once: always so many, so that a position's angles do not depend on who came before."""


class RotaryTable:
    """Grows with the positions that are asked for."""

    def __init__(self, frequencies: Tensor, scaling: float = 1.0) -> None:
        """frequencies [D/2] float32, on the CPU; `scaling`: the family's, of both tables."""
        self._frequencies, self._scaling = frequencies, scaling
        self.cos = self.sin = frequencies.new_empty(0, len(frequencies))  # [positions, D/2] float32

    def reach(self, num_positions: int) -> None:
        """Have the positions 0 .. num_positions - 1."""
        known = len(self.cos)
        if num_positions <= known:
            return
        missing = range(known, max(num_positions, 2 * known), _PIECE)
        pieces = [angles(torch.arange(begin, begin + _PIECE), self._frequencies, self._scaling) for begin in missing]
        self.cos = torch.cat([self.cos, *(cos for cos, _ in pieces)])
        self.sin = torch.cat([self.sin, *(sin for _, sin in pieces)])
