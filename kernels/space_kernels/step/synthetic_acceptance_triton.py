"""Synthetic acceptance on a GPU: one launch, so that benchmarks measure the step and not this."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from space_kernels.build.launch import Tuned
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_kernels.step.verification import StepVerification


@triton.jit(do_not_specialize=["k", "width"])
def _synthetic_accept(
    chances,
    ids,
    lucks,
    others,
    counts,
    num_knowns,
    num_prompts,
    emitteds,
    lengths,
    firsts,
    drafts,
    synthetically_accepted,
    k,
    width,
    deepest,
    known_stride,
    draft_stride,
    PLACES: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    count, length = tl.load(counts + sequence), tl.load(lengths + sequence)
    begin = tl.load(num_knowns + sequence) - tl.load(num_prompts + sequence)
    of_sequence = sequence * known_stride
    stands = (places <= k) & (places < length)
    emitted = tl.load(emitteds + sequence * (k + 1) + places, stands, other=0)
    expected = tl.load(ids + of_sequence + begin + places, stands & (begin + places < count), other=-1).to(tl.int64)
    strays = tl.max(tl.where(stands & (expected != emitted), 1, 0), 0)

    at = begin + length + places
    inside = places < width
    known = inside & (at < tl.where(strays == 0, count, 0))
    right = tl.load(ids + of_sequence + at, known, other=0).to(tl.int64)
    other = tl.load(others + of_sequence + at, known, other=0).to(tl.int64)
    luck = tl.load(lucks + of_sequence + at, known, other=0.0).to(tl.float64)
    depth = tl.minimum(tl.maximum(tl.load(firsts + sequence) + places, 1), deepest)
    is_accepted = luck < tl.load(chances + depth - 1)
    draft = tl.load(drafts + sequence * draft_stride + places, inside, other=0)
    tl.store(
        synthetically_accepted + sequence * width + places,
        tl.where(known, tl.where(is_accepted, right, other), draft),
        inside,
    )


def synthetic_accept(
    synthetic_tensors: SyntheticAcceptanceTensors,
    num_known: Tensor,
    num_prompt: Tensor,
    verification: StepVerification,
    first: Tensor,
    drafts: Tensor,
) -> Tensor:
    """As `synthetic_acceptance.synthetic_accept`."""
    S, width = drafts.shape
    k = verification.emitted.shape[1] - 1
    synthetically_accepted = torch.empty(S, width, dtype=torch.int64, device=drafts.device)
    _synthetic_accept[(S,)](
        synthetic_tensors.chances,
        synthetic_tensors.ids,
        synthetic_tensors.luck,
        synthetic_tensors.others,
        synthetic_tensors.counts,
        num_known,
        num_prompt,
        verification.emitted,
        verification.lengths,
        first,
        drafts,
        synthetically_accepted,
        k,
        width,
        len(synthetic_tensors.chances),
        synthetic_tensors.ids.stride(0),
        drafts.stride(0),
        PLACES=triton.next_power_of_2(max(k + 1, width)),
        num_warps=1,
    )
    return synthetically_accepted


_ARGUMENTS = {
    **dict.fromkeys(("ids", "others"), "*i32"),
    **dict.fromkeys(("counts", "num_knowns", "num_prompts", "emitteds", "lengths", "firsts"), "*i64"),
    **dict.fromkeys(("drafts", "synthetically_accepted"), "*i64"),
    **dict.fromkeys(("k", "width", "deepest", "known_stride", "draft_stride"), "i32"),
    "chances": "*fp64",
    "lucks": "*fp32",
}
TUNED = tuple(Tuned(_synthetic_accept, _ARGUMENTS, {"PLACES": places}, 1) for places in (2, 4, 8, 16))
