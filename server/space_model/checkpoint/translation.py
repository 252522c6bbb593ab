"""Checkpoints whose architecture transformers has under another name: config.json and tensors, translated.

InternLM, InternLM2, Qwen (the first), Baichuan, ChatGLM2/3 and MiMo came with their own code, which is never run. Each
computes what a family of transformers computes (Baichuan of 13B: what alibi_llama.py does), with other names and with
tensors that are fused in other ways:

    files                                                    served model
    transformer.h.3.attn.c_attn.weight  [3·hidden, hidden]   model.layers.3.self_attn.q_proj.weight  rows [0, hidden)
                                                             model.layers.3.self_attn.k_proj.weight  rows [hidden, ...)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from space_model.checkpoint.alibi_llama import ALIBI_LLAMA
from space_model.model_error import UnsupportedModel

Rows = slice | Sequence[int]


@dataclass(frozen=True)
class Part:
    """A tensor of the served model: some rows of a tensor of the files."""

    name: str  # of the served model; \\1 … stand for the groups of the rule's pattern
    rows: Rows | None = None  # None: all
    change: Callable[[Tensor], Tensor] | None = None  # applied to the rows


@dataclass(frozen=True)
class TensorRule:
    """What becomes of the tensors of the files whose whole name a pattern matches."""

    pattern: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Translation:
    """A checkpoint as the family of transformers that computes the same."""

    config: Mapping[str, Any]  # config.json of that family
    rules: tuple[TensorRule, ...]

    def parts_of(self, name: str) -> list[Part]:
        """Return what becomes of a tensor of the files; itself if no rule matches."""
        for rule in self.rules:
            found = re.fullmatch(rule.pattern, name)
            if found is not None:
                return [Part(found.expand(part.name), part.rows, part.change) for part in rule.parts]
        return [Part(name)]


def translate(source: Mapping[str, Any], name: str) -> Translation | None:
    """Return the translation of a config.json; None if it needs none. Raises UnsupportedModel, with the reason, for a
    member of these families that no family of transformers computes."""
    make = _FAMILIES.get(str(source.get("model_type")))
    if make is None:
        return None
    try:
        return make(_ConfigFile(source, name))
    except KeyError as error:
        raise UnsupportedModel(
            f"The config.json of {name} has no {error.args[0]}, which its architecture needs. Fetch the config.json "
            "of the original checkpoint."
        ) from error


_OTHER_NAMES = {"kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM")}
"""model_type as published -> transformers' model_type of the same model, and its class."""


