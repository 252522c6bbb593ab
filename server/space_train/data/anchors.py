"""Many mask groups in one training pass: their rows, positions and visibility (SPACE §4).

Real tokens x_0 .. x_{L-1} come first, then a group of masks for each anchor. Anchor m trains the step whose root
is x_{m-1}: mask (m, j) has position m-1+j, sees the real tokens before m and masks (m, 1..j), and learns x_{m+j}, the
j-th token after the bonus x_m. Real rows never see masks, so the same pass yields the ordinary loss.

    real                              anchor 3, depth 2   anchor 6, depth 1
    x0 x1 x2 x3 x4 x5 x6 x7 ...       (3,1) (3,2)         (6,1)

Letters: `B` texts of a batch, `L` real tokens, `M` masks, each text with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from space_model.geometry.draft_layout import DraftLayout
from torch import Tensor


@dataclass(frozen=True)
class AnchorRows:
    """The mask rows behind a batch of texts."""

    root: Tensor  # [B, M] m-1: position of the root that the mask's group follows
    depth: Tensor  # [B, M] j, from 1
    group: Tensor  # [B, M] number of the group, from 0; groups are consecutive, each from mask 1 on
    learns: Tensor  # [B, M] bool: the row has a target to learn (otherwise it only pads the shape)

    @property
    def positions(self) -> Tensor:
        """[B, M] m-1+j."""
        return self.root + self.depth

    @property
    def source(self) -> Tensor:
        """[B, M] m+j-1: the token before the target; its real row is the teacher of the mask."""
        return self.positions

    @property
    def target(self) -> Tensor:
        """[B, M] m+j: the token the mask learns."""
        return self.positions + 1

    def visible(self, document: Tensor) -> Tensor:
        """[B, M, L+M] bool: which keys each mask sees, real tokens first. `document` [B, L]: the text of each token."""
        length = document.shape[1]
        real = torch.arange(length, device=document.device)
        own = document.gather(1, self.root)[..., None]  # [B, M, 1]
        sees_real = (real <= self.root[..., None]) & (document[:, None] == own)
        same_group = self.group[..., None] == self.group[:, None]
        sees_masks = same_group & (self.depth[:, None] <= self.depth[..., None])
        return torch.cat((sees_real, sees_masks), dim=2)

    def to(self, device: torch.device) -> AnchorRows:
        """Return the same rows on `device`."""
        return AnchorRows(*(part.to(device) for part in (self.root, self.depth, self.group, self.learns)))


def causal(document: Tensor) -> Tensor:
    """[B, L, L] bool: causal visibility of real rows within their own text."""
    real = torch.arange(document.shape[1], device=document.device)
    return (real[:, None] >= real) & (document[:, :, None] == document[:, None])


def keep_counts(num_anchors: int, num_masks: int, keep: float = 0.7, least: float = 0.2) -> list[int]:
    """Return how many anchors keep a mask at depth 1, 2, …: all, then max(keep^i, least) (PARD, arXiv 2504.18583)."""
    return [round(num_anchors * max(keep**depth, least)) for depth in range(num_masks)]


def anchor_rows(anchors: Sequence[Sequence[tuple[int, int]]], learnable: NDArray[np.bool_]) -> AnchorRows:
    """Return the mask rows of each text's anchors (m, depth); all texts have the same total number of rows.

    `learnable` [B, L]: the token may be a mask's target. A mask beyond the end of a text learns nothing.
    """
    length = learnable.shape[1]
    offsets = {depth: DraftLayout(0, (depth,)).mask_positions(0) for depth in {d for row in anchors for _, d in row}}
    root = [[m - 1 for m, depth in row for _ in range(depth)] for row in anchors]
    depth = [[offset for _, depth in row for offset in offsets[depth]] for row in anchors]
    group = [[number for number, (_, depth) in enumerate(row) for _ in range(depth)] for row in anchors]
    if len({len(row) for row in root}) > 1:
        raise ValueError(f"Every text of a batch needs as many mask rows; got {sorted({len(row) for row in root})}.")
    roots, depths = np.array(root, dtype=np.int64), np.array(depth, dtype=np.int64)
    target = roots + depths + 1
    inside = target < length
    learns = inside & np.take_along_axis(learnable, np.minimum(target, length - 1), axis=1)
    return AnchorRows(*map(torch.from_numpy, (roots, depths, np.array(group, dtype=np.int64), learns)))


def choose_anchors(
    places: NDArray[np.int64], length: int, counts: Sequence[int], rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Draw anchors (m, depth) among `places`, in order of m; `counts` comes from `keep_counts`.

    The number of rows is fixed, so that every pass has one shape: with too few places, some are used twice.
    Masks beyond `length` are kept and learn nothing.
    """
    num_anchors, num_masks = counts[0], len(counts)
    deep_enough = places[places + num_masks < length]
    usable = deep_enough if len(deep_enough) >= num_anchors else places
    if not len(usable):
        usable = np.array([1], dtype=np.int64)
    chosen = rng.permutation(usable)[:num_anchors]
    if len(chosen) < num_anchors:
        chosen = np.concatenate((chosen, rng.choice(usable, num_anchors - len(chosen))))
    # The first counts[j-1] anchors, in random order, have a mask at depth j.
    return sorted((int(m), sum(index < count for count in counts)) for index, m in enumerate(chosen))
