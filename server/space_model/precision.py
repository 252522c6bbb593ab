"""Chooses a model's device and dtype, with the reason."""

from __future__ import annotations

import torch
from space_common.worker.choices import WEIGHTS
from space_kernels.build.cpu_library import CpuLibrary, cpu_library
from space_kernels.linear.cpu_linear import STORED
from space_kernels.linear.gguf_blocks import KINDS

from space_model.checkpoint.quantized_formats import PACKED_FORMATS
from space_model.model_error import InvalidSetting

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> torch.device:
    """Return the device; `auto` is the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InvalidSetting(f"{device!r} is no device that torch knows; use auto, cpu or cuda.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("This machine (or this build of torch) has no CUDA device; use --device cpu.")
    return place


def refuse_tf32() -> None:
    """Disable TF32 on a GPU, even if the environment enables it (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def choose_weights(
    weights: str,
    dtype: str,
    device: torch.device,
    *,
    kept: str | None,
    num_ranks: int = 1,
    cpu_kernels: str | None = None,
) -> str:
    """Return the storage that one of ASKED_WEIGHTS stands for. `packed`: a quantised checkpoint as it is, of a GGUF its
    blocks (`gguf`). `auto`: the same where compiled operations of one CPU process multiply it and `dtype` allows
    bfloat16; all else is plain. `kept`, `cpu_kernels`: as for `choose_dtype`."""
    own = "packed" if kept is None or kept in PACKED_FORMATS else "gguf"
    if weights != "auto":
        return own if weights == "packed" else weights
    fits = device.type == "cpu" and dtype in ("auto", "bfloat16") and num_ranks == 1
    if not fits or not (kept in KINDS or kept in PACKED_FORMATS) or _compiled(cpu_kernels) is None:
        return "plain"
    return own


def choose_dtype(
    dtype: str,
    device: torch.device,
    stored: torch.dtype | None,
    weights: str = "plain",
    cpu_kernels: str | None = None,
    kept: str | None = None,
) -> tuple[torch.dtype, str]:
    """Return the dtype and the reason for it. `stored`: the checkpoint's own dtype; `weights`: one of WEIGHTS;
    `cpu_kernels`: one of CHOICES in cpu_library.py, None: from the environment; `kept`: the format of quantised
    weights, such as Q4_K or AWQ (see Checkpoint.kept_as), in which case `stored` is a dtype that is finer."""
    own = "the checkpoint's own" if kept is None else f"finer than the steps of {kept}"
    if weights not in WEIGHTS:
        raise InvalidSetting(f"weights must be auto, plain, int8, int4, packed, gguf or fp8; got {weights!r}.")
    if weights != "plain":
        if weights == "packed" and kept is None:
            raise InvalidSetting(
                "--weights packed keeps what is quantised already: a GGUF, AWQ, GPTQ or compressed-tensors of four "
                "bits or, without zero points, eight, in groups of 32, 64 or 128, or MXFP4. The checkpoint is none; "
                "take --weights int4."
            )
        if weights == "gguf" and (kept is None or kept in PACKED_FORMATS):
            cure = "int4" if kept is None else "packed"
            raise InvalidSetting(
                "--weights gguf keeps the blocks of a quantised GGUF file, and the checkpoint is none; "
                f"take --weights {cure}."
            )
        if weights in ("int8", "int4", *STORED) and device.type != "cpu":
            cure = "take --weights fp8" if device.type == "cuda" else f"leave out --weights {weights}"
            raise InvalidSetting(f"{weights} weights are for CPUs, and the device is {device}; {cure}.")
        if dtype not in ("auto", "bfloat16"):
            raise InvalidSetting(f"{weights} weights are multiplied in bfloat16; leave out --dtype {dtype}.")
        return torch.bfloat16, f"what {weights} weights are multiplied in"
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise InvalidSetting(f"dtype must be auto, float32, bfloat16 or float16; got {dtype!r}.")
        return _DTYPES[dtype], "as asked"
    if device.type != "cpu":
        if stored is not None and stored in _DTYPES.values():
            return stored, own
        return torch.bfloat16, "the checkpoint does not say" if stored is None else f"stands in for {stored}"
    if stored is torch.bfloat16:
        return _for_bfloat16(cpu_kernels, own)
    if stored is torch.float16:
        return torch.float32, "the checkpoint is torch.float16, of which float32 has every number, and faster on a CPU"
    return torch.float32, "the checkpoint does not say" if stored is None else f"the checkpoint is {stored}"


def _for_bfloat16(cpu_kernels: str | None, own: str) -> tuple[torch.dtype, str]:
    """Return the dtype that computes a bfloat16 checkpoint on this CPU."""
    if multiplies_bfloat16():
        return torch.bfloat16, f"{own}, and this CPU multiplies bfloat16 natively"
    if cpu_kernels not in (None, "auto", "torch"):  # availability is checked when they are loaded
        return torch.bfloat16, f"{own}, and compiled operations, which take it, are asked for"
    library = _compiled(cpu_kernels)
    if library is not None:
        return torch.bfloat16, f"{own}; operations compiled for {library.kind} widen it as they multiply"
    return torch.float32, "this CPU has no bfloat16 products (AVX512-BF16 or AMX), and no compiled operations stand in"


def _compiled(cpu_kernels: str | None) -> CpuLibrary | None:
    """Return the compiled operations; None if there are none. Raises InvalidSetting if they are demanded."""
    try:
        return None if cpu_kernels == "torch" else cpu_library()
    except ValueError as error:
        raise InvalidSetting(str(error)) from error


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 matmul instructions (AVX512-BF16 or AMX); else float32 is faster."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
