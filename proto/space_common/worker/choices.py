"""Values of flags that router, worker and evaluation share."""

WEIGHTS = ("plain", "int8", "fp8", "int4", "gguf", "packed")
"""Storage of linears' weights: plain dtype, int8 or fp8 with scales (fp8 saves nothing on a CPU), int4 in groups, the
blocks of a GGUF, or the packed four or eight bits of AWQ, GPTQ and compressed-tensors."""

ASKED_WEIGHTS = ("auto", *WEIGHTS)
"""Values of `--weights`."""

KV_DTYPES = ("auto", "fp8")
"""Values of `--kv-dtype`, the storage of keys and values: plain dtype, or fp8 (see space_kernels/fp8.py)."""
