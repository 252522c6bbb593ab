"""Gemma 3n's layers: several versions of every row (AltUp), and MLPs that keep the largest gates alone.

    embedding    layer 0 .. n-1, each            the last layer
    row  ->  V versions: predicted by coefficients of the row, one computed, all corrected  ->  one row

Between layers a row is [V·hidden] here: its versions beside each other, the embedding's own first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from transformers import PreTrainedConfig

_ALTUP, _MLP = "Gemma3nTextAltUp", "Gemma3nTextMLP"


def num_versions(config: PreTrainedConfig) -> int:
    """Return how many versions of every row the layers pass on."""
    return int(getattr(config, "altup_num_inputs", None) or 1)


def beside(versions: Tensor) -> Tensor:
    """[V, 1, R, hidden] -> [1, R, V·hidden]"""
    return versions.permute(1, 2, 0, 3).flatten(2)


def apart(rows: Tensor, count: int) -> Tensor:
    """[1, R, V·hidden] -> [V, 1, R, hidden] for V = `count` versions."""
    return rows.view(*rows.shape[:2], count, -1).permute(2, 0, 1, 3).contiguous()


def is_altup(module: nn.Module) -> bool:
    """Return whether the module predicts and corrects the versions of rows."""
    return type(module).__name__ == _ALTUP


def coefficient_linears(base: nn.Module) -> Iterator[nn.Module]:
    """Yield the linears of few inputs or outputs that mix versions. They stay plain numbers: their weights are few, and
    what they compute multiplies whole rows."""
    for module in base.modules():
        if is_altup(module):
            yield from (module.prediction_coefs, module.correction_coefs, module.modality_router)  # type: ignore[misc]


def fix_cutoffs(base: nn.Module) -> None:
    """Let MLPs that keep the largest gates compute the cut without reading the device: the share is a constant."""
    for module in base.modules():
        share = getattr(module, "activation_sparsity", 0.0) if type(module).__name__ == _MLP else 0.0
        if isinstance(share, float) and share > 0.0:
            at = torch.tensor(share, dtype=torch.float32, device="cpu")
            multiplier = float(Normal(0.0, 1.0).icdf(at))  # type: ignore[no-untyped-call]
            module._gaussian_topk = partial(keep_largest, multiplier=multiplier)  # type: ignore[assignment]


def keep_largest(gate: Tensor, multiplier: float) -> Tensor:
    """Return what exceeds the row's mean + multiplier · standard deviation, and 0 elsewhere: [..., width] ->
    [..., width]. Computed in float32; sums run over one row."""
    wide = gate.float()
    off = wide - wide.mean(dim=-1, keepdim=True)
    deviation = off.square().mean(dim=-1, keepdim=True).sqrt()
    return (off - deviation * multiplier).relu_().to(gate.dtype)


def predict_by_row(block: Any) -> None:
    """Let transformers' AltUp `block` predict by sums over versions in their order, in float32: the order in which its
    batched product sums is the library's, and may depend on the number of rows."""
    block.predict = partial(_predict, block)


def _predict(block: Any, versions: Tensor) -> Tensor:
    """[V, 1, R, hidden] -> [V, 1, R, hidden]"""
    count = len(versions)
    modalities = block.compute_router_modalities(versions[block.config.altup_active_idx])
    coefficients = block.prediction_coefs(modalities).float().unflatten(-1, (count, count))  # [1, R, V, V]
    wide = versions.float()
    made = []
    for to in range(count):
        mixed = wide[0] * coefficients[..., to, 0, None]
        for source in range(1, count):
            mixed += wide[source] * coefficients[..., to, source, None]
        made.append(mixed.add_(wide[to]).to(versions.dtype))
    return torch.stack(made)
