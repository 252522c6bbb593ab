"""Builds config.json from the metadata of a GGUF file.

A GGUF file describes a model in llama.cpp's terms; what llama.cpp hard-codes (Gemma's layer pattern, its second rotary
base, the scale of its attention, SmolLM3's layers without positions, the gate of gpt-oss's experts) is listed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from space_common.gguf.find import GgufError
from space_common.gguf.reader import GgufFile
from space_common.gguf.tensors import ROPE_FACTORS, ROPE_FREQUENCIES, SERVED_KINDS

RECONVERT = "Take the checkpoint that the file was made from, as safetensors."

FAMILIES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
}
"""Architecture in the file -> model_type and architecture in config.json."""

_MIXTURE_OF_LLAMA = ("mixtral", "MixtralForCausalLM")  # as FAMILIES, of a llama with experts

_SUMS_TO_ONE = {"qwen2moe": False, "qwen3moe": True, "olmoe": False}
"""Whether llama.cpp divides the chosen experts' weights by their sum. A file's metadata does not say."""

_NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.shared_kv_layers": 0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}
"""Keys that change the computation. Only the value that a missing key implies is supported."""

_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Key of a factor that Granite alone has -> its field of config.json."""

_EXPERTS = frozenset(
    {
        "expert_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_used_count",
    }
)
"""Keys of mixtures of experts. Widths are taken from the tensors."""

_READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.key_length_swa",
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.value_length",
        "attention.value_length_swa",
        "attn_logit_softcapping",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "final_logit_softcapping",
        "rope.dimension_count",
        "rope.dimension_count_swa",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_IDLE = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})
"""Keys that do not change the computation; the vocabulary size is taken from the embedding's rows."""

