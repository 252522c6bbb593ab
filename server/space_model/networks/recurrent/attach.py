"""Which modules are recurrent, and how they come to keep their states between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from space_kernels.recurrence.states import LayerMemory, StateStep
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.checkpoint.recurrent_layers import HYBRIDS, layer_states
from space_model.model_error import UnsupportedModel
from space_model.networks.recurrent.mixers import decay_rates, gated_delta_net, mamba, mamba2, short_convolution
from space_model.networks.transformers_network import CurrentStep, layers_return_tuples

Mixer = Callable[[Any, Tensor, LayerMemory, StateStep], Tensor]
"""Module, rows [1, R, hidden], the layer's memory, the step -> [1, R, hidden]"""

MIXERS: Mapping[str, Mixer] = {
    "BambaMixer": mamba2,
    "FalconH1Mixer": mamba2,
    "FalconMambaMixer": mamba,
    "GraniteMoeHybridMambaLayer": mamba2,
    "JambaMambaMixer": mamba,
    "Lfm2MoeShortConv": short_convolution,
    "Lfm2ShortConv": short_convolution,
    "Lfm3ShortConv": short_convolution,
    "Mamba2Mixer": mamba2,
    "MambaMixer": mamba,
    "NemotronHMamba2Mixer": mamba2,
    "OlmoHybridGatedDeltaNet": gated_delta_net,
    "Qwen3NextGatedDeltaNet": gated_delta_net,
    "Qwen3_5GatedDeltaNet": gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": gated_delta_net,
}
"""By class."""

_TUPLES: Mapping[str, int] = {"bamba": 2, "falcon_h1": 1}
"""Families whose layers return tuples, and of how many."""


def attach(model: PreTrainedModel) -> None:
    """Let the model's recurrent modules keep states while a step runs; other families are left alone. Raises
    UnsupportedModel where config.json and the modules disagree."""
    if model.config.model_type not in HYBRIDS:
        return
    type(model)._can_set_attn_implementation_cached_value = True  # so that no masks are built while a step runs
    if model.config.model_type in _TUPLES:
        layers_return_tuples(model.base_model, _TUPLES[model.config.model_type])
    current, found = CurrentStep.of(model.base_model), []
    for module in model.base_model.modules():
        if (mixer := MIXERS.get(type(module).__name__)) is not None:
            found.append(int(module.layer_idx))
            current.share_with(module)
            if mixer is mamba:
                module.register_buffer("rates", decay_rates(module), persistent=False)
            module.forward = MethodType(_stand_in(mixer), module)
    wanted = [number for number, state in enumerate(layer_states(model.config)) if state is not None]
    if sorted(found) != wanted:
        raise UnsupportedModel(
            f"{type(model).__name__} has recurrent layers {sorted(found)}, where config.json says {wanted}."
        )


def _stand_in(mixer: Mixer) -> Callable[..., Any]:
    def forward(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        step = CurrentStep.of(module).step
        if step is None:
            return type(module).forward(module, *inputs, **keywords)
        hidden: Tensor = inputs[0] if inputs else keywords["hidden_states"]
        number = int(module.layer_idx)  # type: ignore[arg-type]
        return mixer(module, hidden, *step.states_of(number))

    return forward
