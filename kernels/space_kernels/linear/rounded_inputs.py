"""Inputs of products in integers: those of a row are rounded 32 at a time to codes from -127 to 127 with a scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 32
"""Inputs of a group."""

GREATEST = 127
"""Codes of inputs are in the symmetric range -127 .. 127."""

FLOOR = 2.0**-100
"""Groups of inputs that are smaller are taken for 0."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[R, in] -> whole numbers [R, groups, 32] float32 and scale [R, groups] float32, NaN where x is not finite."""
    wide = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    finite = torch.where(wide.isfinite(), wide, 0.0)
    most = finite.abs().amax(dim=2)
    is_some = most > FLOOR
    inverse = torch.where(is_some, torch.full_like(most, GREATEST) / most, 0.0)  # number / tensor rounds twice
    scale = torch.where(is_some, most * float(torch.tensor(1.0) / GREATEST), 0.0) + (wide - wide).sum(dim=2)
    return (finite * inverse[:, :, None]).round_(), scale


def rounded(x: Tensor) -> Tensor:
    """[..., in] -> the same as rounded by `round_rows`, in the dtype of x or float32."""
    flat = x.reshape(-1, x.shape[-1])
    codes, scale = round_rows(flat)
    return (codes * scale[:, :, None]).flatten(1)[:, : x.shape[-1]].reshape(x.shape)
