"""A tiny GGUF file with any metadata and tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

HIDDEN, LAYERS, HEADS, VOCABULARY = 64, 2, 4, 128

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a Llama of two layers, or what the arguments make of it; None takes a value or a tensor away."""

    def make(
        name: str = "x.gguf",
        architecture: str = "llama",
        values: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
        kind: str = "F32",
        layers: int = LAYERS,
    ) -> Path:
        writer = GGUFWriter(tmp_path / name, architecture)
        facts: dict[str, Any] = {
            f"{architecture}.context_length": 64, f"{architecture}.embedding_length": HIDDEN,
            f"{architecture}.block_count": layers, f"{architecture}.feed_forward_length": HIDDEN,
            f"{architecture}.attention.head_count": HEADS, f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["<end>", "t", "h", "th"], "tokenizer.ggml.token_type": [3, 1, 1, 1],
            "tokenizer.ggml.merges": ["t h"], "tokenizer.ggml.eos_token_id": 0, **(values or {}),
        }  # fmt: skip
        adders = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        for key, value in facts.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                adders[type(value)](key, value)
        square, row = np.ones((HIDDEN, HIDDEN), np.float32), np.ones(HIDDEN, np.float32)
        held: dict[str, np.ndarray[Any, Any] | None] = {
            "token_embd.weight": np.ones((VOCABULARY, HIDDEN), np.float32),
            "output_norm.weight": row,
        }
        norms = ["attn_norm", "ffn_norm"]
        if architecture.startswith("gemma"):
            norms += ["post_attention_norm", "post_ffw_norm"]
        for layer in range(layers):
            for linear in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
                held[f"blk.{layer}.{linear}.weight"] = square
            held |= {f"blk.{layer}.{norm}.weight": row for norm in norms}
            if architecture in ("qwen3", "gemma3"):
                held |= {f"blk.{layer}.attn_{x}_norm.weight": row[: HIDDEN // HEADS] for x in "qk"}
        for tensor, numbers in (held | dict(tensors or {})).items():
            if numbers is not None:
                wanted = GGMLQuantizationType[kind if numbers.ndim > 1 else "F32"]
                weights, size = GGML_QUANT_SIZES[wanted]
                is_written = wanted.name != "IQ4_NL"  # the package quantises to no such type
                blocks = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // weights * size), np.uint8)
                writer.add_tensor(tensor, quantize(numbers, wanted) if is_written else blocks, raw_dtype=wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return make
