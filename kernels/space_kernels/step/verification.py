"""Verification: accept the longest prefix of drafts that equals the tokens the model sampled (SPACE §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

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
    samples: tokens sampled by the root and each draft, one more than drafts."""
    for count, draft in enumerate(drafts):
        if samples[count] != draft:
            return count
    return len(drafts)


class EndCode(IntEnum):
    """Why a sequence ended, as encoded in a step's tensors."""

    NONE = 0
    EOS = 1
    STOP_ID = 2
    LENGTH = 3
    ERROR = 4  # no token can be sampled


@dataclass(frozen=True, slots=True)
class StepVerification:
    """The result of a step for S sequences with at most k drafts each."""

    accepted: Tensor  # [S] int64: emitted tokens that were drafts
    emitted: Tensor  # [S, k+1] int64: emitted tokens, padded with zeros
    lengths: Tensor  # [S] int64: number of emitted tokens; 0 for a sequence that did not run
    end: Tensor  # [S] int64, EndCode


def verify_sequences(
    samples: Tensor,
    valid: Tensor,
    drafts: Tensor,
    num_live: Tensor,
    running: Tensor,
    num_left: Tensor,
    end_ids: Tensor,
    num_eos: Tensor,
) -> StepVerification:
    """Accept matching drafts, then truncate at the first unusable row, end id or length limit.

    samples, valid [S, k+1]: tokens sampled by the chain rows; drafts [S, k], num_live [S]: as in `verify`;
    running [S] bool: the sequence takes part; num_left [S]: tokens it may still emit, at least 1;
    end_ids [S, E] int64: num_eos [S] EOS ids, then stop ids, then NO_ID.
    """
    k = drafts.shape[1]
    device = samples.device
    place = torch.arange(k + 1, device=device)
    verification = verify(samples, drafts, num_live)
    fit = valid.to(torch.int64).cumprod(dim=1).sum(dim=1)  # rows before the first unusable one
    made = torch.minimum(verification.lengths, fit)  # [S]

    is_end = samples[..., None] == end_ids[:, None]  # [S, k+1, E]
    is_eos = (is_end & (torch.arange(end_ids.shape[1], device=device) < num_eos[:, None])[:, None]).any(dim=2)
    is_end_id = is_end.any(dim=2)
    is_last = place + 1 >= num_left[:, None]  # [S, k+1]
    goes_on = (~(is_end_id | is_last)).to(torch.int64).cumprod(dim=1).sum(dim=1)  # ids before the first end
    lengths = torch.where(running, torch.minimum(made, goes_on + 1), 0)

    at = goes_on.clamp(max=k)[:, None]
    why = torch.where(
        is_eos.gather(1, at)[:, 0],
        int(EndCode.EOS),
        torch.where(is_end_id.gather(1, at)[:, 0], int(EndCode.STOP_ID), int(EndCode.LENGTH)),
    )
    end = torch.where(lengths > goes_on, why, int(EndCode.NONE))
    end = torch.where(running & (fit == 0), int(EndCode.ERROR), end)
    emitted = torch.where(place < lengths[:, None], samples, 0)
    return StepVerification(torch.minimum(verification.accepted, lengths), emitted, lengths, end)