_DEFAULT_SLIDING_WINDOW = 4096
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the Gemma models whose attention llama.cpp scales by hidden size / heads."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json. Raises GgufError for an unsupported architecture or value."""
    facts = Facts.of(file)
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", heads)
    head_dim = facts.count("attention.key_length", hidden // heads)
    _check_same(facts, "attention.value_length", head_dim)
    _check_same(facts, "attention.key_length_swa", head_dim)
    _check_same(facts, "attention.value_length_swa", head_dim)
    _refuse_attention_scale(facts, head_dim)
    rotary = facts.count("rope.dimension_count", head_dim)
    _check_same(facts, "rope.dimension_count_swa", rotary)
    if rotary != head_dim and facts.architecture != "phi3":
        raise GgufError(
            f"{file.path} turns {rotary} of {head_dim} numbers of a head by their position, which its architecture "
            f"{facts.architecture!r} does not do here. {RECONVERT}"
        )
    model_type, class_name = _MIXTURE_OF_LLAMA if facts.is_mixture_of_llama else FAMILIES[facts.architecture]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": dtype_of(file),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token_id"] = id if isinstance(id, int) and 0 <= id < config["vocab_size"] else None
    if facts.is_mixture:
        config |= _experts(facts)
    if model_type in ("llama", "qwen3", "gemma2", "gemma3_text", "smollm3", "granite", "olmo2", "gemma"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors
    if model_type in ("llama", "smollm3", "granite"):
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    rope = _rope(facts, head_dim, rotary)
    is_sliding_gemma = facts.architecture in _GEMMA_27B_LAYERS
    if is_sliding_gemma:
        config |= _gemma(facts, rope, hidden // heads, head_dim)
    elif facts.architecture == "gpt-oss":
        config |= _gpt_oss(facts, rope)
    else:
        config["rope_parameters"] = rope
    if facts.architecture == "phi3":
        config["sliding_window"] = facts.count("attention.sliding_window", 0) or None
        config["original_max_position_embeddings"] = facts.count(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
    elif not is_sliding_gemma and facts.architecture != "gpt-oss":
        if facts.architecture.startswith("qwen"):
            config["use_sliding_window"] = False
        config |= _more(facts, head_dim)
        _refuse_window(facts)
    return config


def dtype_of(file: GgufFile) -> str:
    """Return the dtype that the weights fit in. Quantised blocks, 8-bit ones included, have coarser steps than
    bfloat16.
    """
    kind = next(iter(file.kinds), "F32")
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


@dataclass(frozen=True)
class Facts:
    """Metadata under the architecture's own prefix, each value checked when it is read."""

    file: GgufFile
    architecture: str

    @classmethod
    def of(cls, file: GgufFile) -> Facts:
        """Read the metadata of a supported architecture. Raises GgufError for unknown architectures and keys."""
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise GgufError(
                f"{file.path} is of architecture {architecture!r}; GGUF files of {', '.join(FAMILIES)} are served. "
                f"{RECONVERT}"
            )
        facts = cls(file, architecture)
        for key, value in file.metadata.items():
            name = key.removeprefix(f"{architecture}.")
            if name == key or name in _READ or name in _IDLE:
                continue
            if (name in _EXPERTS and facts.is_mixture) or (name in _SCALES and architecture == "granite"):
                continue
            if name not in _NEUTRAL:
                raise GgufError(f"{file.path} says {key} = {_short(value)}, which is not understood here. {RECONVERT}")
            if value != _NEUTRAL[name]:
                raise GgufError(
                    f"{file.path} says {key} = {_short(value)}; models with {name} other than {_NEUTRAL[name]} are "
                    f"not served from GGUF. {RECONVERT}"
                )
        return facts

    @property
    def is_mixture_of_llama(self) -> bool:
        """Return whether it is a llama with experts, such as Mixtral."""
        return self.architecture == "llama" and self.get("expert_count") not in (None, 0)

    @property
    def is_mixture(self) -> bool:
        """Return whether it is a mixture of experts."""
        return self.architecture in _SUMS_TO_ONE or self.architecture == "gpt-oss" or self.is_mixture_of_llama

    def get(self, name: str) -> Any:
        """Return the raw value, or None if the file has none."""
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        """Return an integer; a list with one per layer must have equal values."""
        found = self.get(name)
        if isinstance(found, list) and len(set(found)) == 1:
            found = found[0]
        if isinstance(found, list):
            raise GgufError(
                f"{self._named(name)} is another for each layer ({_short(found)}), which is not served. {RECONVERT}"
            )
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or found < (0 if default == 0 else 1):
            raise GgufError(f"{self._named(name)} must be a whole number of at least 1; got {found!r}. {RECONVERT}")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number, with the fewest digits that identify it in float32."""
        found = self.get(name)
        if found is None and default is not None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise GgufError(f"{self._named(name)} must be a number; got {found!r}. {RECONVERT}")
        return float(str(np.float32(found)))

    def _named(self, name: str) -> str:
        return f"{self.architecture}.{name} in {self.file.path}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(f"{file.path} has no token_embd.weight with a row for each token. {RECONVERT}")
    return embedding.shape[0]


def _check_same(facts: Facts, name: str, wanted: int) -> None:
    found = facts.count(name, wanted)
    if found != wanted:
        raise GgufError(
            f"{facts.file.path} says {facts.architecture}.{name} = {found} where heads have {wanted}; heads of "
            f"several sizes are not served. {RECONVERT}"
        )


def _refuse_window(facts: Facts) -> None:
    if window := facts.count("attention.sliding_window", 0):
        raise GgufError(
            f"{facts.file.path} says that its layers see {window} positions back, without saying which layers do. "
            f"{RECONVERT}"
        )


def _rope(facts: Facts, head_dim: int, rotary: int) -> dict[str, Any]:
    """Return rope_parameters of the full-attention layers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 10000.0)}
    if rotary != head_dim:
        rope["partial_rotary_factor"] = rotary / head_dim
    if any(name in facts.file.tensors for name in ROPE_FACTORS) or facts.get("rope.scaling.type") == "longrope":
        return rope | _longrope(facts, rotary)
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0))
    kind = facts.get("rope.scaling.type") or "linear"
    frequencies = facts.file.tensors.get(ROPE_FREQUENCIES)
    if factor not in (0.0, 1.0) and kind != "none":
        if frequencies is not None:
            raise GgufError(
                f"{facts.file.path} scales its rotary positions twice: by {kind} and by {ROPE_FREQUENCIES}. {RECONVERT}"
            )
        if kind == "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return rope | _yarn(facts, factor)
        raise GgufError(f"{facts.file.path} scales its rotary positions by {kind!r}, which is not served. {RECONVERT}")
    if frequencies is not None:
        return rope | _llama3(facts, rope["rope_theta"], rotary)
    return rope


