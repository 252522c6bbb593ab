"""Dense models of InternLM, InternLM2, Qwen (the first), Baichuan, ChatGLM2/3 and MiMo, written from what was published
of each, and random checkpoints with the names and layouts of theirs.

They are an oracle of their own: nothing here knows how the server translates such a checkpoint. Everything is float32,
one sequence, no cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]
Fields = dict[str, Any]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _causal(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """query [H, R, D], key and value [H, R, D] -> [R, H·D]"""
    count, size = query.shape[1:]
    scores = query @ key.transpose(1, 2) / size**0.5
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1)


def _turned_by_halves(x: Tensor, base: float) -> Tensor:
    """[H, R, D]: number i of a head and number i + D/2 are turned by position / base^(2i/D)."""
    _, count, size = x.shape
    angles = torch.arange(count)[:, None] / base ** (torch.arange(0, size, 2) / size)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def _turned_in_pairs(x: Tensor, width: int, base: float) -> Tensor:
    """[H, R, D]: neighbours 2i and 2i + 1 of the first `width` numbers are turned by position / base^(2i/width)."""
    angles = torch.arange(x.shape[1])[:, None] / base ** (torch.arange(0, width, 2) / width)
    pairs = x[..., :width].unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1)
    return torch.cat([turned.flatten(-2), x[..., width:]], -1)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(0, 1)


def _falling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H, R, D] each -> [R, H·D]: causal, with slope · distance off each score (Press et al. 2022). Slopes of a power
    of two of heads are 2^(-8·i/heads); further heads have every other slope of twice as many."""
    heads, count, size = q.shape
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]
    out = torch.empty(count, heads, size)
    for head, slope in enumerate(slopes):
        for row in range(count):
            scores = k[head, : row + 1] @ q[head, row] / size**0.5 - slope * torch.arange(row, -1, -1)
            out[row, head] = scores.softmax(0) @ v[head, : row + 1]
    return out.flatten(1)


