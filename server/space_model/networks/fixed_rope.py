"""Rotary positions whose angles depend on a sequence's length: one set of angles for the served window.

Dynamic NTK has a base that grows with the longest sequence beyond the trained positions, and LongRoPE has one set of
factors up to the original length and another beyond it. A sequence's keys stay in the pages as they were turned, so a
server takes the angles of its window from the first token on:

    dynamic     the trained positions: the usual base        --max-model-len beyond them: the base of that length
    longrope    the original length: the short factors       --max-model-len beyond it: the long factors
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_log = logging.getLogger(__name__)

OF_LENGTH = ("dynamic", "longrope")
"""Types whose angles transformers computes by the longest sequence of a call."""


def fix_angles(model: nn.Module, window: int, name: str) -> None:
    """Give the model's rotary embeddings the angles of sequences of `window` positions, whatever a call holds."""
    fixed: Any = None
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind not in OF_LENGTH:
            continue
        fixed = module
        device = fixed.inv_freq.device
        fixed.inv_freq, fixed.attention_scaling = ROPE_INIT_FUNCTIONS[kind](fixed.config, device, seq_len=window)
        fixed.original_inv_freq = fixed.inv_freq.clone()
        fixed.rope_type = "default"  # transformers leaves the angles alone
    if fixed is not None:
        rope = fixed.config.rope_parameters
        _log.info("%s: %s", name, _words(rope, window, int(fixed.config.max_position_embeddings)))


def _words(rope: dict[str, Any], window: int, trained: int) -> str:
    if rope["rope_type"] == "dynamic":
        which = "the usual base" if window <= trained else f"the base of {window} positions in every sequence"
        return f"dynamic rotary positions (NTK) are served with {which}"
    original = int(rope["original_max_position_embeddings"])
    which = "long" if window > original else "short"
    more = "" if window > original else f"; --max-model-len beyond {original} serves the long ones in every sequence"
    return f"rotary positions (LongRoPE) are served with the {which} factors, for {window} positions{more}"
