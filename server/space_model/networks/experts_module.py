"""A mixture of experts of transformers, identified by its weights' shapes and by what its gate computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from space_kernels.build.cpu_library import cpu_library
from space_kernels.layers.layers import same_function, silu
from space_kernels.layers.row_invariant_calls import sigmoid
from space_kernels.linear.compiled_experts import CompiledExperts
from space_kernels.linear.experts import RowInvariantExperts
from space_kernels.linear.group_weights import Parts
from torch import Tensor, nn

from space_model.checkpoint.stored_weight import StoredExperts, StoredWeight
from space_model.checkpoint.weight_files import let_go
from space_model.model_error import UnsupportedModel
from space_model.stored_weights import alternate, below, stored_experts_of

Activation = Callable[[Tensor], Tensor]

Gate = Callable[[Tensor], Tensor]
"""[R, 2·width], the gate's half first -> [R, width]"""


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds the weights of all experts, stacked."""
    found = module._parameters.get("gate_up_proj")
    return found is not None and found.dim() == 3


def is_transposed(module: nn.Module) -> bool:
    """Whether experts have their inputs in the second dimension: gate_up_proj [E, hidden, 2·width]."""
    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    return gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of all experts, as linears have them: outputs, then inputs; gate's outputs first, then up's."""

    gate_up: Tensor  # [E, 2·width, hidden]
    down: Tensor  # [E, hidden, width]; these two of experts that stay as their file has them are placeholders
    gate_up_bias: Tensor | None  # [E, 2·width]
    down_bias: Tensor | None  # [E, hidden]

    @classmethod
    def of(cls, module: nn.Module) -> ExpertWeights:
        """Read the weights of an experts module; views where their layout allows. Raises UnsupportedModel."""
        name = type(module).__name__
        gate_up, down = module.get_parameter("gate_up_proj").detach(), module.get_parameter("down_proj").detach()
        if is_transposed(module):
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        if gate_up.shape[1] != 2 * down.shape[2] or gate_up.shape[2] != down.shape[1]:
            raise UnsupportedModel(
                f"{name} has gate_up_proj {tuple(gate_up.shape)} and down_proj {tuple(down.shape)}, which are no "
                "experts of a gate, an up and a down projection. Serve the model on a GPU."
            )
        biases = [module._parameters.get(f"{linear}_bias") for linear in ("gate_up_proj", "down_proj")]
        gate_up_bias, down_bias = (None if bias is None else bias.detach() for bias in biases)
        if not getattr(module, "is_concatenated", True):
            gate_up = gate_up if stored_experts_of(module) is not None else _halves(gate_up)
            gate_up_bias = None if gate_up_bias is None else _halves(gate_up_bias)
        rest = sorted({path for path, _ in module.named_parameters()} - _READ)
        if rest or getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModel(
                f"{name} computes more than a gate, an up and a down projection"
                f"{f' ({rest[0]})' if rest else ''}, which this server does not on a CPU. Serve the model on a GPU."
            )
        return cls(gate_up, down, gate_up_bias, down_bias)


_READ = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}


def _halves(in_turn: Tensor) -> Tensor:
    """[E, 2·width, …] with gate and up alternating -> gate first, then up."""
    return torch.cat([in_turn[:, 0::2], in_turn[:, 1::2]], dim=1)


def gate_of(module: nn.Module, invariant: Callable[[Activation], Activation]) -> Gate:
    """Return what an experts module computes from its gate and up projections, in a row-invariant form; `invariant`
    makes one of its activation. Tried on numbers against the module's own. Raises UnsupportedModel for another."""
    activation = getattr(module, "act_fn", None)
    act = invariant(activation) if callable(activation) else None
    limit = _number(module, "limit", "swiglu_limit")
    alpha = _number(module, "alpha", "swiglu_alpha")
    forms: list[Gate] = []
    if act is not None:
        forms.append(partial(gated, act=act))
        if limit is not None:
            forms += [partial(clamped, act=act, limit=limit), partial(clamped_behind, act=act, limit=limit)]
    if limit is not None and alpha is not None:
        forms.append(partial(clamped_swiglu, alpha=alpha, limit=limit))
    apply: Gate | None = getattr(module, "_apply_gate", None)
    if apply is None:
        if act is not None:
            return forms[0]
    else:
        span = 12.0 if limit is None or math.isinf(limit) else max(12.0, 4.0 * limit)  # so that a limit shows
        given = torch.linspace(-span, span, 64 * 64).view(64, 64).roll(7, dims=1)
        theirs = given if getattr(module, "is_concatenated", True) else given.view(64, 2, 32).mT.reshape(64, 64)
        with torch.no_grad():
            wanted = apply(theirs)
            for form in forms:
                if torch.allclose(form(given), wanted, rtol=1e-5, atol=1e-5):
                    return form
    raise UnsupportedModel(
        f"{type(module).__name__} computes its experts' outputs from gate and up projections in a way that this server "
        "does not have row by row on a CPU. Serve the model on a GPU."
    )


