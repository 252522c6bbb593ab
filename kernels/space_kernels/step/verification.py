"""Which drafts stand: the longest prefix of drafts that equals what the model itself has chosen (SPACE §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verification:
    """The outcome for S sequences of at most k drafts."""

    accepted: Tensor  # [S] int64: a, drafts that stand
    emitted: Tensor  # [S, k+1] int64: the accepted drafts and the bonus, then zeros
    lengths: Tensor  # [S] int64: a + 1


def verify(samples: Tensor, drafts: Tensor, num_live: Tensor) -> Verification:
    """Accept the longest prefix of live drafts that equals the samples; the first sample that disagrees is the bonus.

    samples [S, k+1] int64: what the chain rows chose; drafts [S, k] int64; num_live [S] int64: how many of the drafts
    were laid out. What stands in dead columns never counts.
    """
    k = drafts.shape[1]
    live = torch.arange(k, device=drafts.device) < num_live[:, None]  # [S, k]
    accepted = ((samples[:, :k] == drafts) & live).to(torch.int64).cumprod(dim=1).sum(dim=1)  # [S]
    lengths = accepted + 1
    kept = torch.arange(k + 1, device=drafts.device) < lengths[:, None]  # [S, k+1]
    return Verification(accepted, torch.where(kept, samples, 0), lengths)


def num_accepted(samples: Sequence[int], drafts: Sequence[int]) -> int:
    """The same for one sequence whose samples are on the host: a, the length of the longest agreeing prefix.

    samples: what the root and each of the live drafts chose, one more than drafts.
    """
    for count, draft in enumerate(drafts):
        if samples[count] != draft:
            return count
    return len(drafts)
