"""Values of flags that router, worker and evaluation share. Importing them loads no torch."""

from collections.abc import Mapping, Sequence

WEIGHTS = ("plain", "int8", "fp8", "int4", "gguf", "packed")
"""Storage of linears' weights: plain dtype, int8 or fp8 with scales (fp8 saves nothing on a CPU), int4 in groups, the
blocks of a GGUF, or the packed four or eight bits of AWQ, GPTQ and compressed-tensors."""

ASKED_WEIGHTS = ("auto", *WEIGHTS)
"""Values of `--weights`."""

KV_DTYPES = ("auto", "fp8")
"""Values of `--kv-dtype`, the storage of keys and values: plain dtype, or fp8 (see space_kernels/fp8.py)."""

ATTENTION = ("auto", "torch", "triton", "flash-attn-2", "flash-attn-3", "flash-attn-4", "flashinfer", "flash-attn")
"""Values of `--attention`: the backends of space_kernels/attention_backends.py."""

CPU_KERNELS = (
    "auto",
    "compiled",
    "torch",
    "amx_bf16",
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx2",
    "neon_bf16",
)
"""Values of `--cpu-kernels`: those of SPACESERVE_CPU_KERNELS (space_kernels/build/cpu_library.py)."""

OF_WORKER: Mapping[str, Sequence[str]] = {
    "weights": ASKED_WEIGHTS,
    "kv_dtype": KV_DTYPES,
    "attention": ATTENTION,
    "cpu_kernels": CPU_KERNELS,
}
"""By field of WorkerSettings."""