def experts_for(module: nn.Module, invariant: Callable[[Activation], Activation], weights: str) -> nn.Module:
    """Return a row-invariant replacement, compiled where it can be; `invariant`: as of gate_of. `weights`: int8 or
    int4: quantised. Raises UnsupportedModel."""
    found, gate = ExpertWeights.of(module), gate_of(module, invariant)
    if (stored := stored_experts_of(module)) is not None:
        return _stored_experts(found, stored, gate)
    library = cpu_library()
    is_swiglu = _is_swiglu(gate)
    plain = found.gate_up_bias is None and found.down_bias is None and CompiledExperts.takes(found.gate_up, found.down)
    if library is not None and is_swiglu and plain:
        return CompiledExperts(library, found.gate_up, found.down, weights=weights)
    biases = {"gate_up_bias": found.gate_up_bias, "down_bias": found.down_bias}
    return RowInvariantExperts(found.gate_up, found.down, gate, **biases, weights=weights)


def _is_swiglu(gate: Gate) -> bool:
    return isinstance(gate, partial) and gate.func is gated and same_function(gate.keywords["act"], silu)


def _stored_experts(found: ExpertWeights, stored: StoredExperts, gate: Gate) -> nn.Module:
    """Return experts whose weights stay as the file has them, and release the pages of the file. Raises
    UnsupportedModel."""
    library, has_biases = cpu_library(), found.gate_up_bias is not None or found.down_bias is not None
    pairs, down = [*zip(stored.gate, stored.up, strict=True)], [(each,) for each in stored.down]
    if library is not None and _is_swiglu(gate) and not has_biases:
        return CompiledExperts(library, _read_once(pairs, alternate), _read_once(down, below))
    gate_up, downs = _read_once(pairs, below), _read_once(down, below)
    return RowInvariantExperts(gate_up, downs, gate, gate_up_bias=found.gate_up_bias, down_bias=found.down_bias)


def _read_once(
    experts: Sequence[Sequence[StoredWeight]], join: Callable[[Sequence[StoredWeight]], Parts]
) -> Iterator[Parts]:
    """Yield each expert's weights, joined, and release their pages of the file when the next ones are asked for."""
    for weights in experts:
        yield join(weights)
        let_go(*(each for weight in weights for part in weight for each in part.tensors))


def _number(module: nn.Module, *names: str) -> float | None:
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, int | float):
            return float(found)
    return None


def gated(gate_up: Tensor, act: Activation) -> Tensor:
    """Return act(gate)·up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate.contiguous()) * up


def clamped(gate_up: Tensor, act: Activation, limit: float) -> Tensor:
    """Return act(gate)·up with the gate at most `limit`, and up within ±limit (DeepSeek-V4)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamped_behind(gate_up: Tensor, act: Activation, limit: float) -> Tensor:
    """Return act(gate)·up with act(gate) at most `limit`, and up within ±limit (Step-3)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate.contiguous()).clamp(max=limit) * up.clamp(-limit, limit)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1)·gate·sigmoid(α·gate) with the gate at most `limit`, and up within ±limit (gpt-oss)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1.0) * (gate * sigmoid(gate * alpha))


def router_linears(base: nn.Module) -> Iterator[nn.Module]:
    """Yield the linears that choose among experts: those beside experts with an output for each. They stay plain
    numbers, because a rounded score chooses another expert."""
    for block in base.modules():
        for name, experts in block.named_children():
            if not is_experts(experts):
                continue
            count = len(experts.get_parameter("gate_up_proj"))
            for path, module in block.named_modules():
                if type(module) is nn.Linear and path.split(".")[0] != name and module.out_features == count:
                    yield module
