"""Draft candidates and their sampling parameters, by tensor operations alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from space_kernels.sampling.sampling_tensors import SamplingTensors, Stages
from space_kernels.step.draft_head import NUM_CANDIDATES, SamplingColumns


def sampling_columns(batch_params: SamplingTensors, stages: Stages) -> SamplingColumns:
    """Extract what `choose_candidates` needs from the batch's sampling parameters."""

    def column(values: Tensor) -> Tensor:
        return values.to(torch.float64)[:, None]

    cuts = stages.cuts or stages.floors
    return SamplingColumns(
        greedy=batch_params.greedy[:, None] if stages.samples else None,
        divisor=column(batch_params.divisor),
        top_k=column(batch_params.top_k) if cuts else None,
        top_p=column(batch_params.top_p),
        min_p=column(batch_params.log_min_p).exp(),
    )


def candidates(logits: Tensor, stages: Stages, edit: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return each mask's best ids, ascending, and the offsets that sampling parameters add to their logits.

    logits [S, K, V] float32 raw (overwritten) -> [S, K, M] int64, [S, K, M] float32. `edit`: `device_sampling.edit` for
    these rows. Penalties become a shift of the mask's own logit, which is accurate enough for a draft.
    """
    raw = logits.clone() if stages.edits or stages.bounds or stages.penalises else None
    edited = edit(logits)
    best = torch.topk(edited, min(NUM_CANDIDATES, logits.shape[2]), dim=2, sorted=False)
    ids, order = best.indices.sort(dim=2)
    allowed = best.values.gather(2, order)
    if raw is None:
        return ids, torch.where(allowed > -math.inf, 0.0, -math.inf)
    return ids, allowed - raw.gather(2, ids)
