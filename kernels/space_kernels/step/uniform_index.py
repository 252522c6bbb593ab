"""The constants of a step in which all sequences lay out the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

ROW_MULTIPLE = 4
"""Packed rows are padded to a multiple of this, as the host packs them."""


class UniformLayout(Protocol):
    """What a step lays out behind each root: `space_model.DraftLayout` is one."""

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
    """The constants of a step in which S sequences lay out the same: rows in the order of `ForwardBatch`."""

    num_sequences: int
    num_drafts: int  # k
    group_sizes: tuple[int, ...]  # masks in each group
    owner: Tensor  # [R] int64: whose row it is; 0 for padding
    offset: Tensor  # [R] int64: position behind the root; 0 for padding
    mask: Tensor  # [R] int64: which mask of its group it is, from 0; -1 for others
    masks: Tensor  # [k+1] int64: group_sizes
    mask_starts: Tensor  # [S, k+1] int64: first flat row of each group

    @classmethod
    def of(cls, num_sequences: int, layout: UniformLayout, device: torch.device | str = "cpu") -> StepIndex:
        """Lay S sequences out."""
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
        """Roots and drafts: the first rows."""
        return self.num_sequences * (self.num_drafts + 1)

    @property
    def num_rows(self) -> int:
        """Without padding."""
        return self.num_chain_rows + self.num_sequences * sum(self.group_sizes)

    @property
    def num_padded(self) -> int:
        """R."""
        return len(self.owner)

    @cached_property
    def most_drafts(self) -> int:
        """Most drafts that the masks of a group make."""
        return max(self.group_sizes)