def _linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def internlm(c: Fields, t: Tensors, ids: Tensor) -> Tensor:
    """InternLM 7B and 20B: Llama's layers, with biases on the projections of attention."""
    x, heads = t["model.embed_tokens.weight"][ids], c["num_attention_heads"]
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        normed = _rms_norm(x, t[f"{at}.input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = (_heads(_linear(t, f"{at}.self_attn.{kind}_proj", normed), heads) for kind in "qkv")
        base = c["rotary"]["base"]
        attended = _causal(_turned_by_halves(q, base), _turned_by_halves(k, base), v)
        x = x + _linear(t, f"{at}.self_attn.o_proj", attended)
        normed = _rms_norm(x, t[f"{at}.post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = _linear(t, f"{at}.mlp.gate_proj", normed), _linear(t, f"{at}.mlp.up_proj", normed)
        x = x + _linear(t, f"{at}.mlp.down_proj", F.silu(gate) * up)
    return _linear(t, "lm_head", _rms_norm(x, t["model.norm.weight"], c["rms_norm_eps"]))


def internlm2(c: Fields, t: Tensors, ids: Tensor) -> Tensor:
    """InternLM2: wqkv holds, for each key head, its query heads, then the key, then the value."""
    x, heads, groups = t["model.tok_embeddings.weight"][ids], c["num_attention_heads"], c["num_key_value_heads"]
    shared = heads // groups
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        normed = _rms_norm(x, t[f"{at}.attention_norm.weight"], c["rms_norm_eps"])
        fused = _linear(t, f"{at}.attention.wqkv", normed).unflatten(-1, (groups, shared + 2, -1))
        q = fused[:, :, :shared].flatten(1, 2).transpose(0, 1)
        k, v = (fused[:, :, at].repeat_interleave(shared, 1).transpose(0, 1) for at in (shared, shared + 1))
        base = c["rope_theta"]
        x = x + _linear(t, f"{at}.attention.wo", _causal(_turned_by_halves(q, base), _turned_by_halves(k, base), v))
        normed = _rms_norm(x, t[f"{at}.ffn_norm.weight"], c["rms_norm_eps"])
        gate, up = _linear(t, f"{at}.feed_forward.w1", normed), _linear(t, f"{at}.feed_forward.w3", normed)
        x = x + _linear(t, f"{at}.feed_forward.w2", F.silu(gate) * up)
    return _linear(t, "output", _rms_norm(x, t["model.norm.weight"], c["rms_norm_eps"]))


def qwen(c: Fields, t: Tensors, ids: Tensor) -> Tensor:
    """Qwen 1.8B to 72B (the first): one bias, of queries, keys and values; w1 is multiplied by silu(w2)."""
    x, heads, eps = t["transformer.wte.weight"][ids], c["num_attention_heads"], c["layer_norm_epsilon"]
    for n in range(c["num_hidden_layers"]):
        at = f"transformer.h.{n}"
        normed = _rms_norm(x, t[f"{at}.ln_1.weight"], eps)
        q, k, v = (_heads(part, heads) for part in _linear(t, f"{at}.attn.c_attn", normed).chunk(3, -1))
        base = c["rotary_emb_base"]
        attended = _causal(_turned_by_halves(q, base), _turned_by_halves(k, base), v)
        x = x + _linear(t, f"{at}.attn.c_proj", attended)
        normed = _rms_norm(x, t[f"{at}.ln_2.weight"], eps)
        first, second = _linear(t, f"{at}.mlp.w1", normed), _linear(t, f"{at}.mlp.w2", normed)
        x = x + _linear(t, f"{at}.mlp.c_proj", first * F.silu(second))
    return _linear(t, "lm_head", _rms_norm(x, t["transformer.ln_f.weight"], eps))


def baichuan(c: Fields, t: Tensors, ids: Tensor) -> Tensor:
    """Baichuan and Baichuan 2: W_pack holds queries, keys and values; the head of the second is normalised. That of 13B
    has no rotary positions, and scores that fall with the distance of a key."""
    x, heads = t["model.embed_tokens.weight"][ids], c["num_attention_heads"]
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        normed = _rms_norm(x, t[f"{at}.input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = (_heads(part, heads) for part in _linear(t, f"{at}.self_attn.W_pack", normed).chunk(3, -1))
        if "max_position_embeddings" in c:
            attended = _causal(_turned_by_halves(q, 10000.0), _turned_by_halves(k, 10000.0), v)
        else:
            attended = _falling(q, k, v)
        x = x + _linear(t, f"{at}.self_attn.o_proj", attended)
        normed = _rms_norm(x, t[f"{at}.post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = _linear(t, f"{at}.mlp.gate_proj", normed), _linear(t, f"{at}.mlp.up_proj", normed)
        x = x + _linear(t, f"{at}.mlp.down_proj", F.silu(gate) * up)
    head = t["lm_head.weight"]
    if "z_loss_weight" in c:
        head = head / head.norm(dim=1, keepdim=True)
    return _rms_norm(x, t["model.norm.weight"], c["rms_norm_eps"]) @ head.T


def mimo(c: Fields, t: Tensors, ids: Tensor) -> Tensor:
    """MiMo-7B: grouped heads, and biases of queries, keys and values. Its MTP layers have no part in the text."""
    x, heads, groups = t["model.embed_tokens.weight"][ids], c["num_attention_heads"], c["num_key_value_heads"]
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        normed = _rms_norm(x, t[f"{at}.input_layernorm.weight"], c["rms_norm_eps"])
        q = _heads(_linear(t, f"{at}.self_attn.q_proj", normed), heads)
        k, v = (_heads(_linear(t, f"{at}.self_attn.{kind}_proj", normed), groups) for kind in "kv")
        k, v = (part.repeat_interleave(heads // groups, 0) for part in (_turned_by_halves(k, c["rope_theta"]), v))
        x = x + _linear(t, f"{at}.self_attn.o_proj", _causal(_turned_by_halves(q, c["rope_theta"]), k, v))
        normed = _rms_norm(x, t[f"{at}.post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = _linear(t, f"{at}.mlp.gate_proj", normed), _linear(t, f"{at}.mlp.up_proj", normed)
        x = x + _linear(t, f"{at}.mlp.down_proj", F.silu(gate) * up)
    return _linear(t, "lm_head", _rms_norm(x, t["model.norm.weight"], c["rms_norm_eps"]))


def chatglm(c: Fields, t: Tensors, ids: Tensor) -> Tensor:
    """ChatGLM2, ChatGLM3 and GLM-4: the first half of each head is turned, in pairs of neighbours."""
    x, heads = t["transformer.embedding.word_embeddings.weight"][ids], c["num_attention_heads"]
    groups, size, eps = c["multi_query_group_num"], c["kv_channels"], c["layernorm_epsilon"]
    base = 10000.0 * c.get("rope_ratio", 1)
    for n in range(c["num_layers"]):
        at = f"transformer.encoder.layers.{n}"
        normed = _rms_norm(x, t[f"{at}.input_layernorm.weight"], eps)
        fused = _linear(t, f"{at}.self_attention.query_key_value", normed)
        q, k, v = fused.split([heads * size, groups * size, groups * size], -1)
        q, k = _turned_in_pairs(_heads(q, heads), size // 2, base), _turned_in_pairs(_heads(k, groups), size // 2, base)
        k, v = (part.repeat_interleave(heads // groups, 0) for part in (k, _heads(v, groups)))
        x = x + _linear(t, f"{at}.self_attention.dense", _causal(q, k, v))
        normed = _rms_norm(x, t[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = _linear(t, f"{at}.mlp.dense_h_to_4h", normed).chunk(2, -1)
        x = x + _linear(t, f"{at}.mlp.dense_4h_to_h", F.silu(gate) * up)
    return _linear(t, "transformer.output_layer", _rms_norm(x, t["transformer.encoder.final_layernorm.weight"], eps))


DENSE: dict[str, Callable[[Fields, Tensors, Tensor], Tensor]] = {
    "baichuan": baichuan, "chatglm": chatglm, "internlm": internlm, "internlm2": internlm2, "qwen": qwen,
    "mimo": mimo,
}  # fmt: skip
"""model_type -> its logits: config.json, tensors, ids [R] -> [R, vocabulary]"""

_COMMON = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
_LLAMA = {**_COMMON, "intermediate_size": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 2}

CONFIGS: dict[str, Fields] = {
    "internlm-7b": {
        **_LLAMA, "model_type": "internlm", "bias": True, "max_position_embeddings": 512,
        "rotary": {"base": 10000, "type": "dynamic"},
    },
    "internlm2-7b": {
        **_LLAMA, "model_type": "internlm2", "num_key_value_heads": 2, "bias": False, "rope_theta": 1000000,
        "rope_scaling": {"factor": 2.0, "type": "dynamic"}, "max_position_embeddings": 512,
    },
    "Qwen-7B": {
        **_COMMON, "model_type": "qwen", "intermediate_size": 256, "layer_norm_epsilon": 1e-6, "kv_channels": 16,
        "rotary_emb_base": 10000, "rotary_pct": 1.0, "seq_length": 256, "max_position_embeddings": 1024,
        "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True, "scale_attn_weights": True,
    },
    "Baichuan-7B": {**_LLAMA, "model_type": "baichuan", "max_position_embeddings": 512},
    "Baichuan2-7B-Chat": {
        **_LLAMA, "model_type": "baichuan", "max_position_embeddings": 512, "model_max_length": 512,
        "z_loss_weight": 0,
    },
    "chatglm3-6b": {
        "model_type": "chatglm", "padded_vocab_size": 128, "hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2,
        "num_attention_heads": 4, "kv_channels": 16, "multi_query_attention": True, "multi_query_group_num": 2,
        "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False, "original_rope": True, "layernorm_epsilon": 1e-5,
        "seq_length": 512, "eos_token_id": 2,
    },
}  # fmt: skip
"""As the released config.json of each says, but for sizes."""
CONFIGS["glm-4-9b-chat"] = {**CONFIGS["chatglm3-6b"], "rope_ratio": 500}
CONFIGS["MiMo-7B-RL"] = {
    **_LLAMA, "model_type": "mimo", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
    "max_position_embeddings": 512, "rope_theta": 640000, "use_sliding_window": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
CONFIGS["Baichuan-13B-Chat"] = {
    **_LLAMA, "model_type": "baichuan", "hidden_size": 96, "num_attention_heads": 6, "model_max_length": 512,
}  # fmt: skip
CONFIGS["Baichuan2-13B-Chat"] = {**CONFIGS["Baichuan-13B-Chat"], "z_loss_weight": 0}


def _shapes(c: Fields) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a checkpoint, as released."""
    kind, hidden = c["model_type"], c["hidden_size"]
    vocab_size = c.get("vocab_size", c.get("padded_vocab_size"))
    assert isinstance(vocab_size, int)
    if kind == "chatglm":
        fused = (c["num_attention_heads"] + 2 * c["multi_query_group_num"]) * c["kv_channels"]
        yield "transformer.embedding.word_embeddings.weight", (vocab_size, hidden)
        yield "transformer.output_layer.weight", (vocab_size, hidden)
        yield "transformer.encoder.final_layernorm.weight", (hidden,)
        for n in range(c["num_layers"]):
            at = f"transformer.encoder.layers.{n}"
            yield f"{at}.input_layernorm.weight", (hidden,)
            yield f"{at}.post_attention_layernorm.weight", (hidden,)
            yield f"{at}.self_attention.query_key_value.weight", (fused, hidden)
            yield f"{at}.self_attention.query_key_value.bias", (fused,)
            yield f"{at}.self_attention.dense.weight", (hidden, hidden)
            yield f"{at}.mlp.dense_h_to_4h.weight", (2 * c["ffn_hidden_size"], hidden)
            yield f"{at}.mlp.dense_4h_to_h.weight", (hidden, c["ffn_hidden_size"])
        return
    inner = c["intermediate_size"] // (2 if kind == "qwen" else 1)
    names = {
        "internlm2": ("model.tok_embeddings", "output", "model.norm"),
        "qwen": ("transformer.wte", "lm_head", "transformer.ln_f"),
    }.get(kind, ("model.embed_tokens", "lm_head", "model.norm"))
    yield f"{names[0]}.weight", (vocab_size, hidden)
    yield f"{names[1]}.weight", (vocab_size, hidden)
    yield f"{names[2]}.weight", (hidden,)
    of_layer = {
        "internlm2": ("attention_norm", "ffn_norm", "attention.wo", *(f"feed_forward.{w}" for w in ("w1", "w3", "w2"))),
        "qwen": ("ln_1", "ln_2", "attn.c_proj", "mlp.w1", "mlp.w2", "mlp.c_proj"),
    }.get(
        kind,
        (
            "input_layernorm", "post_attention_layernorm", "self_attn.o_proj",
            *(f"mlp.{linear}_proj" for linear in ("gate", "up", "down")),
        ),
    )  # fmt: skip
    for n in range(c["num_hidden_layers"]):
        at = f"transformer.h.{n}" if kind == "qwen" else f"model.layers.{n}"
        sizes = ((hidden,), (hidden,), (hidden, hidden), (inner, hidden), (inner, hidden), (hidden, inner))
        for name, shape in zip(of_layer, sizes, strict=True):
            yield f"{at}.{name}.weight", shape
        if kind == "internlm":
            for projection in "qkvo":
                if projection != "o":
                    yield f"{at}.self_attn.{projection}_proj.weight", (hidden, hidden)
                yield f"{at}.self_attn.{projection}_proj.bias", (hidden,)
            yield f"{at}.self_attn.rotary_emb.inv_freq", (hidden // c["num_attention_heads"] // 2,)
        elif kind == "mimo":
            of_keys = c["num_key_value_heads"] * c["head_dim"]
            for projection, outputs in (("q", hidden), ("k", of_keys), ("v", of_keys)):
                yield f"{at}.self_attn.{projection}_proj.weight", (outputs, hidden)
                yield f"{at}.self_attn.{projection}_proj.bias", (outputs,)
        elif kind == "internlm2":
            size = hidden // c["num_attention_heads"]
            yield (
                f"{at}.attention.wqkv.weight",
                ((c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * size, hidden),
            )
        elif kind == "qwen":
            yield f"{at}.attn.c_attn.weight", (3 * hidden, hidden)
            yield f"{at}.attn.c_attn.bias", (3 * hidden,)
        else:
            yield f"{at}.self_attn.W_pack.weight", (3 * hidden, hidden)
    if kind == "mimo":
        yield "model.mtp_layers.0.input_proj.weight", (hidden, 2 * hidden)
        yield "model.mtp_layers.0.final_layernorm.weight", (hidden,)


def write_published(folder: Path, config: Fields, *, seed: int = 0, num_files: int = 1) -> Tensors:
    """Write a random checkpoint as it was released, in so many files, and return its tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in _shapes(config):
        noise = torch.randn(shape, generator=generator)
        is_bias = name.endswith("bias")
        tensors[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else 0.1 * noise + (0.0 if is_bias else 1.0)
    folder.mkdir(parents=True, exist_ok=True)
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | own), encoding="utf-8")
    parts = [dict(list(tensors.items())[n::num_files]) for n in range(num_files)]
    files = [f"model-{n + 1:05}-of-{num_files:05}.safetensors" for n in range(num_files)]
    if num_files == 1:
        files = ["model.safetensors"]
    else:
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file)
    return tensors
