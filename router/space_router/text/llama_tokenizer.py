"""Llama's tokenizer as transformers builds it, which can differ from tokenizer.json.

If a checkpoint names the class LlamaTokenizer, transformers (5 and later) takes the vocabulary and merges from
tokenizer.json and the rest from the class: a space is added before the first word of a text, and with `legacy` also
after each special token. The tokenizer.json of Llama 2, Vicuna and Alpaca always does the latter, so the word after a
`<s>` in a chat template would get different ids.
"""

from collections.abc import Mapping
from typing import Any

_CLASSES = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer"})

AS_IT_IS = frozenset({
    "EvollaModel", "arctic", "aria", "beam", "bigbird_pegasus", "camembertv2-base", "canary", "chatlm", "cohere_asr",
    "ernie4_5", "ernie4_5_moe", "flex_olmo", "fuyu", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe",
    "glm_image", "glmasr", "got_ocr2", "gpt_bigcode", "gradium_phonon_tts", "granite", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "h2ovl_chat", "hyperclovax", "hyperclovax_vision_v2", "hyperclovax_vlm",
    "internlm2", "internlm3", "iquestcoder", "jamba", "kimi_k25", "kimi_linear", "kosmos-2", "llava", "llava_next",
    "mimo_v2_flash", "minicpm3", "minicpm_ocr", "minicpmv", "minicpmv4_6", "minicpmv4_7", "minimax_m2", "ministral",
    "ministral3", "mistral", "mistral3", "mistral_large4", "mixtral", "modernbert", "modernbert-decoder", "molmo",
    "molmo2", "nemo_speechlm", "nemotron", "nvfp4", "nystromformer", "olmo2", "olmo3", "olmo_hybrid", "opencua",
    "openvla", "paddleocr_vl", "pegasus_x", "persimmon", "phi3", "phi3_v", "phimoe", "pix2struct", "pixtral",
    "pocket_tts", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2", "smolvlm",
    "stablelm", "step3_vl", "umt5", "vipllava", "voxtral", "voxtral_realtime", "xlm-roberta-xl",
})  # fmt: skip
"""Model types for which transformers (5.23) uses tokenizer.json unchanged, whatever class the files name."""

DEFAULTS: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The class's special tokens, used if the files name none."""


def is_llama_class(content: Mapping[str, Any], config: Mapping[str, Any], model_config: Mapping[str, Any]) -> bool:
    """Return whether transformers builds the tokenizer with Llama's class.

    The arguments are tokenizer.json, tokenizer_config.json and config.json.
    """
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if not isinstance(named, str) or named.removesuffix("Fast") not in _CLASSES:
        return False
    if model_config.get("model_type") in AS_IT_IS or content.get("model", {}).get("type", "BPE") != "BPE":
        return False
    return "ByteLevel" not in _kinds(content.get("pre_tokenizer")) | _kinds(content.get("decoder"))


def rebuilt(content: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json as Llama's class builds it, without added tokens."""
    is_code = str(config.get("tokenizer_class", "")).startswith("CodeLlama")
    has_prefix = config.get("add_prefix_space") is not False
    scheme = "never" if not has_prefix else "always" if config.get("legacy") is True and not is_code else "first"
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix or is_code:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = dict(content["model"]) | {
        "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
        "byte_fallback": True, "ignore_merges": False,
    }  # fmt: skip
    if not is_code:
        model["unk_token"] = None
    return dict(content) | {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": parts},
        "model": model,
    }


def _kinds(part: Any) -> set[str]:
    """Return the types of a pre-tokenizer or decoder and of its parts."""
    if not isinstance(part, Mapping):
        return set()
    inner = [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return {str(part.get("type"))}.union(*map(_kinds, inner))