def _longrope(facts: Facts, rotary: int) -> dict[str, Any]:
    """Return the RoPE scaling of Phi-3 and Phi-4; the factors are tensors of the file."""
    if facts.architecture != "phi3":
        raise GgufError(
            f"{facts.file.path} scales its rotary positions by 'longrope', which of GGUF files those of phi3 do here; "
            f"its architecture is {facts.architecture!r}. {RECONVERT}"
        )
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
        "attention_factor": facts.number("rope.scaling.attn_factor", 1.0),
    }
    for name in ROPE_FACTORS:
        found = facts.file.numbers(name) if name in facts.file.tensors else np.empty(0, np.float32)
        if found.shape != (rotary // 2,) or not (np.isfinite(found) & (found > 0)).all():
            raise GgufError(
                f"{facts.file.path} has {found.size} numbers above 0 in {name} where {rotary // 2} frequencies are. "
                f"{RECONVERT}"
            )
        which = "long" if "long" in name else "short"
        rope[f"{which}_factor"] = [float(str(number)) for number in found]
    return rope


def _yarn(facts: Facts, factor: float) -> dict[str, Any]:
    attention = facts.number("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
        "attention_factor": facts.number("rope.scaling.yarn_attn_factor", attention),
        "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3(facts: Facts, theta: float, rotary: int) -> dict[str, Any]:
    """Return the RoPE scaling that gives the per-frequency divisors in the file.

    With low and high of config.json, and w the wavelength in positions, 1/divisor runs linearly from 1/factor to 1
    while original / w runs from low to high. Llama 3 has 1, 4 and 8192.
    """
    found = facts.file.numbers(ROPE_FREQUENCIES).astype(np.float64)
    if found.shape != (rotary // 2,):
        raise GgufError(
            f"{ROPE_FREQUENCIES} in {facts.file.path} has {found.size} numbers where {rotary // 2} frequencies are. "
            f"{RECONVERT}"
        )
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary, 2) / rotary)
    factor, low, high = float(str(np.float32(found.max()))), 1.0, 4.0
    between = (found > 1) & (found < found.max())
    lengths = wavelengths * (low + (high - low) * (1 / found - 1 / factor) / (1 - 1 / factor)) if factor > 1 else found
    for original in [8192, *({round(float(np.median(lengths[between])))} if between.any() else ())]:
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), found, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise GgufError(
        f"{ROPE_FREQUENCIES} in {facts.file.path} divides the rotary frequencies otherwise than Llama 3 does. "
        f"{RECONVERT}"
    )


