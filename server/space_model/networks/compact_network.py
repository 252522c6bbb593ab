"""Selects the compact network for a model and a device, if there is one."""

from __future__ import annotations

from collections.abc import Sequence

from space_kernels.build.cpu_library import cpu_library
from space_kernels.dispatch import Ops
from transformers import PreTrainedModel

from space_model.adapters.gated_lora import GatedLora
from space_model.model_facts import ModelFacts
from space_model.networks.llama_compiled_network import CompiledLlama
from space_model.networks.llama_cuda_network import LlamaCudaNetwork
from space_model.networks.llama_network import LlamaNetwork
from space_model.networks.llama_parts import LlamaSource
from space_model.networks.network import Network
from space_model.networks.tensor_parallel import Ranks


def compact_network(
    base: PreTrainedModel,
    facts: ModelFacts,
    ops: Ops,
    adapters: Sequence[GatedLora],
    prefix: str,
    ranks: Ranks | None = None,
) -> Network | None:
    """Take `base` apart and return its compact network; None, with `base` unchanged, if there is none."""
    sizes = facts.num_heads, facts.kv_heads, facts.head_dim
    source = LlamaSource(base, *sizes, adapters, prefix, ranks, facts.int8)
    if facts.device.type == "cpu":
        library = cpu_library() if ops.attention == "compiled" else None
        if library is not None and CompiledLlama.fits(base, facts.dtype, facts.head_dim):
            return CompiledLlama(source, library)
        if not LlamaNetwork.fits(base.config, facts.dtype):
            return None
        return LlamaNetwork(source)
    if not LlamaCudaNetwork.fits(base):
        return None
    return LlamaCudaNetwork(source, ops)
