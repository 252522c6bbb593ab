"""Which families compute their attention themselves, or compress keys, and what each needs to attend over pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.checkpoint import family
from space_model.model_error import UnsupportedModel
from space_model.networks.latent_heads import EXPANSION, LatentHeads
from space_model.networks.own_attention import bloom, falcon, llama4, mpt, scores, xglm
from space_model.networks.transformers_network import CurrentStep, layers_return_tuples

Forward = Callable[..., Any]
"""Called with the module and what the module's own method is called with."""


@dataclass(frozen=True)
class OwnAttention:
    """How a family's attention modules come to attend over pages."""

    module: str  # class of its attention modules
    method: str | None = None  # the one that is replaced; None: it attends through the interface, and misses the step
    forward: Forward | None = None
    prepare: Callable[[Any], None] | None = None  # applied to each attention module first
    replace: Callable[[PreTrainedModel], None] | None = None  # applied to the model first
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of every call of the base model
    outside: Forward | None = None  # what runs outside a step; None: the class's own method
    layers_return_tuples: bool = True  # where a method is replaced
    usual: str = "eager"  # transformers' implementation that computes what the family was trained with


FAMILIES: Mapping[str, OwnAttention] = {
    "biogpt": OwnAttention("BioGptAttention"),
    "bloom": OwnAttention("BloomAttention", "forward", bloom.forward, bloom.prepare),
    "codegen": OwnAttention("CodeGenAttention", "_attn", scores.attend),
    "falcon": OwnAttention(
        "FalconAttention",
        "forward",
        falcon.forward,
        falcon.prepare,
        falcon.use_plain_linears,
        usual="sdpa",  # eager adds linear biases twice
    ),
    "gpt_neo": OwnAttention("GPTNeoSelfAttention", "_attn", scores.attend, scores.prepare_gpt_neo),
    "gpt_neox_japanese": OwnAttention("GPTNeoXJapaneseAttention", "_attn", scores.attend),
    "gptj": OwnAttention("GPTJAttention", "_attn", scores.attend),
    "llama4_text": OwnAttention(
        "Llama4TextAttention", "forward", llama4.forward, llama4.prepare, layers_return_tuples=False
    ),
    "mpt": OwnAttention(
        "MptAttention",
        "forward",
        mpt.forward,
        mpt.prepare,
        keywords={"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)},  # its forward converts a mask
    ),
    "nemotron": OwnAttention("NemotronAttention"),
    "stablelm": OwnAttention("StableLmAttention"),
    "xglm": OwnAttention("XGLMAttention", "forward", xglm.forward, outside=xglm.outside, layers_return_tuples=False),
}
"""By model_type."""


def usual_attention(model: PreTrainedModel) -> str:
    """Return transformers' attention implementation that is right for the model, and takes any dtype."""
    own = FAMILIES.get(model.config.model_type)
    return "eager" if own is None else own.usual


def attach(model: PreTrainedModel) -> None:
    """Let the model's attention modules use our paged attention while a step runs; other families are left alone."""
    if family.latent_dim(model.config) is not None:
        _attach_latent(model)
    own = FAMILIES.get(model.config.model_type)
    if own is None:
        return
    type(model)._can_set_attn_implementation_cached_value = True  # so that no masks are built while a step runs
    if own.replace is not None:
        own.replace(model)
    if own.method is not None and own.layers_return_tuples:
        layers_return_tuples(model.base_model)
    current = CurrentStep.of(model.base_model)
    current.keywords = own.keywords
    for module in model.modules():
        if type(module).__name__ == own.module:
            current.share_with(module)
            if own.prepare is not None:
                own.prepare(module)
            if own.method is not None and own.forward is not None:
                setattr(module, own.method, MethodType(_stand_in(own.method, own.forward, own.outside), module))


def _attach_latent(model: PreTrainedModel) -> None:
    """Let the model's latent attention (MLA) hand over compressed keys while a step runs."""
    current = CurrentStep.of(model.base_model)
    found = [module for module in model.modules() if hasattr(module, EXPANSION) and hasattr(module, "expand_kv")]
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__} has multi-head latent attention (MLA, kv_lora_rank in config.json), and no module "
            f"of it expands compressed keys (expand_kv) by a {EXPANSION}, so they cannot be paged."
        )
    for module in found:
        current.share_with(module)
        module.__dict__["latent_heads"] = LatentHeads(module)
        module.__dict__["expand_kv"] = MethodType(_stand_in("expand_kv", _compressed), module)


def _compressed(module: nn.Module, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for `expand_kv`: latent [1, 1, R, L], turned [1, 1, R, rope] -> key [1, 1, R, L + rope], value."""
    return torch.cat([latent, turned], dim=-1), latent


def _stand_in(name: str, ours: Forward, outside: Forward | None = None) -> Forward:
    """Return the method `name`: our forward while a step runs, else `outside`, or the class's own."""

    def method(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        running = CurrentStep.of(module).step is not None
        return (ours if running else outside or getattr(type(module), name))(module, *inputs, **keywords)

    return method
