"""Verification: accept the longest prefix of drafts that equals the tokens the model sampled (SPACE §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verification:
    """The result for S sequences with at most k drafts each."""

    accepted: Tensor  # [S] int64: a, the accepted drafts
    emitted: Tensor  # [S, k+1] int64: the accepted drafts and the bonus token, padded with zeros
    lengths: Tensor  # [S] int64: a + 1


def verify(samples: Tensor, drafts: Tensor, num_live: Tensor) -> Verification:
    """Accept the longest prefix of live drafts that equals the samples; the next sample is the bonus token.

    samples [S, k+1] int64: tokens sampled by the chain rows; drafts [S, k] int64; num_live [S] int64: valid columns of
    `drafts`. Later columns are ignored.
    """
    k = drafts.shape[1]
    live = torch.arange(k, device=drafts.device) < num_live[:, None]  # [S, k]
    accepted = ((samples[:, :k] == drafts) & live).to(torch.int64).cumprod(dim=1).sum(dim=1)  # [S]
    lengths = accepted + 1
    kept = torch.arange(k + 1, device=drafts.device) < lengths[:, None]  # [S, k+1]
    return Verification(accepted, torch.where(kept, samples, 0), lengths)


def num_accepted(samples: Sequence[int], drafts: Sequence[int]) -> int:
    """Return the number of accepted drafts of one sequence, on the host.

    samples: tokens sampled by the root and each draft, one more than drafts.
    """
    for count, draft in enumerate(drafts):
        if samples[count] != draft:
            return count
    return len(drafts)
