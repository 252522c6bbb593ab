"""Tries every causal language model of transformers, tiny and random: served with equal logits, or refused with a
reason.

`tests/support/family_sweep.py` prints the page of results (server/MODELS.md), which a test compares with the
code.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from family_drafts import DraftTrial, try_drafts
from published_models import CONFIGS as PUBLISHED
from published_models import DENSE, write_published
from quantized_testing import KINDS, MXFP4_EXPERTS
from space_common.gguf.config import FAMILIES as GGUF_FAMILIES
from space_common.gguf.tensors import SERVED_KINDS
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import SERVED_ROPE, read_config
from space_model.checkpoint.quantized_formats import PACKED_FORMATS, read_format
from space_model.checkpoint.recurrent_layers import HYBRIDS
from space_model.checkpoint.unused_tensors import MAY_BE_LEFT_OUT, MTP_LAYERS, OTHER_PARTS
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import ModelError
from space_model.networks.tensor_parallel import FAMILIES as SHARED_AMONG_RANKS
from space_model.space_model import SpaceModel
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

NUM_TOKENS, WINDOW = 40, 24  # length of the prompt, and a sliding window shorter than it

CHUNKS = (1, 1, 2, 3, 7, 26)  # chunks of the prompt

MOST_WEIGHTS = 30_000_000  # maximum weights of a tiny model

_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "embedding_size": 64, "intermediate_size": 128, "ffn_dim": 128,
    "ffn_hidden_size": 128, "d_ff": 128, "num_hidden_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 128,
    "encoder_ffn_dim": 128, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "n_shared_experts": 1,
    "num_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "expert_ffn_hidden_size": 64,
    "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "route_scale": 1.5, "router_scaling_factor": 1.5,
    "moe_routed_scaling_factor": 1.5, "num_dense_layers": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "mamba_d_state": 8, "depth": 2, "embed_dim": 64, "num_heads": 4, "out_hidden_size": 64, "d_model": 64,
    "encoder_layerdrop": 0.0,
}  # fmt: skip
"""Sizes of a tiny model; a config uses those that it has."""

_SMALL_IMAGES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip

_MULTIMODAL_ROPE = (
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text", "qwen3_vl_moe_text",
    "qwen3_omni_moe_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "cosmos3_edge_text",
)  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_GEMMA_4 = {
    "global_head_dim": 32, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 2, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
}  # fmt: skip

_OF_FAMILY: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "cohere": {"logit_scale": 1.0}, "cohere2": {"logit_scale": 1.0}, "cohere_compass_text": {"num_hidden_layers": 4},
    "beam": {"mlp_layer_types": ["dense", "sparse"]}, "granitemoeshared": {"shared_intermediate_size": 64},
    "gemma3": {"vision_config": _SMALL_IMAGES, "mm_tokens_per_image": 4},
    **{kind: {"layer_types": ["conv", "full_attention"]} for kind in ("lfm2", "lfm2_moe")},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "moshi": {"audio_vocab_size": 16},
    "zaya": {"num_experts_per_tok": 1}, **{kind: {"rope_parameters": _SECTIONS} for kind in _MULTIMODAL_ROPE},
    "glm4v_moe_text": {"rope_parameters": _SECTIONS | {"mrope_section": [1, 1, 2]}},
    "qwen2_5_omni": {"enable_audio_output": False}, "qwen3_omni_moe": {"enable_audio_output": False},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [64, 32], "rope_parameters": _SECTIONS | {"mrope_section": [3, 3, 2]},
    },
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "4/8"},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]}, "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "janus_vqgan": {"projection_dim": 64, "num_embeddings": 16}, "janus_vision_model": {"projection_dim": 64},
    "hunyuan_vl_text": {"rope_parameters": _SECTIONS | {"mrope_section": [2, 3, 3]}},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    **{kind: {"num_key_value_heads": 4, "head_dim": 8} for kind in _LATENT},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 24}, "mimo_v2_flash": {"v_head_dim": 24},
    "longcat_flash": {
        "num_key_value_heads": 4, "head_dim": 8, "num_layers": 2, "num_hidden_layers": None, "qk_head_dim": 24,
        "zero_expert_num": 2, "moe_topk": 3,
    },
    "llama4_text": {"intermediate_size_mlp": 128, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0]},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _HYBRID | _DELTA),
    "bamba": {"attn_layer_indices": [1]} | _MAMBA_2, "falcon_h1": _MAMBA_2, "granitemoehybrid": _HYBRID | _MAMBA_2,
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2},
    **{kind: {"state_size": 8, "time_step_rank": 8} for kind in ("mamba", "falcon_mamba")},
    "nemotron_h": _MAMBA_2 | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "gemma4_text": _GEMMA_4 | {"num_kv_shared_layers": 2}, "gemma4_unified_text": _GEMMA_4,
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 16, "laurel_rank": 16,
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0],
    },
    "gemma3n_vision": {"vocab_size": 4, "vocab_offset": 120},
    "timm_wrapper": {"hidden_size": 32, "model_args": {"embed_dim": 32}},
    "gemma3n_audio": {
        "vocab_size": 4, "vocab_offset": 124, "conf_num_hidden_layers": 1, "sscp_conv_channel_size": (8, 8),
        "conf_num_attention_heads": 4,
    },
}  # fmt: skip
"""Overrides by family; None: the family's own default."""


