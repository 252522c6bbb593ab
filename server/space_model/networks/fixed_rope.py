"""Rotary positions whose angles depend on a sequence's length.

Dynamic NTK has a base that grows with the longest sequence beyond the trained positions, and LongRoPE has one set of
factors up to the original length and another beyond it. A sequence's keys stay in the pages as they were turned:

    dynamic     the trained positions: the usual base    --max-model-len beyond them: the base of that length
    longrope    the original length: the short factors   --max-model-len beyond it: those of each sequence's length

A sequence that outgrows the original length of LongRoPE is admitted again, and computed anew with the long factors.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_log = logging.getLogger(__name__)

OF_LENGTH = ("dynamic", "longrope")
"""Types whose angles transformers computes by the longest sequence of a call."""


class AngleSet(NamedTuple):
    """Rotary frequencies [D/2] float32, and the factor of their cosines and sines."""

    frequencies: Tensor
    scaling: float


class LongRope(nn.Module):
    """Cosines and sines of LongRoPE: of each row with the factors of its sequence's length."""

    def __init__(self, short: AngleSet, long: AngleSet) -> None:
        super().__init__()
        both = short, long
        self.frequencies = nn.Buffer(torch.stack([one.frequencies for one in both]), persistent=False)  # [2, D/2]
        self.scalings = nn.Buffer(torch.tensor([one.scaling for one in both]), persistent=False)
        self.long_rows: Tensor | None = None  # [R] bool, of the step under way: rows of long sequences; None: no row is

    def forward(self, x: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """position_ids [B, R] -> cosines and sines [B, R, D] in the dtype of x."""
        frequencies, scaling = self.frequencies[0].float(), self.scalings[0].float()
        if self.long_rows is not None:
            of_row = self.long_rows.long()
            frequencies, scaling = self.frequencies[of_row].float(), self.scalings[of_row, None].float()
        turns = position_ids[..., None].float() * frequencies
        turns = torch.cat((turns, turns), dim=-1)
        return (turns.cos() * scaling).to(x.dtype), (turns.sin() * scaling).to(x.dtype)


class FixedAngles(NamedTuple):
    """What `fix_angles` has fixed."""

    switch: int | None = None  # length beyond which a sequence has other angles than up to it; None: there is none
    of_window: str = ""  # angles that the served window decides, for all sequences; "": the checkpoint alone does


def fix_angles(model: nn.Module, window: int, name: str, *, switches: bool = True) -> FixedAngles:
    """Give the model's rotary embeddings angles that do not depend on what else a call holds. `window`: the positions
    served. `switches`: LongRoPE may be served with both sets; else with that of the window."""
    switch: int | None = None
    fixed: Any = None
    of_window = ""
    for path, module in list(model.named_modules()):
        kind = getattr(module, "rope_type", None)
        if kind not in OF_LENGTH:
            continue
        fixed = module
        original = int(fixed.config.rope_parameters.get("original_max_position_embeddings") or window)
        if switches and kind == "longrope" and window > original and (rope := _long_rope(module)) is not None:
            switch = original
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, rope)
        else:
            _fix(fixed, window)
            if kind == "longrope" and window > original:
                of_window = "long"
            elif kind == "dynamic" and window > int(fixed.config.max_position_embeddings):
                of_window = f"dynamic {window}"
    if fixed is not None:
        rope = fixed.config.rope_parameters
        _log.info("%s: %s", name, _words(rope, window, int(fixed.config.max_position_embeddings), switch))
    return FixedAngles(switch, of_window)


def _fix(module: Any, window: int) -> None:
    """Fix the angles to those of sequences of `window` positions."""
    device = module.inv_freq.device
    init = ROPE_INIT_FUNCTIONS[module.rope_type]
    module.inv_freq, module.attention_scaling = init(module.config, device, seq_len=window)
    module.original_inv_freq = module.inv_freq.clone()
    module.rope_type = "default"  # transformers leaves the angles alone


@torch.no_grad()
def _long_rope(module: Any) -> LongRope | None:
    """Return what computes both sets of angles of a rotary embedding; None for one that returns other than cosines and
    sines."""
    config, device = module.config, module.inv_freq.device
    rope = config.rope_parameters
    original = int(rope["original_max_position_embeddings"])
    sets = []
    for length, factor in ((original, "short_mscale"), (original + 1, "long_mscale")):
        frequencies, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=length)
        sets.append(AngleSet(frequencies.float(), float(rope.get(factor) or scaling)))  # Phi-MoE says factors
    made = LongRope(*sets)
    rows = torch.arange(8, device=device)[None]
    x = torch.zeros(1, 8, 1, device=device)
    found, wanted = module(x, rows), made(x, rows)
    if not isinstance(found, tuple) or [one.shape for one in found] != [one.shape for one in wanted]:
        return None
    return made if all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, wanted, strict=True)) else None


def _words(rope: dict[str, Any], window: int, trained: int, switch: int | None) -> str:
    if rope["rope_type"] == "dynamic":
        which = "the usual base" if window <= trained else f"the base of {window} positions in every sequence"
        return f"dynamic rotary positions (NTK) are served with {which}"
    original = int(rope["original_max_position_embeddings"])
    if switch is not None:
        return (
            f"rotary positions (LongRoPE) are served with the short factors up to {original} tokens, and with the long "
            f"ones beyond; a text that grows beyond them is computed anew there"
        )
    which = "long" if window > original else "short"
    more = "" if window > original else f"; --max-model-len beyond {original} serves longer texts with the long ones"
    return f"rotary positions (LongRoPE) are served with the {which} factors, for {window} positions{more}"
