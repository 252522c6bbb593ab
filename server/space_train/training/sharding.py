"""Shards weights over processes (FSDP): each keeps a part of every weight; a layer is gathered only while it runs.

Saved states are unsharded, so that a run can be resumed with any number of processes, sharded or not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from space_model.checkpoint.family import decoder_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from space_train.data.train_batch import TrainBatch
from space_train.networks.trainee import Trainee
from space_train.train_plan import InvalidPlan, TrainPlan
from space_train.training.optimiser import Optimiser

SWITCH = "ACCELERATE_USE_FSDP"  # environment variable that `accelerate launch --use_fsdp` sets


def take_request() -> bool:
    """Return whether FSDP is requested, and hide it from accelerate, because this module shards and saves itself."""
    asked = bool(parse_flag_from_env(SWITCH))
    os.environ.pop(SWITCH, None)
    return asked


def check_can_shard(plan: TrainPlan) -> None:
    """Raise InvalidPlan for options that need unsharded weights."""
    if not plan.trains_base:
        raise InvalidPlan(f"Method {plan.method} shards nothing, its base is frozen: start it without FSDP.")
    if plan.optimiser == "muon":
        raise InvalidPlan("Muon needs whole matrices, which FSDP shards: use the optimiser adamw.")


def check_parts(parts: Sequence[TrainBatch]) -> None:
    """Raise InvalidPlan unless all parts have the same passes: processes gather weights together in each pass."""
    if len({(part.plain is None, part.masked is None) for part in parts}) > 1:
        raise InvalidPlan(
            "With FSDP every part of an update needs rows with and without masks: give more --rows-per-step, or "
            "--ar-share 0."
        )


def shard(trainee: Trainee, device: torch.device, num_processes: int) -> None:
    """Shard the weights over all processes, in place: a group for each layer, and one for the rest. Groups are moved to
    `device` one at a time and only a part stays, because the whole model may not fit on a device."""
    mesh = init_device_mesh(device.type, (num_processes,))
    _, layers = decoder_layers(trainee.decoder.model.base_model)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainee, mesh=mesh)
    register_fsdp_forward_method(trainee, "reading")


def whole(tree: Any, *, keep: bool) -> Any:
    """Return the same dicts and lists with every tensor gathered to the CPU. All processes must call it. Without
    `keep`, gathered tensors are replaced by None, so that only one process holds them in memory."""
    if isinstance(tree, DTensor):
        tensor = tree.full_tensor()
        return tensor.detach().cpu() if keep else None
    if isinstance(tree, Mapping):
        return {name: whole(value, keep=keep) for name, value in tree.items()}
    return [whole(value, keep=keep) for value in tree] if isinstance(tree, list) else tree


def shard_moments(state: dict[str, Any], optimiser: Optimiser) -> None:
    """Shard an optimiser's gathered `state` in place, in the way its parameters are sharded."""
    for name, part in optimiser.parts.items():
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        for number, moments in state[name]["state"].items():
            for key, tensor in moments.items():
                moments[key] = shard_like(tensor, parameters[number])


def shard_like(tensor: Tensor, parameter: nn.Parameter | Tensor) -> Tensor:
    """Return this process's shard of `tensor`, sharded like `parameter`; scalars stay whole."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