def typed_by_class(source: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json of _OTHER_NAMES with transformers' model_type of the class that it names in `architectures`,
    and any other as it is."""
    model_type, class_name = _OTHER_NAMES.get(str(source.get("model_type")), ("", ""))
    if not model_type or source.get("architectures") != [class_name]:
        return source
    return {field: value for field, value in source.items() if field != "auto_map"} | {"model_type": model_type}


def is_own_class(class_name: str, model_type: str) -> bool:
    """Return whether a class for causal language models is called after this type."""
    return is_same_class(class_name, f"{model_type.replace('-', '')}ForCausalLM")


def is_same_class(one: str, other: str) -> bool:
    """Return whether two names of a class differ in their spelling alone: Ernie4_5_ForCausalLM, Ernie4_5ForCausalLM."""
    return one.replace("_", "").lower() == other.replace("_", "").lower()


@dataclass(frozen=True)
class _ConfigFile:
    """A config.json of one of these families."""

    fields: Mapping[str, Any]
    name: str

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field, or the default if it is absent or null."""
        found = self.fields.get(field)
        return default if found is None else found

    def require(self, field: str, wanted: Any, default: Any) -> None:
        """Raises UnsupportedModel unless the field, `default` if absent, is `wanted`."""
        found = self.get(field, default)
        if found != wanted:
            raise UnsupportedModel(
                f"{field} in the config.json of {self.name} is {found!r}; of models of type "
                f"{self['model_type']!r} only those with {wanted!r} are served."
            )

    def kept(self, **fields: Any) -> dict[str, Any]:
        """Return a config with these fields, and those that mean the same in every family."""
        same = ("torch_dtype", "dtype", "quantization_config", "space")
        kept = {field: self.fields[field] for field in same if field in self.fields}
        kept |= {field: self.fields.get(field) for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return kept | {"tie_word_embeddings": bool(self.get("tie_word_embeddings", False))} | fields

    def llama(self, model_type: str, **fields: Any) -> dict[str, Any]:
        """Return a config of the Llama kind."""
        heads = int(self["num_attention_heads"])
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        usual = {field: self[field] for field in names}
        usual |= {"num_key_value_heads": int(self.get("num_key_value_heads", heads)), "hidden_act": "silu"}
        usual |= {"rms_norm_eps": self.get("rms_norm_eps", 1e-6)}
        return self.kept(model_type=model_type, **(usual | fields))


def _internlm(source: _ConfigFile) -> Translation:
    """Llama with biases of queries, keys, values and output; beyond the trained positions a dynamic base."""
    source.require("hidden_act", "silu", "silu")
    rotary = source.get("rotary", {})
    theta = source.get("rope_theta", rotary.get("base", 10000))
    config = source.llama(
        "llama",
        attention_bias=bool(source.get("bias", True)),
        max_position_embeddings=int(source.get("max_position_embeddings", 2048)),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    return Translation(config, ())


def _internlm2(source: _ConfigFile) -> Translation:
    """Llama; queries, keys and values are fused group by group: the queries of a key head, the key, the value."""
    source.require("hidden_act", "silu", "silu")
    scaling = dict(source.get("rope_scaling", {}))
    kind = scaling.pop("type", scaling.pop("rope_type", "default"))
    if kind == "dynamic":  # the default within the trained positions
        kind, scaling = "default", {}
    config = source.llama(
        "llama",
        attention_bias=bool(source.get("bias", False)),
        max_position_embeddings=int(source["max_position_embeddings"]),
        rope_parameters={"rope_type": kind, "rope_theta": source.get("rope_theta", 10000), **scaling},
    )
    heads, groups = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    size = int(config["hidden_size"]) // heads
    shared = heads // groups
    width = (shared + 2) * size

    def of_groups(first: int, count: int) -> list[int]:
        return [group * width + first * size + row for group in range(groups) for row in range(count * size)]

    fused = {"q": of_groups(0, shared), "k": of_groups(shared, 1), "v": of_groups(shared + 1, 1)}
    layer, there = r"model\.layers\.(\d+)\.", r"model.layers.\1."
    rules = [
        TensorRule(r"model\.tok_embeddings\.weight", (Part("model.embed_tokens.weight"),)),
        TensorRule(r"output\.weight", (Part("lm_head.weight"),)),
        TensorRule(layer + r"attention\.wqkv\.(weight|bias)", _split(fused)),
        TensorRule(layer + r"attention\.wo\.(weight|bias)", (Part(there + r"self_attn.o_proj.\2"),)),
        TensorRule(layer + r"attention_norm\.weight", (Part(there + "input_layernorm.weight"),)),
        TensorRule(layer + r"ffn_norm\.weight", (Part(there + "post_attention_layernorm.weight"),)),
    ]
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        rules.append(TensorRule(rf"{layer}feed_forward\.{old}\.weight", (Part(f"{there}mlp.{new}.weight"),)))
    return Translation(config, tuple(rules))


def _qwen(source: _ConfigFile) -> Translation:
    """Qwen2 without grouped heads. Beyond `seq_length` it has a dynamic base and scaled queries (log n), so the window
    ends there."""
    source.require("rotary_pct", 1.0, 1.0)
    source.require("no_bias", True, True)
    source.require("scale_attn_weights", True, True)
    heads, hidden = int(source["num_attention_heads"]), int(source["hidden_size"])
    source.require("kv_channels", hidden // heads, hidden // heads)
    window = int(source.get("max_position_embeddings", source["seq_length"]))
    if source.get("use_dynamic_ntk", True) or source.get("use_logn_attn", True):
        window = min(window, int(source["seq_length"]))
    config = source.llama(
        "qwen2",
        intermediate_size=int(source["intermediate_size"]) // 2,  # config.json counts both halves
        rms_norm_eps=source.get("layer_norm_epsilon", 1e-6),
        max_position_embeddings=window,
        use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": source.get("rotary_emb_base", 10000)},
    )
    layer, there = r"transformer\.h\.(\d+)\.", r"model.layers.\1."
    rules = [
        TensorRule(r"transformer\.wte\.weight", (Part("model.embed_tokens.weight"),)),
        TensorRule(r"transformer\.ln_f\.weight", (Part("model.norm.weight"),)),
        TensorRule(layer + r"attn\.c_attn\.(weight|bias)", _split(_thirds(hidden))),
    ]
    for old, new in (
        (r"attn\.c_proj", "self_attn.o_proj"),
        ("ln_1", "input_layernorm"),
        ("ln_2", "post_attention_layernorm"),
        (r"mlp\.w1", "mlp.up_proj"),
        (r"mlp\.w2", "mlp.gate_proj"),
        (r"mlp\.c_proj", "mlp.down_proj"),
    ):
        rules.append(TensorRule(rf"{layer}{old}\.weight", (Part(f"{there}{new}.weight"),)))
    return Translation(config, tuple(rules))


def _mimo(source: _ConfigFile) -> Translation:
    """Qwen2, with layers for multi-token prediction beside it (draft_networks/mtp.py)."""
    source.require("hidden_act", "silu", "silu")
    source.require("attention_bias", True, True)
    source.require("use_sliding_window", False, False)
    source.require("rope_scaling", None, None)
    heads, hidden = int(source["num_attention_heads"]), int(source["hidden_size"])
    config = source.llama(
        "qwen2",
        head_dim=int(source.get("head_dim", hidden // heads)),
        max_position_embeddings=int(source["max_position_embeddings"]),
        use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": source.get("rope_theta", 10000)},
        num_nextn_predict_layers=int(source.get("num_nextn_predict_layers", 0)),
    )
    return Translation(config, ())


def _baichuan(source: _ConfigFile) -> Translation:
    """Llama; that of 13B has linear biases instead of rotary positions, and its config.json no
    max_position_embeddings. Baichuan 2 normalises each row of its output head."""
    source.require("hidden_act", "silu", "silu")
    positions = source.get("max_position_embeddings")
    config = source.llama(
        "llama" if positions is not None else ALIBI_LLAMA,
        max_position_embeddings=int(source["model_max_length"] if positions is None else positions),
        rope_parameters={"rope_type": "default", "rope_theta": source.get("rope_theta", 10000)},
    )
    layer = r"model\.layers\.(\d+)\."
    rules = [TensorRule(layer + r"self_attn\.W_pack\.(weight|bias)", _split(_thirds(int(config["hidden_size"]))))]
    if "z_loss_weight" in source.fields or config["vocab_size"] == _BAICHUAN2_VOCABULARY:
        rules.append(TensorRule(r"lm_head\.weight", (Part("lm_head.weight", change=_normalised),)))
    return Translation(config, tuple(rules))


_BAICHUAN2_VOCABULARY = 125696


def _normalised(weight: Tensor) -> Tensor:
    return F.normalize(weight.float(), dim=1).to(weight.dtype)


def _chatglm(source: _ConfigFile) -> Translation:
    """GLM: half of each head is rotated, in pairs of neighbours."""
    if "num_layers" not in source.fields or "multi_query_attention" not in source.fields:
        raise UnsupportedModel(
            f"{source.name} is the first ChatGLM, whose tokens have two positions each; transformers has no such "
            "model. Use ChatGLM2, ChatGLM3 or GLM-4."
        )
    source.require("add_bias_linear", False, False)
    source.require("rmsnorm", True, True)
    source.require("post_layer_norm", True, True)
    source.require("apply_residual_connection_post_layernorm", False, False)
    source.require("original_rope", True, True)
    heads, size = int(source["num_attention_heads"]), int(source["kv_channels"])
    groups = int(source["multi_query_group_num"]) if source["multi_query_attention"] else heads
    config = source.kept(
        model_type="glm",
        vocab_size=int(source.get("padded_vocab_size", source.get("vocab_size"))),
        hidden_size=int(source["hidden_size"]),
        intermediate_size=int(source["ffn_hidden_size"]),
        num_hidden_layers=int(source["num_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        hidden_act="silu",
        attention_bias=bool(source.get("add_qkv_bias", False)),
        rms_norm_eps=source["layernorm_epsilon"],
        max_position_embeddings=int(source["seq_length"]),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0 * float(source.get("rope_ratio", 1)),
            "partial_rotary_factor": 0.5,
        },
    )
    ends = heads * size, (heads + groups) * size, (heads + 2 * groups) * size
    fused = {"q": slice(0, ends[0]), "k": slice(ends[0], ends[1]), "v": slice(ends[1], ends[2])}
    layer, there = r"transformer\.encoder\.layers\.(\d+)\.", r"model.layers.\1."
    rules = [
        TensorRule(r"transformer\.embedding\.word_embeddings\.weight", (Part("model.embed_tokens.weight"),)),
        TensorRule(r"transformer\.encoder\.final_layernorm\.weight", (Part("model.norm.weight"),)),
        TensorRule(r"transformer\.output_layer\.weight", (Part("lm_head.weight"),)),
        TensorRule(layer + r"self_attention\.query_key_value\.(weight|bias)", _split(fused)),
        TensorRule(layer + r"((?:input|post_attention)_layernorm\.weight)", (Part(there + r"\2"),)),
    ]
    for old, new in (
        (r"self_attention\.dense", "self_attn.o_proj"),
        (r"mlp\.dense_h_to_4h", "mlp.gate_up_proj"),
        (r"mlp\.dense_4h_to_h", "mlp.down_proj"),
    ):
        rules.append(TensorRule(rf"{layer}{old}\.weight", (Part(f"{there}{new}.weight"),)))
    return Translation(config, tuple(rules))


def _split(fused: Mapping[str, Rows]) -> tuple[Part, ...]:
    """Return the parts of a layer's fused queries, keys and values; the rule's groups are the layer, weight or bias."""
    return tuple(Part(rf"model.layers.\1.self_attn.{kind}_proj.\2", rows) for kind, rows in fused.items())


def _thirds(hidden: int) -> dict[str, Rows]:
    return {kind: slice(number * hidden, (number + 1) * hidden) for number, kind in enumerate("qkv")}


_FAMILIES: Mapping[str, Callable[[_ConfigFile], Translation]] = {
    "baichuan": _baichuan,
    "chatglm": _chatglm,
    "internlm": _internlm,
    "internlm2": _internlm2,
    "mimo": _mimo,
    "qwen": _qwen,
}

TRANSLATED: Mapping[str, tuple[str, ...]] = {
    "baichuan": ("llama", ALIBI_LLAMA),
    "chatglm": ("glm",),
    "internlm": ("llama",),
    "internlm2": ("llama",),
    "mimo": ("qwen2",),
    "qwen": ("qwen2",),
}
"""model_type -> the families that compute the same, of transformers or (alibi_llama) of this server."""


def chosen(tensor: Tensor, part: Part) -> Tensor:
    """Return the part's rows of a tensor of the files; a view if nothing changes but the rows, and they are in turn."""
    if isinstance(part.rows, slice):
        tensor = tensor[part.rows]
    elif part.rows is not None:
        tensor = tensor[torch.tensor(part.rows)]
    return tensor if part.change is None else part.change(tensor)
