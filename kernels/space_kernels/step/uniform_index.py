"""The row indexes of a step in which all sequences have the same draft layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

ROW_MULTIPLE = 4
"""Packed rows are padded to a multiple of this, as the host packs them."""


class UniformLayout(Protocol):
    """The draft layout of each sequence; `space_model.DraftLayout` implements it."""

    @property
    def num_drafts(self) -> int:
        """Drafts in the chain."""
        ...

    @property
    def masks(self) -> tuple[int, ...]:
        """Masks in group g, for g = 0 .. num_drafts."""
        ...


# chain rows, sequence after sequence   mask rows, sequence after sequence            padding
# [0 ............... S·(k+1))           [S·(k+1) ..................... num_rows)      [num_rows ... num_padded)
#  root, c_1 .. c_k                      group 0: M_1, M_2, ... | group 1: ...         a root's position; unread
@dataclass(frozen=True, eq=False)
class StepIndex:
    """The rows of S sequences with the same draft layout, in the order of `ForwardBatch`."""

    num_sequences: int
    num_drafts: int  # k
    group_sizes: tuple[int, ...]  # masks in each group
    owner: Tensor  # [R] int64: sequence of the row; 0 for padding
    offset: Tensor  # [R] int64: position relative to the root; 0 for padding
    mask: Tensor  # [R] int64: number of the mask in its group, from 0; -1 for other rows
    masks: Tensor  # [k+1] int64: group_sizes
    mask_starts: Tensor  # [S, k+1] int64: first flat row of each group

    @classmethod
    def of(cls, num_sequences: int, layout: UniformLayout, device: torch.device | str = "cpu") -> StepIndex:
        """Lay out S sequences."""
        S, k, sizes = num_sequences, layout.num_drafts, tuple(layout.masks)
        chain = [(s, i, -1) for s in range(S) for i in range(k + 1)]
        masked = [(s, g + j + 1, j) for s in range(S) for g, count in enumerate(sizes) for j in range(count)]
        padding = [(0, 0, -1)] * (-(len(chain) + len(masked)) % ROW_MULTIPLE)
        columns = torch.tensor(chain + masked + padding, dtype=torch.int64, device=device).T.contiguous()
        per_sequence = sum(sizes)
        starts = [[len(chain) + s * per_sequence + sum(sizes[:g]) for g in range(k + 1)] for s in range(S)]
        owner, offset, mask = columns
        return cls(
            num_sequences=S,
            num_drafts=k,
            group_sizes=sizes,
            owner=owner,
            offset=offset,
            mask=mask,
            masks=torch.tensor(sizes, dtype=torch.int64, device=device),
            mask_starts=torch.tensor(starts, dtype=torch.int64, device=device).view(S, k + 1),
        )

    @property
    def num_chain_rows(self) -> int:
        """Number of root and draft rows, which come first."""
        return self.num_sequences * (self.num_drafts + 1)

    @property
    def num_rows(self) -> int:
        """Number of rows without padding."""
        return self.num_chain_rows + self.num_sequences * sum(self.group_sizes)

    @property
    def num_padded(self) -> int:
        """R: number of rows with padding."""
        return len(self.owner)

    @cached_property
    def most_drafts(self) -> int:
        """Size of the largest mask group: the most drafts that one step can produce."""
        return max(self.group_sizes)
