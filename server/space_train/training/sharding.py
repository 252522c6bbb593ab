"""Weights spread over processes (FSDP): each keeps a part of every weight, and a layer is whole only while it runs.

What is saved is whole, so that a run can go on with any number of processes, sharded or not.
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

SWITCH = "ACCELERATE_USE_FSDP"
"""What `accelerate launch --use_fsdp` sets."""


def take_request() -> bool:
    """Whether sharding is asked for; accelerate itself is not told, for we shard by layers and save by ourselves."""
    asked = bool(parse_flag_from_env(SWITCH))
    os.environ.pop(SWITCH, None)
    return asked


def check_can_shard(plan: TrainPlan) -> None:
    """Raises InvalidPlan for what needs whole weights."""
    if not plan.trains_base:
        raise InvalidPlan(f"Method {plan.method} shards nothing, its base is frozen: start it without FSDP.")
    if plan.optimiser == "muon":
        raise InvalidPlan("Muon needs whole matrices, which FSDP shards: use the optimiser adamw.")


def check_parts(parts: Sequence[TrainBatch]) -> None:
    """Processes gather weights together, so each must run as many passes as the others."""
    if len({(part.plain is None, part.masked is None) for part in parts}) > 1:
        raise InvalidPlan(
            "With FSDP every part of an update needs rows with and without masks: give more --rows-per-step, or "
            "--ar-share 0."
        )


def shard(trainee: Trainee, device: torch.device, num_processes: int) -> None:
    """Spread the weights over all processes, in place: a group for each layer, and one for the rest.

    Each group is moved to `device` by itself, where a part of it stays: the whole model may fit no single one.
    """
    mesh = init_device_mesh(device.type, (num_processes,))
    _, layers = decoder_layers(trainee.decoder.model.base_model)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainee, mesh=mesh)
    register_fsdp_forward_method(trainee, "reading")


def whole(tree: Any, *, keep: bool) -> Any:
    """The same dicts and lists with every shard put together, on the CPU. Every process must ask.

    Without `keep` None stands for what was put together: the memory of one process holds it, not that of each.
    """
    if isinstance(tree, DTensor):
        tensor = tree.full_tensor()
        return tensor.detach().cpu() if keep else None
    if isinstance(tree, Mapping):
        return {name: whole(value, keep=keep) for name, value in tree.items()}
    return [whole(value, keep=keep) for value in tree] if isinstance(tree, list) else tree


def shard_moments(state: dict[str, Any], optimiser: Optimiser) -> None:
    """Spread the whole `state` of an optimiser, in place, as its parameters are spread."""
    for name, part in optimiser.parts.items():
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        for number, moments in state[name]["state"].items():
            for key, tensor in moments.items():
                moments[key] = shard_like(tensor, parameters[number])


def shard_like(tensor: Tensor, parameter: nn.Parameter | Tensor) -> Tensor:
    """This process's part of a whole `tensor`, spread as `parameter` is; scalars stay whole."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
