"""The implementation of each part of a device step, by device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from space_kernels.sampling import device_sampling
from space_kernels.sampling.device_sampling import Prefixes
from space_kernels.sampling.sampler import SampledTokens
from space_kernels.sampling.sampling_tensors import SamplingTensors, Stages
from space_kernels.step import draft_head
from space_kernels.step import state as step_state
from space_kernels.step import synthetic_acceptance as synthetic_acceptance_ops
from space_kernels.step.state import DeviceMaskRows, DeviceRows, StepState
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_kernels.step.uniform_index import StepIndex
from space_kernels.step.verification import StepVerification


@dataclass(frozen=True)
class StepOps:
    """One implementation of each part of a step; the references are in `state`, `device_sampling`, `draft_head`, …"""

    rows: Callable[[StepState, StepIndex, Tensor | None], DeviceRows]
    verify_step: Callable[[StepState, StepIndex, DeviceRows, SampledTokens], StepVerification]
    masks: Callable[[StepState, StepIndex, StepVerification], DeviceMaskRows]
    advance: Callable[[StepState, DeviceRows, StepVerification, Tensor, Tensor, Tensor], Tensor]
    sample: Callable[[Tensor, SamplingTensors, Stages, Prefixes, Tensor, Tensor | None], SampledTokens]
    edit: Callable[[Tensor, SamplingTensors, Stages, Prefixes, Tensor, Tensor | None], Tensor]
    sample_candidates: draft_head.SampleCandidates
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
        sample=device_sampling.sample,
        edit=device_sampling.edit,
        sample_candidates=draft_head.sample_candidates,
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
        sample=sampling_triton.sample,
        edit=sampling_triton.edit,
        sample_candidates=draft_head_triton.sample_candidates,
        synthetic_accept=synthetic_acceptance_triton.synthetic_accept,
    )