_NAMES_LOST = frozenset({"kimi_k25", "qianfan_ocr"})
"""Families that transformers does not write with the names that it reads."""


@dataclass(frozen=True)
class FamilyResult:
    """The result for one family."""

    model_type: str
    model_class: str
    cpu: str  # served, refused or untried
    gpu: str
    reason: str = ""  # why it is refused or could not be tried
    difference: float = 0.0  # largest difference of logits from transformers', relative to the largest logit
    exact: bool = True  # a prompt in chunks gives the same bits as a whole one
    drafts: DraftTrial = field(default_factory=DraftTrial)


def families() -> dict[str, str]:
    """Model type -> its class in transformers; of one that also sees or hears, the whole model's class."""
    named = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}.items()
    return {kind: name if isinstance(name, str) else name[0] for kind, name in sorted(named)}


def _auto_class(model_type: str) -> Any:
    return AutoModelForMultimodalLM if model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES else AutoModelForCausalLM


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the family's config with tiny sizes. Raises what the config class raises."""
    return CONFIG_MAPPING[model_type](**_sizes_of(CONFIG_MAPPING[model_type], _OF_FAMILY.get(model_type, {})))


def _sizes_of(config_class: Any, more: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    default = config_class()
    known = set(default.to_dict()) | set(config_class.attribute_map)
    fields = {name: value for name, value in _SIZES.items() if name in known}
    for name in config_class.sub_configs if depth < 3 else ():
        part = getattr(default, name, None)
        kind = getattr(part, "model_type", None)
        if kind in CONFIG_MAPPING and part is not default:
            sizes = _sizes_of(type(part), _OF_FAMILY.get(kind, {}), depth + 1)
            fields[name] = sizes | {"model_type": kind}
    fields |= deepcopy(more)  # transformers adds to the dictionaries that it is given
    return {name: value for name, value in fields.items() if value is not None}


def write_tiny(model_type: str, folder: Path) -> None:
    """Write a random model of the family: unit gain per layer, with biases and norms large enough to matter."""
    config = tiny_config(model_type)
    auto = _auto_class(model_type)
    with torch.device("meta"), no_init_weights():
        count = sum(weight.numel() for weight in auto.from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"its smallest model here has {count / 1e6:.0f} million weights")
    model = auto.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() > 1:
            gain = 2.0 if "embed" in name or "lm_head" in name else 1.0
            weight.data = noise * (gain * weight.shape[-1] ** -0.5)
        elif name.endswith("dt_bias"):  # recurrent states of which something is left after tens of rows
            weight.data = noise - 3.0
        else:
            weight.data = weight.data + 0.1 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():  # of an expert's score, when experts are chosen
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    model.tie_weights()
    model.save_pretrained(folder, save_original_format=model_type not in _NAMES_LOST)


def sweep(model_type: str, folder: Path) -> FamilyResult:
    """Write a tiny model of the family to `folder`, serve it, and compare it with transformers."""
    with warnings.catch_warnings(), _quiet(), _without_eyes():
        warnings.simplefilter("ignore")
        return _sweep(model_type, families()[model_type], folder)


def _sweep(model_type: str, name: str, folder: Path) -> FamilyResult:
    usual = refused_by_config(model_type)
    try:
        write_tiny(model_type, folder)
    except Exception as error:  # transformers may raise anything for these sizes
        if usual is not None:
            return FamilyResult(model_type, name, "refused", "refused", usual)
        return FamilyResult(model_type, name, "untried", "untried", _short(error))
    try:
        model, drafts = try_drafts(model_type, folder)
    except ModelError as error:
        reason = _impersonal(str(error), model_type, folder)
        try:
            with mock.patch("space_model.loading.load.make_row_invariant"):  # a GPU's networks are not row-invariant
                model = load_model(folder, dtype="float32")
        except ModelError as second:
            reason = _impersonal(str(second), model_type, folder)
            return FamilyResult(model_type, name, "refused", "refused", reason)
        difference, _ = _compare(model, model_type, folder)
        return FamilyResult(model_type, name, "refused", "served", reason, difference)
    difference, exact = _compare(model, model_type, folder)
    return FamilyResult(model_type, name, "served", "served", usual or "", difference, exact, drafts)


def refused_by_config(model_type: str) -> str | None:
    """Return why the family's default config is refused before loading; None if it is not."""
    try:
        said = CONFIG_MAPPING[model_type]().to_dict() | {"model_type": model_type}
        read_config(Checkpoint(model_type, Path(), said, (), Path()))
    except ModelError as error:
        reason = _impersonal(str(error), model_type, None)
        return None if "cannot read the config" in reason else reason
    except Exception:  # some have no complete default config
        return None
    return None


@torch.inference_mode()
def _compare(model: SpaceModel, model_type: str, folder: Path) -> tuple[float, bool]:
    """Return the largest difference from transformers relative to its largest logit, and whether chunks give the same
    bits.
    """
    ids = [(7 * i + 3) % 100 + 16 for i in range(NUM_TOKENS)]
    whole = paged_logits(model, ids, (NUM_TOKENS,))
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "thinker_config", config)  # a model that also speaks writes with this part
    keywords = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    dense = _auto_class(model_type).from_pretrained(folder, **keywords).eval()
    wanted = dense(torch.tensor([ids]), use_cache=False).logits[0].float()[:, : whole.shape[1]]
    difference = float((whole - wanted).abs().max() / wanted.abs().max())
    return difference, torch.equal(paged_logits(model, ids, CHUNKS), whole)


