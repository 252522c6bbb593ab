"""A growing table of the rotary embedding's cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor

from space_kernels.layers.rotary import angles

_PIECE = 1024
"""Positions computed at a time. Fixed, so that a position's angles do not depend on how the table grew."""


class RotaryTable:
    """Cosines and sines of all positions used so far."""

    def __init__(self, frequencies: Tensor, scaling: float = 1.0) -> None:
        """frequencies [D/2] float32, on the CPU; `scaling`: the model family's factor of both tables."""
        self._frequencies, self._scaling = frequencies, scaling
        self.cos = self.sin = frequencies.new_empty(0, len(frequencies))  # [positions, D/2] float32

    def reach(self, num_positions: int) -> None:
        """Grow the table to at least the positions 0 .. num_positions - 1."""
        known = len(self.cos)
        if num_positions <= known:
            return
        missing = range(known, max(num_positions, 2 * known), _PIECE)
        pieces = [angles(torch.arange(begin, begin + _PIECE), self._frequencies, self._scaling) for begin in missing]
        self.cos = torch.cat([self.cos, *(cos for cos, _ in pieces)])
        self.sin = torch.cat([self.sin, *(sin for _, sin in pieces)])
