"""Makes k_quants.gguf and k_quants.json anew: a tiny random Llama, quantised by llama.cpp.

    python tests/model/gguf/make_k_quants.py

Needs `pip install llama-cpp-python`, which nothing else here does. The numbers of k_quants.json are hashes of what
llama.cpp's own functions make of each tensor: that ours are the same is then tested without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from doubles.gguf_files import write_gguf
from gguf import GGUFReader
from tiny_checkpoints import tiny_checkpoint

HERE = Path(__file__).parent


def main() -> None:
    """Blocks of 256 need rows of 256; a row of attention's output has 64 and is kept in another type for it."""
    library = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.glob("lib/libggml-base.so"))))
    target = HERE / "k_quants.gguf"
    with tempfile.TemporaryDirectory() as name:
        source = tiny_checkpoint(
            Path(name) / "model", hidden_size=256, intermediate_size=256, num_layers=1, num_masks=0
        )
        plain = write_gguf(source, Path(name) / "plain.gguf")
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
        settings.token_embedding_type = llama_cpp.GGML_TYPE_Q5_K
        if llama_cpp.llama_model_quantize(str(plain).encode(), str(target).encode(), ctypes.byref(settings)):
            sys.exit("llama.cpp did not quantise the model")
    hashes = {}
    for tensor in GGUFReader(target).tensors:
        kind = tensor.tensor_type.name
        numbers = np.empty(tensor.n_elements, np.float32)
        if kind == "F32":
            numbers[:] = tensor.data.ravel()
        else:
            blocks = np.ascontiguousarray(tensor.data)
            made = getattr(library, f"dequantize_row_{kind.replace('Q', 'q')}")
            made(
                ctypes.c_void_p(blocks.ctypes.data),
                ctypes.c_void_p(numbers.ctypes.data),
                ctypes.c_int64(tensor.n_elements),
            )
        hashes[tensor.name] = {"type": kind, "sha256": hashlib.sha256(numbers.tobytes()).hexdigest()}
    (HERE / "k_quants.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
