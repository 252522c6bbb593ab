"""The implementation of each operation, by device.

    operation         CPU                              CUDA                        CUDA without triton
    space_attention   torch_backend                    attention_triton            torch_backend
                      bfloat16: cpu_backend
    rms_norm, …       layers                           layers_triton               layers
    linear            packed_linear.PackedLinear       cuda_linear.CudaLinear      cuda_linear.CudaLinear
                      bfloat16: cpu_linear.CompiledLinear
      exact           (always exact)                   cuda_linear.ExactLinear     ValueError

On a CPU, compiled operations (cpu_library) are used where they can be built. Triton is imported only for a CUDA device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from space_kernels.attention import torch_backend as torch_attention
from space_kernels.attention.attention import QKV, Attention
from space_kernels.attention.cpu_backend import CompiledAttention
from space_kernels.build.cpu_library import cpu_library
from space_kernels.layers import layers
from space_kernels.linear.cpu_linear import cpu_linear
from space_kernels.linear.cuda_linear import CudaLinear, ExactLinear
from space_kernels.sampling import device_sampling
from space_kernels.sampling.device_sampling import Prefixes, SamplingTensors, Stages
from space_kernels.sampling.sampler import SampledTokens
from space_kernels.step import draft_head
from space_kernels.step import state as step_state
from space_kernels.step import synthetic_acceptance as synthetic_acceptance_ops
from space_kernels.step.state import DeviceMaskRows, DeviceRows, StepIndex, StepState
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_kernels.step.verification import StepVerification

_log = logging.getLogger(__name__)

_CURE = "Install it with `pip install triton` (Linux; it comes with torch's CUDA builds)."


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation, with the reference's signature unless the comment says otherwise."""

    attention: str  # backend name, as in attention_backends
    space_attention: Attention  # stores the chain rows' keys and values, then attends
    attend: Attention | None  # attends pages that already hold them; None: this backend has no separate attend
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary_store: Callable[..., QKV]
    swiglu: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor | None], nn.Module]  # weight [out, in], bias [out]

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits are independent of the rest of the batch (a library's attention aside)."""
        return self.linear is not CudaLinear


def ops_for(
    device: torch.device | str,
    *,
    attention: str = "auto",
    exact: bool = False,
    dtype: torch.dtype = torch.float32,
    fp8_kv: bool = False,
) -> Ops:
    """Return the operations for a device and dtype.

    `attention`: "torch", "triton" (GPU only) or "auto", the fastest built-in one; library backends are chosen in
    attention_backends. `exact`: a row's bits do not depend on the rest of the batch (always so on a CPU).
    `fp8_kv`: the KV cache is fp8, which rules out compiled CPU attention.
    Raises ValueError, with the remedy, for an unavailable combination.
    """
    return _ops(torch.device(device).type, attention, exact, dtype, fp8_kv)


@cache
def _ops(kind: str, attention: str, exact: bool, dtype: torch.dtype, fp8_kv: bool) -> Ops:
    if attention not in ("auto", "torch", "triton"):
        raise ValueError(
            f"There is no attention implementation {attention!r} of our own; there are auto, torch and triton."
        )
    if kind != "cuda":
        if attention == "triton":
            raise ValueError("Triton's attention needs a CUDA device; a CPU has auto and torch.")
        library = cpu_library() if attention == "auto" and dtype == torch.bfloat16 and not fp8_kv else None
        ops = reference_ops(cpu_linear)
        return (
            ops if library is None else replace(ops, attention="compiled", space_attention=CompiledAttention(library))
        )
    if find_spec("triton") is None:
        if exact or attention == "triton":
            asked = "exact matmuls on a GPU" if exact else "attention 'triton'"
            raise ValueError(f"triton is not installed, which {asked} need. {_CURE}")
        _log.warning("triton is not installed: torch's own operations stand in for it, several times slower. %s", _CURE)
        return reference_ops(CudaLinear)
    ops = triton_ops(ExactLinear if exact else CudaLinear)
    if attention == "torch":
        if exact:
            raise ValueError(
                "torch's attention on a GPU gives results that depend on the rest of the batch: leave out --exact"
            )
        return replace(ops, attention="torch", space_attention=torch_attention.space_attention, attend=None)
    return ops


def reference_ops(linear: Callable[[Tensor, Tensor | None], nn.Module]) -> Ops:
    """Return torch's own operations, for any device."""
    return Ops(
        attention="torch",
        space_attention=torch_attention.space_attention,
        attend=None,
        rms_norm=layers.rms_norm,
        add_rms_norm=layers.add_rms_norm,
        rotary_store=layers.rotary_store,
        swiglu=layers.swiglu,
        linear=linear,
    )


def triton_ops(linear: Callable[[Tensor, Tensor | None], nn.Module]) -> Ops:
    """Return Triton's kernels, for a CUDA device or for Triton's interpreter (TRITON_INTERPRET=1 before the import)."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default value; setting it silences triton 3.9
    from space_kernels.attention import attention_triton
    from space_kernels.layers import layers_triton

    exact = linear is not CudaLinear
    return Ops(
        attention="triton",
        space_attention=partial(attention_triton.space_attention, exact=exact),
        attend=partial(attention_triton.attend_stored, exact=exact),
        rms_norm=layers_triton.rms_norm,
        add_rms_norm=layers_triton.add_rms_norm,
        rotary_store=layers_triton.rotary_store,
        swiglu=layers_triton.swiglu,
        linear=linear,
    )


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
    from space_kernels.step import draft_head_triton, state_triton

    return StepOps(
        rows=state_triton.rows,
        verify_step=state_triton.verify_step,
        masks=state_triton.masks,
        advance=state_triton.advance,
        sample=sampling_triton.sample,
        edit=sampling_triton.edit,
        sample_candidates=draft_head_triton.sample_candidates,
        synthetic_accept=state_triton.synthetic_accept,
    )
