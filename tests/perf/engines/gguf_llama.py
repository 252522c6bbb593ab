"""A Llama's bfloat16 safetensors as a GGUF file, weight for weight. Prompts are ids: a tokenizer is written where it is
asked for, with every id but not with the same words.

Norms are float32, as llama.cpp wants them. Its rotary pairs are neighbours, the checkpoint's are half a head apart, so
the rows of queries and keys change places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(checkpoint: Path, file: Path, *, has_tokenizer: bool = False) -> None:
    """Write `file`. Raises ValueError unless the checkpoint is a plain Llama in bfloat16 and, with a tokenizer, this is
    byte-level BPE."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("model_type") != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError(f"{checkpoint} is no Llama with plain rotary positions; only such are written as GGUF here.")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    partial = file.with_suffix(".partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(partial), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if has_tokenizer:
        _add_tokenizer(writer, checkpoint / "tokenizer.json", int(config["vocab_size"]))
    else:
        writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, bits in bfloat16_tensors(checkpoint):
        theirs = gguf_name(name)
        if theirs is None or (theirs == "output.weight" and config.get("tie_word_embeddings")):
            continue
        if bits.ndim == 1:
            writer.add_tensor(theirs, widened(bits))
            continue
        rows: Array = bits
        if theirs.endswith(("attn_q.weight", "attn_k.weight")):
            rows = neighbours(bits, heads if "attn_q" in theirs else kv_heads)
        writer.add_tensor(theirs, rows.view("uint8"), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


def _add_tokenizer(writer: gguf.GGUFWriter, file: Path, num_ids: int) -> None:
    """Add the tokens and merges of a tokenizer.json; ids without a token get one that no text has."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise ValueError(f"{file} is no byte-level BPE; only such is written as GGUF here.")
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {id_: text for text, id_ in model["vocab"].items()} | special
    tokens = [texts.get(id_, f"<unused {id_}>") for id_ in range(num_ids)]
    normal = [id_ in texts and id_ not in special for id_ in range(num_ids)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL if is_normal else gguf.TokenType.CONTROL for is_normal in normal])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])


def gguf_name(name: str) -> str | None:
    """The weight's name in llama.cpp; None for one it does not use. Raises ValueError for an unknown one."""
    if name in WHOLE:
        return WHOLE[name]
    head, _, rest = name.partition("model.layers.")
    layer, _, what = rest.partition(".")
    known = NAMES.get(what.removesuffix(".weight"))
    if head or known is None or not what.endswith(".weight"):
        if what.endswith("rotary_emb.inv_freq"):
            return None
        raise ValueError(f"The weight {name} is no plain Llama's; only such are written as GGUF here.")
    return f"blk.{layer}.{known}.weight"


def neighbours(rows: Array, num_heads: int) -> Array:
    """Rows i and i + D/2 of each head beside each other."""
    outputs, inputs = rows.shape
    halves = rows.reshape(num_heads, 2, outputs // num_heads // 2, inputs)
    return halves.swapaxes(1, 2).reshape(outputs, inputs)


def widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype("uint32") << 16).view("float32")


def bfloat16_tensors(checkpoint: Path) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Name and bits (uint16) of every weight of the base."""
    for file in sorted(checkpoint.glob("model*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            head = json.loads(opened.read(length))
        for name, entry in head.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} of {file} is {entry['dtype']}; only bfloat16 is compared.")
            begin, end = entry["data_offsets"]
            flat = np.memmap(file, dtype="uint16", mode="r", offset=8 + length + begin, shape=((end - begin) // 2,))
            yield name, flat.reshape(entry["shape"])