@torch.inference_mode()
def paged_logits(
    model: SpaceModel, ids: list[int], chunks: tuple[int, ...], pages: Sequence[int] = (0, 1, 2)
) -> Tensor:
    """Return the logits [len(ids), vocabulary] of ids computed in chunks of these lengths, with keys in these pages."""
    kv, parts, start = model.allocate_kv(3, 16), [], 0
    for length in chunks:
        segment = Segment(ids[start : start + length], start, pages)
        batch = ForwardBatch.build([segment], block_size=16, mask_ids=())
        parts.append(model.logits(model.forward(batch, kv)[:length]))
        start += length
    return torch.cat(parts)


def _short(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if len(words) < 100 else words[:97] + "..."


def _impersonal(reason: str, model_type: str, folder: Path | None) -> str:
    """Return the reason for a refusal without the name of the particular model."""
    if folder is not None:
        reason = reason.replace(str(folder), "the checkpoint")
    reason = re.sub(r"^\w+(ForCausalLM|LMHeadModel|WithLMHead|Decoder|Model) ", "It ", reason)
    reason = re.sub(r"Models of type '[^']*'( as in (the checkpoint|\S+))?", "They", reason)
    reason = re.sub(r"^The attention of \w+", "Its attention", reason)
    reason = re.sub(r"^\w+(Attention) ", "Its attention ", reason)
    reason = re.sub(r"^\w+Experts is no", "It has no", reason)
    reason = re.sub(r" \([a-z_.]+\.[a-zA-Z_.]+\)", "", reason)
    reason = re.sub(r"Layer 0 of \w+", "Its layer 0", reason)
    reason = re.sub(r" It is off by .* parts differ\)\.", "", reason).replace("the checkpoint would", "It would")
    return reason.replace(f"{model_type} attends", "It attends")


@contextmanager
def _quiet() -> Iterator[None]:
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _without_eyes() -> Iterator[None]:
    """In the block, towers that timm computes have no weights: text passes them by, and timm need not be installed."""
    module = "transformers.models.timm_wrapper.modeling_timm_wrapper"
    with (
        mock.patch(f"{module}.requires_backends"),
        mock.patch(f"{module}._create_timm_model_with_error_handling", return_value=torch.nn.Identity()),
    ):
        yield


def sweep_all() -> list[FamilyResult]:
    """Return the results of all families."""
    results = []
    for model_type in families():
        with tempfile.TemporaryDirectory() as folder:
            results.append(sweep(model_type, Path(folder)))
    return results


# ------------------------------------------------------------------------------------------------------- the page

EQUAL = 1e-5
"""Relative to the largest logit, in float32: rounding over all layers, and two orders of magnitude below a real fault.
"""

AS_TRAINED = 1e-4
"""Relative to the largest number of a mask row; scaled residuals and experts round more than logits do."""

ONLY_WITH = dict.fromkeys((*_LATENT, "kimi_k25", "mistral4"), "latent attention (MLA); GPU: by torch's attention") | {
    "mimo_v2_flash": "values of another size than keys; GPU: by torch's attention",
    **dict.fromkeys(("bloom", "mpt"), "GPU: with `--attention torch`"),
    "falcon": "GPU: with linear biases (`alibi`, as in falcon-rw) with `--attention torch`",
    **dict.fromkeys(("llama4", "llama4_text"), "GPU: with `--attention torch`"),
    **dict.fromkeys(
        (*HYBRIDS, "lfm2_vl", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe"),
        "recurrent layers; GPU: by torch, in host steps",
    ),
    **dict.fromkeys(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        "GPU: with heads of size 512 (`global_head_dim`) with `--attention torch`",
    ),
}
"""What a family needs on a GPU."""

TRIED_ON_GPU = frozenset({"llama", "qwen3", "gemma2", "gemma3_text"})
"""Families that `make gpu-check` compares with transformers on a GPU."""


def to_page(results: Sequence[FamilyResult]) -> str:
    """Return the text of server/MODELS.md."""
    served = [one for one in results if "served" in (one.cpu, one.gpu)]
    on_cpu = sum(one.cpu == "served" for one in served)
    refused: dict[str, list[str]] = {}
    for one in results:
        if one.gpu == "refused":
            refused.setdefault(one.reason, []).append(one.model_type)
    untried = [one for one in results if one.gpu == "untried"]
    lines = [
        "# Models that are served",
        "",
        "This page is made by `tests/support/family_sweep.py`, and a test makes it again. It goes through all "
        f"{len(results)} causal language models of transformers {transformers.__version__}, and models that also see "
        "or hear: for each, a tiny random checkpoint is written, loaded as a server loads it, and its logits are held "
        "against transformers' own. "
        f"{on_cpu} are served on a CPU and a GPU, {len(served) - on_cpu} on a GPU alone. What is not served is refused "
        "at the start, with the reason.",
        "",
        "[Families](#families) · [Formats](#formats) · [Refused](#refused) · [Not tried](#not-tried) · "
        "[Left out](#left-out)",
        "",
        "## Families",
        "",
        "`model_type` is what `config.json` says. *Equal*: the logits of a prompt of 40 tokens are those of "
        "transformers in float32, but for rounding; in chunks they have the same bits. *Computed*: equal with the "
        "networks that a GPU runs, on a CPU; no GPU has tried this family. *Tried*: on a GPU, too. Of a model that "
        "also sees or hears, the text part is served, as the whole model computes text alone; images, audio and video "
        "in a request are refused with status 400. `spaceserve train` trains and writes the text part alone, and "
        "`spaceserve convert` refuses such checkpoints.",
        "",
        "Every family drafts by lookup in its text, by `prediction` and, on a CPU, by a smaller model "
        "(`--draft-model`). *Drafts* says what else it has: *masks*, with ids of their own or in gated adapters, and "
        "the draft heads that correct them; on a CPU also a head of `--draft-head` (*EAGLE-3*), which reads the inputs "
        "of its layers, and the checkpoint's own layer for multi-token prediction (*MTP*, `--draft-model mtp`). "
        "*Training* says what `spaceserve train` was seen to learn there with a frozen base: an update gives each of "
        "these weights a gradient, and the server computes from them the mask rows that training does. What is not "
        "trained is refused before anything is written, [with the reason](#not-trained).",
        "",
        "| `model_type` | in transformers | CPU | GPU | drafts | training | remark |",
        "|---|---|---|---|---|---|---|",
    ]
    untrained: dict[str, list[str]] = {}
    for one in served:
        gpu = "tried" if one.model_type in TRIED_ON_GPU else "computed"
        cpu = ("equal" if one.difference < EQUAL else "differs") if one.cpu == "served" else "refused"
        reason = f"{'CPU' if one.cpu == 'refused' else 'usual checkpoints'}: {one.reason}" if one.reason else ""
        remark = " ".join(part for part in (reason, ONLY_WITH.get(one.model_type)) if part)
        if one.drafts.reason:
            untrained.setdefault(_impersonal(one.drafts.reason, one.model_type, None), []).append(one.model_type)
        found = f"{', '.join(one.drafts.sources)} | {', '.join(one.drafts.trained) or 'no'}"
        lines.append(f"| `{one.model_type}` | {one.model_class} | {cpu} | {gpu} | {found} | {remark} |")
    shared = ", ".join(f"`{name}`" for name in sorted(SHARED_AMONG_RANKS))
    architectures = ", ".join(f"`{name}`" for name in GGUF_FAMILIES)
    lines += [
        "",
        f"`--tensor-parallel` shares {shared} among processes. Rotary scaling is served as "
        f"{', '.join(f'`{kind}`' for kind in SERVED_ROPE)}; `dynamic` with one base, of the served window, "
        "and `longrope` with the short factors up to the original length, and with `--max-model-len` beyond it with "
        "the long ones in longer sequences (`su` is its old name); `ntk` is refused, for its angles depend on the "
        "longest sequence of a batch. `auto_map` is passed over where transformers has the model; "
        "code of a checkpoint is never run.",
        "",
        "### Served as another family",
        "",
        "transformers has no models of these types, and the code that they came with is never run: their config.json "
        "and tensors are translated. They are held against dense models that were written from what was published of "
        "each, in `tests/support/published_models.py`. `alibi_llama` is Llama with linear biases instead of rotary "
        "positions, which is this server's own (GPU: with `--attention torch`; not trained). Kimi-K2 (`kimi_k2`) names "
        "DeepSeek-V3's class in its config.json, and is served as `deepseek_v3`.",
        "",
        "| `model_type` | as in | served as | CPU |",
        "|---|---|---|---|",
        *_published(),
        "",
        "### Not trained",
        "",
        "| reason | `model_type` |",
        "|---|---|",
        *(f"| {reason} | {', '.join(f'`{kind}`' for kind in kinds)} |" for reason, kinds in sorted(untrained.items())),
        "",
        "## Formats",
        "",
        "A family that is served can come in each of these. The kinds in brackets are tried against the same numbers "
        "as plain floats, in the tests, on a CPU.",
        "",
        "| format | CPU | GPU |",
        "|---|---|---|",
        "| safetensors, float32, bfloat16 or float16, in one file or several | served | served |",
        f"| GGUF of {architectures} ({', '.join(sorted(SERVED_KINDS))}) | as plain numbers; linears and experts in "
        "their own blocks with `--weights gguf`, but of Q5_1 | as plain numbers |",
    ]
    for name, (library, kinds) in _formats().items():
        packed = f"packed, where `{library}` is installed; else as plain numbers" if library else "as plain numbers"
        bits = "four bits" if name == "AWQ" else "four bits and, without zero points, of eight"
        which = "experts" if name == "MXFP4" else f"linears and experts of {bits}"
        as_they_are = f"; {which} as they are with `--weights packed`" * (name in PACKED_FORMATS or name == "MXFP4")
        lines.append(f"| {name} ({', '.join(kinds)}) | as plain numbers{as_they_are} | {packed} |")
    lines += [
        "| `pytorch_model.bin` | refused: it can run code; `spaceserve convert` first | refused |",
        "| an adapter as `peft` writes it | refused, with how to merge it; gated ones draft (`--adapter`), and those "
        "of [Uno and I-DLM](../router/guides/serve.md#released-adapters) | as on a CPU, not tried |",
        "",
        "## Refused",
        "",
        "| reason | `model_type` |",
        "|---|---|",
        *(f"| {reason} | {', '.join(f'`{kind}`' for kind in kinds)} |" for reason, kinds in sorted(refused.items())),
        "",
        "## Not tried",
        "",
        "No tiny model of these could be made here. The checks of every start decide: logits that are not those of "
        "transformers are refused.",
        "",
        "| `model_type` | what transformers says to the tiny sizes |",
        "|---|---|",
        *(f"| `{one.model_type}` | {one.reason} |" for one in untried),
        "",
        "## Left out",
        "",
        "Every tensor of a checkpoint is used, or is one of these, or the checkpoint is refused by the tensor's name.",
        "",
        "| pattern of the name | why the text is the same without |",
        "|---|---|",
        *(f"| `{_in_cell(pattern)}` | {reason} |" for pattern, reason in MAY_BE_LEFT_OUT),
        f"| layers from `num_hidden_layers` on, as many as `num_nextn_predict_layers` | {MTP_LAYERS} |",
        f"| beside the text part of a model that also sees or hears: anything outside its modules | {OTHER_PARTS} |",
        "| what transformers' class leaves out itself | as transformers does |",
    ]
    return "\n".join(lines) + "\n"


def _published() -> Iterator[str]:
    """Yield a row for each kind of checkpoint that is served as another family."""
    for name, config in PUBLISHED.items():
        kind = config["model_type"]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _quiet(), torch.inference_mode():
            warnings.simplefilter("ignore")
            tensors = write_published(Path(folder), config)
            model = load_model(folder, dtype="float32")
            ids = [(7 * i + 3) % 100 + 16 for i in range(NUM_TOKENS)]
            whole, wanted = paged_logits(model, ids, (NUM_TOKENS,)), DENSE[kind](config, tensors, torch.tensor(ids))
            difference = float((whole - wanted).abs().max() / wanted.abs().max())
            is_equal = difference < EQUAL and torch.equal(paged_logits(model, ids, CHUNKS), whole)
            served_as = Checkpoint.open(Path(folder)).config["model_type"]
        yield f"| `{kind}` | {name} | `{served_as}` | {'equal' if is_equal else 'differs'} |"


def _formats() -> dict[str, tuple[str, list[str]]]:
    """Return each quantised format's kernel library, and the variants that are tested."""
    found: dict[str, tuple[str, list[str]]] = {}
    sections = {kind: section for kind, (_, section) in KINDS.items()} | {"experts of gpt-oss": MXFP4_EXPERTS}
    for kind, section in sections.items():
        form = read_format({"quantization_config": section}, kind)
        if form is not None:
            found.setdefault(form.name, (form.library, []))[1].append(kind)
    return found


def _in_cell(pattern: str) -> str:
    return pattern.replace("|", "\\|")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(to_page(sweep_all()))
