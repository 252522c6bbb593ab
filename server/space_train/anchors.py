"""Many mask groups in one training pass: which rows there are, where they stand and what they see (SPACE §4).

Real tokens x_0 .. x_{L-1} come first, then a group of masks for each anchor. The anchor m stands for a step whose root
is x_{m-1}: mask (m, j) has position m-1+j, sees the real tokens before m and masks (m, 1..j), and learns x_{m+j}, the
j-th token behind the bonus x_m. Real rows never see masks, so the ordinary loss comes from the same pass.

    real                              anchor 3, depth 2   anchor 6, depth 1
    x0 x1 x2 x3 x4 x5 x6 x7 ...       (3,1) (3,2)         (6,1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from space_model.draft_layout import DraftLayout
from torch import Tensor


@dataclass(frozen=True)
class AnchorRows:
    """The rows of one pass: L real ones, then M masks. The same for every sequence of a batch."""

    num_real: int
    positions: Tensor  # [L+M]
    visible: Tensor  # [L+M, L+M] bool: row sees key
    depth: Tensor  # [M] j of each mask, from 1
    source: Tensor  # [M] m+j-1: the token before the target; its real row is the teacher of the mask

    @property
    def target(self) -> Tensor:
        """[M] m+j: the index of the token each mask learns."""
        return self.source + 1


def keep_counts(num_anchors: int, num_masks: int, keep: float = 0.7, least: float = 0.2) -> list[int]:
    """Anchors that keep a mask at depth 1, 2, …: all, then max(keep^i, least) of them (PARD, arXiv 2504.18583)."""
    return [round(num_anchors * max(keep**depth, least)) for depth in range(num_masks)]


def choose_anchors(length: int, counts: Sequence[int], rng: np.random.Generator) -> list[tuple[int, int]]:
    """Random anchors (m, depth), in order of m, each with all its targets inside `length`.

    `counts` are those of `keep_counts`; they fix the number of rows, so that every pass has one shape.
    """
    num_masks, num_places = len(counts), length - len(counts) - 1
    if num_places < counts[0]:
        raise ValueError(f"{counts[0]} anchors of {num_masks} masks do not fit {length} tokens; {num_places} do.")
    places = 1 + rng.choice(num_places, size=counts[0], replace=False)
    # The first counts[j-1] anchors, in random order, have a mask at depth j.
    return sorted((int(m), sum(index < count for count in counts)) for index, m in enumerate(places))


def anchor_rows(length: int, anchors: Sequence[tuple[int, int]]) -> AnchorRows:
    """The geometry of `anchors` (m, depth) behind `length` real tokens; each is group 0 of the root at m-1."""
    groups = [(m, DraftLayout(0, (depth,)).mask_positions(m - 1)) for m, depth in anchors]
    m_of_mask = torch.tensor([m for m, positions in groups for _ in positions])
    group_of_mask = torch.tensor([index for index, (_, positions) in enumerate(groups) for _ in positions])
    mask_positions = torch.tensor([position for _, positions in groups for position in positions])
    num_rows = length + len(mask_positions)
    visible = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    real = torch.arange(length)
    visible[:length, :length] = real[:, None] >= real
    visible[length:, :length] = real < m_of_mask[:, None]
    same_group = group_of_mask[:, None] == group_of_mask
    visible[length:, length:] = same_group & (mask_positions[:, None] >= mask_positions)
    depth = mask_positions - m_of_mask + 1
    return AnchorRows(length, torch.cat((real, mask_positions)), visible, depth, m_of_mask + depth - 1)
