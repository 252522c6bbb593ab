"""Turns an out-of-memory error into an error with flags that make the run fit."""

from __future__ import annotations

from dataclasses import replace

import torch
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint

from space_train.costs.model_shape import ModelShape, UnknownShape
from space_train.costs.training_cost import fitted
from space_train.train_plan import InvalidPlan, TrainPlan


class DoesNotFit(InvalidPlan):
    """The run needs more memory than the machine has."""


def does_not_fit(
    checkpoint: Checkpoint, plan: TrainPlan, num_processes: int, memory: int | None, said: Exception
) -> DoesNotFit:
    """Return the error, with flags that fit. `memory`: bytes of each GPU; None if unknown."""
    try:
        shape = ModelShape.from_config(checkpoint.name, family.read_config(checkpoint))
    except UnknownShape:
        shape = None
    cure = cure_of(plan, num_processes, shape, memory)
    reason = str(said).partition(". ")[0]
    return DoesNotFit(f"An update in {plan.accumulate} parts does not fit ({reason}). {cure}")


def cure_of(plan: TrainPlan, num_processes: int, shape: ModelShape | None, memory: int | None) -> str:
    """Suggest more accumulation parts: the fewest that fit by the estimate, else the most possible."""
    rows = plan.rows_per_step // num_processes
    more = [parts for parts in range(plan.accumulate + 1, rows + 1) if rows % parts == 0]
    smaller = (
        "a shorter --length"
        if plan.activation_checkpointing or not plan.trains_base
        else ("--activation-checkpointing, a shorter --length")
    )
    if not more:
        return f"It has one row at a time already: give {smaller} or a smaller model, and --restart."
    least = replace(plan, rows_per_step=rows, accumulate=more[0])
    fit = fitted(shape, least, memory) if shape is not None and memory is not None else None
    if fit is None or fit.activation_checkpointing != plan.activation_checkpointing:
        return f"Give --accumulate {more[-1]}, with which the run goes on; or {smaller}, and --restart."
    return f"Give --accumulate {fit.accumulate}, the smallest that fits by our estimate: the run goes on with it."


def gpu_memory() -> int | None:
    """Return the memory of the current GPU in bytes, or None without one."""
    return torch.cuda.get_device_properties("cuda").total_memory if torch.cuda.is_available() else None
