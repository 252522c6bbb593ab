"""Which families have recurrent layers beside attention, and what those layers remember, as their config says."""

from __future__ import annotations

import math
from collections.abc import Mapping

from space_kernels.recurrence.states import LayerState
from transformers import PreTrainedConfig

from space_model.model_error import UnsupportedModel

_DELTA = frozenset({"linear_attention"})
HYBRIDS: Mapping[str, frozenset[str]] = {
    "bamba": _DELTA,
    "falcon_h1": frozenset({"hybrid"}),
    "falcon_mamba": _DELTA,
    "granitemoehybrid": _DELTA,
    "jamba": _DELTA,
    "lfm2": frozenset({"conv"}),
    "lfm2_moe": frozenset({"conv"}),
    "lfm3": frozenset({"conv"}),
    "mamba": _DELTA,
    "mamba2": _DELTA,
    "nemotron_h": frozenset({"linear_attention", "mlp", "moe"}),
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
}
"""model_type -> the kinds of layers that it has beside full and sliding attention."""

WITHOUT_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2"})
"""Types whose layers are all recurrent: their pages hold no keys and values, and only count tokens."""

_OF_ITS_OWN = "have linear_attention layers of their own kind"
UNSERVED_LAYERS: Mapping[str, str] = {
    "kimi_linear": f"{_OF_ITS_OWN} (Kimi delta attention), which decay each channel of a key on its own",
    "minimax": f"{_OF_ITS_OWN} (lightning attention)",
    "recurrent_gemma": f"{_OF_ITS_OWN} (RG-LRU)",
    "zamba": "attend by one block that several layers share, which reads the embedding as well",
    "zamba2": "attend by blocks that several layers share, each with another adapter",
}
"""model_type -> why its recurrent layers, or the attention beside them, are not served."""

_ATTENDS = frozenset({"full_attention", "sliding_attention", "hybrid"})
_RECURS = frozenset({"linear_attention", "conv", "hybrid"})


def layer_states(config: PreTrainedConfig) -> tuple[LayerState | None, ...]:
    """Return what each layer remembers between steps; None: nothing; empty: no layer does."""
    kinds = _kinds(config)
    if not _RECURS.intersection(kinds):
        return ()
    state = _state(config)
    return tuple(state if kind in _RECURS else None for kind in kinds)


def attending_layers(config: PreTrainedConfig) -> tuple[bool, ...]:
    """Return whether each layer has keys and values; empty: all have."""
    kinds = _kinds(config)
    return tuple(kind in _ATTENDS for kind in kinds) if _RECURS.intersection(kinds) else ()


def _kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    if config.model_type not in HYBRIDS:
        return ()
    found = getattr(config, "layer_types", None)
    return tuple(found or ())


def _state(config: PreTrainedConfig) -> LayerState:
    if config.model_type.startswith(("lfm2", "lfm3")):
        return LayerState(int(config.hidden_size), int(config.conv_L_cache))
    if hasattr(config, "linear_num_value_heads"):
        heads, width = int(config.linear_num_value_heads), int(config.linear_value_head_dim)
        key_heads, key_dim = int(config.linear_num_key_heads), int(config.linear_key_head_dim)
        return LayerState(
            2 * key_heads * key_dim + heads * width, int(config.linear_conv_kernel_dim), (heads, key_dim, width)
        )
    if config.model_type == "jamba":
        sizes = int(config.mamba_d_state), int(config.mamba_d_conv)
        return _of_channels(int(config.mamba_expand * config.hidden_size), *sizes)
    if config.model_type in ("falcon_mamba", "mamba"):
        return _of_channels(int(config.intermediate_size), int(config.state_size), int(config.conv_kernel))
    if config.model_type == "mamba2":
        heads, width, size = int(config.num_heads), int(config.head_dim), int(config.state_size)
        groups, taps, inner = int(config.n_groups), int(config.conv_kernel), int(config.expand * config.hidden_size)
    elif config.model_type == "nemotron_h":
        heads, width, size = int(config.mamba_num_heads), int(config.mamba_head_dim), int(config.ssm_state_size)
        groups, taps, inner = int(config.n_groups), int(config.conv_kernel), heads * width
    else:
        heads, width, size = int(config.mamba_n_heads), int(config.mamba_d_head), int(config.mamba_d_state)
        groups, taps = int(config.mamba_n_groups), int(config.mamba_d_conv)
        inner = int(getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size)
    if inner != heads * width:
        raise UnsupportedModel(
            f"config.json says that {heads} heads of size {width} of a recurrent layer make {inner} numbers. Fetch the "
            "config.json of the original checkpoint."
        )
    return LayerState(inner + 2 * groups * size, taps, (heads, width, size))


_CHANNELS = 64
"""Channels of Mamba's first version that are computed together."""


def _of_channels(inner: int, size: int, taps: int) -> LayerState:
    """Return the state of Mamba's first version, in which each channel decays on its own."""
    together = math.gcd(inner, _CHANNELS)
    return LayerState(inner, taps, (inner // together, together, size), inner + 2 * size, begins_anew=True)