def _gemma(facts: Facts, rope: dict[str, Any], wide: int, head_dim: int) -> dict[str, Any]:
    """Return the fields of config.json that only Gemma 2 and 3 have. `wide`: hidden size / heads."""
    layers, is_third = facts.count("block_count"), facts.architecture == "gemma3"
    window = facts.count("attention.sliding_window", 0 if is_third else _DEFAULT_SLIDING_WINDOW)
    scalar = wide if layers == _GEMMA_27B_LAYERS[facts.architecture] else head_dim
    if facts.get("attention.scale") is not None:
        scalar = round(facts.number("attention.scale") ** -2)
    config: dict[str, Any] = {
        "sliding_window": window or _DEFAULT_SLIDING_WINDOW,
        "layer_types": _layer_types(facts, layers, 6 if is_third else 2) if window else ["full_attention"] * layers,
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None if is_third else facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0 if is_third else 30.0) or None,
    }
    if is_third:
        local = facts.number("rope.freq_base_swa", 10000.0)
        config["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    else:
        if facts.number("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
            raise GgufError(f"{facts.file.path} has two rotary bases, which Gemma 2 does not have. {RECONVERT}")
        config["rope_parameters"] = rope
    return config


def _more(facts: Facts, head_dim: int) -> dict[str, Any]:
    """Return the fields of config.json that only this family has, of one without sliding windows."""
    if facts.architecture == "granite":
        scale = facts.number("attention.scale", 0.0) or head_dim**-0.5  # llama.cpp takes 0 for this default, too
        return {"attention_multiplier": scale} | {field: facts.number(key, 1.0) for key, field in _SCALES.items()}
    if facts.architecture == "smollm3":
        return {"no_rope_layer_interval": 4, "use_sliding_window": False}
    return {"hidden_act": "gelu_pytorch_tanh"} if facts.architecture == "gemma" else {}


def _refuse_attention_scale(facts: Facts, head_dim: int) -> None:
    """Raises GgufError where a file scales its attention and the family's config.json has no field for it."""
    scale = facts.number("attention.scale", 0.0) or head_dim**-0.5
    takes_scale = facts.architecture == "granite" or facts.architecture in _GEMMA_27B_LAYERS
    if not takes_scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise GgufError(
            f"{facts.file.path} scales its attention by {scale}, which models of {facts.architecture} do not do here. "
            f"{RECONVERT}"
        )


def _gpt_oss(facts: Facts, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that only gpt-oss has. Its YaRN is published without whole bounds
    (`truncate`), and its gate with a limit; a file's metadata has neither."""
    window = facts.count("attention.sliding_window")
    return {
        "attention_bias": True,
        "sliding_window": window,
        "layer_types": _layer_types(facts, facts.count("block_count"), 2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        "swiglu_limit": 7.0,
    }


def _experts(facts: Facts) -> dict[str, Any]:
    """Return the fields of config.json that only mixtures of experts have. Every layer has experts."""
    count, chosen = facts.count("expert_count"), facts.count("expert_used_count")
    if facts.is_mixture_of_llama:
        return {"num_local_experts": count, "num_experts_per_tok": chosen}
    if facts.architecture == "gpt-oss":
        return {
            "num_local_experts": count,
            "num_experts_per_tok": chosen,
            "intermediate_size": _width(facts, "ffn_gate_exps"),
        }
    config: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": _SUMS_TO_ONE[facts.architecture],
    }
    if facts.architecture == "olmoe":
        return config
    config |= {"moe_intermediate_size": _width(facts, "ffn_gate_exps"), "decoder_sparse_step": 1, "mlp_only_layers": []}
    if facts.architecture == "qwen2moe":
        config["shared_expert_intermediate_size"] = _width(facts, "ffn_gate_shexp")
    return config


def _width(facts: Facts, name: str) -> int:
    """Return the outputs of a linear of the first layer's experts, each."""
    tensor = facts.file.tensors.get(f"blk.0.{name}.weight")
    if tensor is None or len(tensor.shape) < 2:
        raise GgufError(f"{facts.file.path} lacks blk.0.{name}.weight with the weights of experts. {RECONVERT}")
    return tensor.shape[-2]


def _layer_types(facts: Facts, layers: int, every: int) -> list[str]:
    """Return each layer's attention type. If the file has none, all but every `every`-th layer use a sliding window."""
    said = facts.get("attention.sliding_window_pattern")
    if isinstance(said, list):
        if len(said) != layers:
            raise GgufError(
                f"{facts.file.path} says of {len(said)} layers whether they have a window, and has {layers}. "
                f"{RECONVERT}"
            )
        return ["sliding_attention" if slides else "full_attention" for slides in said]
    every = facts.count("attention.sliding_window_pattern", every)
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def check_kinds(file: GgufFile) -> None:
    """Raises GgufError for tensors of an unsupported type."""
    others = sorted({tensor.kind_name for tensor in file.tensors.values()} - SERVED_KINDS)
    if others:
        first = next(tensor for tensor in file.tensors.values() if tensor.kind_name == others[0])
        raise GgufError(
            f"{file.path} has tensors of type {', '.join(others)} ({first.name} is one), which are not read; "
            f"{', '.join(sorted(SERVED_KINDS))} are. Take another quantisation of the model, such as Q4_K_M or Q8_0."
        )
