"""Stored weights joined: two that alternate, and the numbers of several below each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from space_kernels.linear.group_weights import GroupForm, GroupWeights, Parts, StoredWeights, input_order_of


@dataclass(frozen=True)
class InTurn:
    """Sixteen outputs of one tensor, sixteen of the other, and so on; both in the same form."""

    gate: StoredWeights
    up: StoredWeights

    @property
    def form(self) -> GroupForm:
        return self.gate.form

    @property
    def in_features(self) -> int:
        return self.gate.in_features

    @property
    def out_features(self) -> int:
        return 2 * self.gate.out_features

    @property
    def input_order(self) -> Tensor | None:
        return input_order_of([self.gate, self.up])

    def rows(self, part: slice | Tensor) -> GroupWeights:
        """Return the weights of some outputs, a range of a multiple of 32."""
        assert isinstance(part, slice)
        start, stop, _ = part.indices(self.out_features)
        gate, up = (one.rows(slice(start // 2, stop // 2)) for one in (self.gate, self.up))

        def joined(a: Tensor | None, b: Tensor | None) -> Tensor | None:
            return None if a is None or b is None else turned(a, b)

        return replace(
            gate,
            numbers=turned(gate.numbers, up.numbers),
            scale=turned(gate.scale, up.scale),
            min=joined(gate.min, up.min),
            scale_steps=joined(gate.scale_steps, up.scale_steps),
            min_steps=joined(gate.min_steps, up.min_steps),
            zero=joined(gate.zero, up.zero),
        )


def turned(a: Tensor, b: Tensor, *, size: int = 16) -> Tensor:
    """[out, …] each -> [2·out, …]: `size` rows of a, as many of b, …"""
    return torch.stack([one.reshape(-1, size, *one.shape[1:]) for one in (a, b)], dim=1).flatten(0, 2)


def dense(parts: Parts) -> Tensor:
    """Dequantise weights below each other: [out, in] float32."""
    return torch.cat([part.rows(slice(None)).dense() for part in parts])


def chosen(parts: Sequence[StoredWeights], outputs: Tensor) -> Tensor:
    """Dequantise some outputs of weights below each other: [outputs, in] float32."""
    found = torch.empty(len(outputs), parts[0].in_features)
    first = 0
    for part in parts:
        here = (outputs >= first) & (outputs < first + part.out_features)
        found[here] = part.rows(outputs[here] - first).dense()
        first += part.out_features
    return found
