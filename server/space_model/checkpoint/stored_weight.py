"""Weights that stay as their file has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from space_kernels.linear.gguf_blocks import Blocks
from space_kernels.linear.packed_int4 import PackedInt4
from space_kernels.linear.packed_int8 import PackedInt8
from space_kernels.linear.packed_mxfp4 import PackedMxfp4
from space_kernels.linear.stored_parts import dense, turned
from torch import Tensor

StoredPart = Blocks | PackedInt4 | PackedInt8 | PackedMxfp4

StoredWeight = Sequence[StoredPart]
"""A weight [out, in]: tensors of the file, below each other."""

PANEL = 16
"""Outputs of a weight that others are joined to come in multiples of this (LANES of cpu_linear.py)."""

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
_ROLE = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that compact networks fuse."""


@dataclass(frozen=True)
class StoredExperts:
    """The weights of all experts of a mixture, which stay as their file has them; of each expert one a linear."""

    gate: Sequence[StoredWeight]
    up: Sequence[StoredWeight]
    down: Sequence[StoredWeight]
    is_transposed: bool = False  # the module has its inputs in the second dimension

    def numbers(self, name: str, expert: int, *, in_turn: bool = False) -> Tensor:
        """Dequantise an expert's gate_up_proj [2·width, hidden], gate first or, `in_turn`, alternating with up, or its
        down_proj [hidden, width]: float32."""
        if name == "down_proj":
            return dense(self.down[expert])
        gate, up = dense(self.gate[expert]), dense(self.up[expert])
        return turned(gate, up, size=1) if in_turn else torch.cat([gate, up])

    @property
    def gate_up_shape(self) -> tuple[int, int, int]:
        """[experts, 2·width, hidden], transposed if the module's are"""
        return self._shape(2 * self.gate[0][0].out_features, self.gate[0][0].in_features)

    @property
    def down_shape(self) -> tuple[int, int, int]:
        """[experts, hidden, width], transposed if the module's are"""
        return self._shape(self.down[0][0].out_features, self.down[0][0].in_features)

    def _shape(self, outputs: int, inputs: int) -> tuple[int, int, int]:
        return (len(self.down), inputs, outputs) if self.is_transposed else (len(self.down), outputs, inputs)


def is_expert(name: str) -> bool:
    """Return whether a weight is that of a linear of one expert."""
    return _EXPERT.fullmatch(name) is not None


def _mixtures(names: Iterable[str]) -> dict[str, dict[int, list[str | None]]]:
    """Return the names of gate, up and down of each expert of each mixture, by its path."""
    found: dict[str, dict[int, list[str | None]]] = {}
    for name in names:
        if (match := _EXPERT.fullmatch(name)) is not None:
            path, number, linear = match.groups()
            found.setdefault(path, {}).setdefault(int(number), [None, None, None])[_ROLE[linear]] = name
    return found


def split_mixtures(kept: Collection[str], names: Iterable[str], may_join: Callable[[str, str], bool]) -> set[str]:
    """Return the weights of experts among `kept` that cannot stay as the file has them: those of a mixture of which
    another cannot. `names`: of all weights; `may_join`: whether gate and up can be multiplied as one."""
    lost: set[str] = set()
    for experts in _mixtures(names).values():
        linears = [name for each in experts.values() for name in each if name is not None]
        whole = len(linears) == 3 * len(experts) and all(name in kept for name in linears)
        if not whole or not all(may_join(each[0] or "", each[1] or "") for each in experts.values()):
            lost.update(linears)
    return lost.intersection(kept)


def take_mixtures(left: MutableMapping[str, StoredWeight]) -> dict[str, tuple[StoredExperts, list[str]]]:
    """Remove the weights of experts from those that are left, and return them by the mixture's path, with their
    names."""
    found: dict[str, tuple[StoredExperts, list[str]]] = {}
    for path, experts in _mixtures([*left]).items():
        names = [[name for name in experts[number] if name is not None] for number in sorted(experts)]
        each = [[left.pop(name) for name in linears] for linears in names]
        gate, up, down = zip(*each, strict=True)
        found[path] = StoredExperts(gate, up, down), [name for linears in names for name in linears]
    return found


def odd_expert(names: Iterable[str], shape: Callable[[str], tuple[int, ...]]) -> str | None:
    """Return an error text if the weights of a layer's experts differ in shape, naming the first that does, or None.

    `shape`: returns a weight's shape by its name.
    """
    for experts in _mixtures(names).values():
        for role in range(3):
            shapes = {name: shape(name) for one in experts.values() if (name := one[role]) is not None}
            if len({*shapes.values()}) > 1:
                usual = max({*shapes.values()}, key=[*shapes.values()].count)
                name = next(name for name in shapes if shapes[name] != usual)
                return f"{name} has the shape {shapes[name]}, and that of most experts is {usual}"
    return None


MOST_EXPERTS = 1 << 16  # of a layer


def missing_of_experts(names: Iterable[str]) -> list[str]:
    """Return the names of weights that are missing for some experts of a layer and present for others.

    Experts are numbered from 0; numbers from MOST_EXPERTS on are not looked at, as a file may write any number.
    """
    missing: list[str] = []
    for path, experts in _mixtures(names).items():
        roles = [next((one[role] for one in experts.values() if one[role]), None) for role in range(3)]
        for number in range(min(max(experts) + 1, MOST_EXPERTS)):
            has = experts.get(number, [None, None, None])
            for like, own in zip(roles, has, strict=True):
                if like is not None and own is None:
                    rest = like.removeprefix(f"{path}.").partition(".")[2]
                    missing.append(f"{path}.{number}.{rest}")
    return missing
