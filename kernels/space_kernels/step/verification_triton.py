"""Verification on a GPU: one small program per sequence."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.step.verification import EndCode, StepVerification

_NONE: tl.constexpr = tl.constexpr(int(EndCode.NONE))
_EOS: tl.constexpr = tl.constexpr(int(EndCode.EOS))
_STOP_ID: tl.constexpr = tl.constexpr(int(EndCode.STOP_ID))
_LENGTH: tl.constexpr = tl.constexpr(int(EndCode.LENGTH))
_ERROR: tl.constexpr = tl.constexpr(int(EndCode.ERROR))


@triton.jit
def _leading(holds, places, PLACES: tl.constexpr):
    """Return the number of leading places where `holds` is true."""
    return tl.min(tl.where(holds, PLACES, places), 0)


@triton.jit(do_not_specialize=["k"])
def _verify(
    samples,
    valids,
    drafts,
    num_lives,
    runnings,
    num_lefts,
    end_ids,
    num_eos,
    accepteds,
    emitteds,
    lengths,
    ends,
    k,
    E,
    draft_stride,
    end_stride,
    ENDS: tl.constexpr,
    PLACES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    inside = places <= k
    sample = tl.load(samples + sequence * (k + 1) + places, inside, other=-1).to(tl.int64)
    draft = tl.load(drafts + sequence * draft_stride + places, places < k, other=-1).to(tl.int64)
    num_live = tl.load(num_lives + sequence)
    accepted = _leading((sample == draft) & (places < k) & (places < num_live), places, PLACES)
    length = accepted + 1
    fit = _leading((tl.load(valids + sequence * (k + 1) + places, inside, other=0) != 0) & inside, places, PLACES)
    made = tl.minimum(length, fit)
    lanes = tl.arange(0, ENDS)
    end_id = tl.load(end_ids + sequence * end_stride + lanes, lanes < E, other=-1)
    is_end = sample[:, None] == end_id[None, :]
    is_end = is_end & (end_id >= 0)[None, :]
    eos = tl.max((is_end & (lanes < tl.load(num_eos + sequence))[None, :]).to(tl.int32), 1)
    ended = tl.max(is_end.to(tl.int32), 1)
    last = places + 1 >= tl.load(num_lefts + sequence)
    goes_on = _leading((ended == 0) & (last == 0) & inside, places, PLACES)
    running = tl.load(runnings + sequence) != 0
    length = tl.where(running, tl.minimum(made, goes_on + 1), 0)
    here = places == goes_on
    is_eos, is_stop = tl.max(tl.where(here, eos, 0), 0), tl.max(tl.where(here, ended, 0), 0)
    why = tl.where(is_eos != 0, _EOS, tl.where(is_stop != 0, _STOP_ID, _LENGTH))
    end = tl.where(length > goes_on, why, _NONE)
    end = tl.where(running & (fit == 0), _ERROR, end)
    accepted = tl.minimum(accepted, length)
    tl.store(ends + sequence, end.to(tl.int64))
    tl.store(accepteds + sequence, accepted.to(tl.int64))
    tl.store(lengths + sequence, length.to(tl.int64))
    tl.store(emitteds + sequence * (k + 1) + places, tl.where(places < length, sample, 0), inside)


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
    """As `verification.verify_sequences`; drafts and end_ids may have any row stride."""
    S, k = drafts.shape
    accepted, lengths, end = (torch.empty(S, dtype=torch.int64, device=samples.device) for _ in range(3))
    emitted = samples.new_empty(S, k + 1)
    E = end_ids.shape[1]
    if S:
        _verify[(S,)](
            samples.contiguous(),
            valid.contiguous().view(torch.uint8),
            drafts,
            num_live,
            running.view(torch.uint8),
            num_left,
            end_ids,
            num_eos,
            accepted,
            emitted,
            lengths,
            end,
            k,
            E,
            drafts.stride(0),
            end_ids.stride(0),
            ENDS=triton.next_power_of_2(max(1, E)),
            PLACES=_places(k),
            num_warps=1,
        )
    return StepVerification(accepted, emitted, lengths, end)


def _places(k: int) -> int:
    """Return the block size: places for a root and k drafts, and one more."""
    return triton.next_power_of_2(k + 2)


_ARGUMENTS = {
    **dict.fromkeys(("samples", "drafts", "num_lives", "num_lefts", "end_ids", "num_eos"), "*i64"),
    **dict.fromkeys(("accepteds", "emitteds", "lengths", "ends"), "*i64"),
    **dict.fromkeys(("valids", "runnings"), "*u8"),
    **dict.fromkeys(("k", "E", "draft_stride", "end_stride"), "i32"),
}
TUNED = tuple(Tuned(_verify, _ARGUMENTS, {"ENDS": 16, "PLACES": places}, 1) for places in (2, 4, 8, 16))
