"""The implementation of each part of a device step, by device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from space_kernels.sampling import device_sampling as choosing
from space_kernels.sampling.choice import SampledTokens
from space_kernels.sampling.sampling_tensors import SamplingTensors, Stages
from space_kernels.step import draft_head
from space_kernels.step import state as step_state
from space_kernels.step import synthetic_acceptance as synthetic_acceptance_ops
from space_kernels.step.state import DeviceMaskRows, DeviceRows, StepState
from space_kernels.step.step_verification import StepVerification
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_kernels.step.uniform_index import StepIndex


class Choose(Protocol):
    """`device_sampling.choose`."""

    def __call__(
        self,
        logits: Tensor,
        batch_params: SamplingTensors,
        stages: Stages,
        positions: Tensor,
        banned_ids: Tensor,
        *,
        tails: Tensor,
        num_tail: Tensor,
        counts: Tensor | None = None,
        bans: Tensor | None = None,
    ) -> SampledTokens:
        """Return ids and usable, [S, J] each."""
        ...


class Edit(Protocol):
    """`device_sampling.edit`."""

    def __call__(
        self,
        logits: Tensor,
        batch_params: SamplingTensors,
        stages: Stages,
        banned_ids: Tensor,
        *,
        tails: Tensor,
        num_tail: Tensor,
        counts: Tensor | None = None,
        bans: Tensor | None = None,
    ) -> Tensor:
        """[S, J, V]"""
        ...


@dataclass(frozen=True)
class StepOps:
    """One implementation of each part of a step; the references are in `state`, `device_sampling`, `draft_head`, …"""

    rows: Callable[[StepState, StepIndex, Tensor | None], DeviceRows]
    verify_step: Callable[[StepState, StepIndex, DeviceRows, SampledTokens], StepVerification]
    masks: Callable[[StepState, StepIndex, StepVerification], DeviceMaskRows]
    advance: Callable[[StepState, DeviceRows, StepVerification, Tensor, Tensor, Tensor], Tensor]
    choose: Choose
    edit: Edit
    choose_candidates: draft_head.ChooseCandidates
    synthetic_accept: Callable[[SyntheticAcceptanceTensors, Tensor, Tensor, StepVerification, Tensor, Tensor], Tensor]


def step_ops_for(device: torch.device | str) -> StepOps:
    """Return Triton's kernels for a CUDA device if triton is installed, else torch's operations."""
    if torch.device(device).type != "cuda" or find_spec("triton") is None:
        return reference_step_ops()
    return triton_step_ops()


def reference_step_ops() -> StepOps:
    """Return torch's own operations, for any device."""
    return StepOps(
        rows=step_state.rows,
        verify_step=step_state.verify_step,
        masks=step_state.masks,
        advance=step_state.advance,
        choose=choosing.choose,
        edit=choosing.edit,
        choose_candidates=draft_head.choose_candidates,
        synthetic_accept=synthetic_acceptance_ops.synthetic_accept,
    )


def triton_step_ops() -> StepOps:
    """Return Triton's kernels, for a CUDA device or for Triton's interpreter (TRITON_INTERPRET=1 before the import)."""
    from space_kernels.sampling import sampling_triton
    from space_kernels.step import draft_head_triton, synthetic_acceptance_triton
    from space_kernels.step import state_triton as step_state_triton

    return StepOps(
        rows=step_state_triton.rows,
        verify_step=step_state_triton.verify_step,
        masks=step_state_triton.masks,
        advance=step_state_triton.advance,
        choose=sampling_triton.choose,
        edit=sampling_triton.edit,
        choose_candidates=draft_head_triton.choose_candidates,
        synthetic_accept=synthetic_acceptance_triton.synthetic_accept,
    )
