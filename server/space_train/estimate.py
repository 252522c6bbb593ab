"""`python -m space_train.estimate`: memory and time of a training run, computed before it begins; a run's counter.

python -m space_train.estimate --model 7b --method gated-lora --tokens 10M --gpu h100

Operations: a row times n weights has 2n forward, 2n for the row's gradient, 2n for the weights'. Time is operations
over the GPU's datasheet rate at a stated utilisation, including recomputation to save memory. Bytes are counted tensor
by tensor.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.recurrent_layers import layer_states
from space_model.free_memory import FreeMemory
from space_model.model_error import ModelError
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from space_train.data.train_batch import TrainBatch
from space_train.networks.losses import CHUNK, LOGITS_AT_ONCE
from space_train.networks.trainee import Trainee
from space_train.train_plan import Anchors, HeadForm, InvalidPlan, Method, TrainPlan


@dataclass(frozen=True)
class ModelCost:
    """Weights and sizes that determine the cost of a row."""

    body: int  # weights of the decoder layers' linears
    output: int  # vocabulary times hidden size
    adapters: int
    head: int  # weights of the draft head
    attention: int  # operations per row and visible key, over all layers, forward
    recurrent: int = 0  # weights of the recurrent head
    draft_output: int = 0  # its vocabulary times hidden size

    @classmethod
    def of(cls, trainee: Trainee) -> ModelCost:
        model = trainee.decoder.model
        config = model.config
        heads, _, key_dim = family.sizes(config)
        if family.latent_dim(config) is not None:
            key_dim = (int(config.qk_head_dim) + int(config.v_head_dim)) // 2  # expanded, while training
        adapted = 0 if trainee.adapters is None else sum(pair.numel() for pair in trainee.adapters.pairs)
        head = 0 if trainee.head is None else trainee.head.w1.numel() + trainee.head.w2.numel()
        body = sum(_active(module, config) for module in model.base_model.modules())
        attention = 4 * heads * key_dim * int(config.num_hidden_layers)
        output, recurrent, drafted = trainee.decoder.embedding.numel(), 0, 0
        if trainee.recurrent is not None:
            recurrent = trainee.recurrent.w1.numel() + trainee.recurrent.w2.numel()
            ids = trainee.recurrent.ids
            drafted = output if ids is None else len(ids) * trainee.decoder.hidden_size
        return cls(body, output, adapted, head, attention, recurrent, drafted)


def _active(module: nn.Module, config: PreTrainedConfig) -> int:
    """Return the number of weights that a row is multiplied with; of experts, only those it is routed to."""
    if isinstance(module, nn.Linear | Conv1D):
        return int(module.weight.numel())
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]  # [experts, out, in]
    chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
    return sum(weight.numel() // len(weight) * min(chosen, len(weight)) for weight in stacked)


def flops_of(trainee: Trainee, cost: ModelCost, batch: TrainBatch) -> float:
    """Return the operations of one batch, forward and backward."""
    plan, total = trainee.plan, 0.0
    if batch.plain is not None and plan.trains_base:
        keys = batch.plain.num_before.sum().item()
        total += 6 * cost.body * batch.plain.num_real + 3 * cost.attention * keys
        total += 6 * cost.output * int(batch.plain.is_ordinary_target.sum())
    if batch.masked is None:
        return total
    real, before = batch.masked.num_real, batch.masked.num_before
    real_keys = before.sum().item()
    # 1: forward alone; 2: also the rows' gradients; 3: also the weights'.
    moved = 3 if plan.trains_base else 1
    total += moved * (2 * cost.body * real + cost.attention * real_keys)
    if batch.recurrent is not None:
        total += 6 * cost.recurrent * batch.recurrent.depth.numel()
        total += 6 * cost.draft_output * batch.num_learning_recurrent
    if batch.anchors is None:
        return total
    masks = batch.anchors.depth.numel()
    mask_keys = (before.gather(1, batch.anchors.root) + batch.anchors.depth).sum().item()
    learning = batch.num_learning_masks
    if plan.trains_base:
        total += 6 * cost.output * int(batch.masked.is_ordinary_target.sum())
    through = {Method.FULL: 3, Method.GATED_LORA: 2}.get(plan.method, 1)
    total += through * (2 * cost.body * masks + cost.attention * mask_keys)
    total += (6 if plan.method is Method.GATED_LORA else 2) * cost.adapters * masks
    num_losses = int(plan.mask_loss_weight > 0 and plan.method is not Method.HEAD) + int(plan.has_head)
    # Every method needs the gradients of the output's rows; its weights' only if the base is trained.
    total += num_losses * (6 if plan.trains_base else 4) * cost.output * learning
    total += int(plan.distill) * 2 * cost.output * learning
    if plan.head is not HeadForm.NONE:
        total += 6 * cost.head * masks
    return total


class UnknownShape(ValueError):
    """A model whose sizes cannot be read; the message says what is missing."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with attention and a gated MLP, such as Llama, Mistral and Qwen; biases are not counted."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool  # output head and embedding are one matrix

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linears of one layer: q k v o, gate up down."""
        E, mlp = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [(E, queries), (E, keys), (E, keys), (queries, E), (E, mlp), (E, mlp), (mlp, E)]

    @property
    def body(self) -> int:
        """Weights of the layers' linears."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def output(self) -> int:
        """Weights of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, including two norms per layer and the final one."""
        return self.body + self.output * (1 if self.tied else 2) + (2 * self.num_layers + 1) * self.hidden_size

    @property
    def attention(self) -> int:
        """Forward operations per row and visible key over all layers: scores, and the weighted sum of values."""
        return 4 * self.num_heads * self.head_dim * self.num_layers

    def adapters(self, rank: int) -> int:
        """Weights of low-rank adapters on every linear of the layers."""
        return self.num_layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    @classmethod
    def of(cls, model: str) -> ModelShape:
        """Return the shape `1b`, `7b` or `13b`, or that of a checkpoint. Raises UnknownShape or ModelError."""
        if model.lower() in SHAPES:
            return SHAPES[model.lower()]
        return cls.from_config(model, family.read_config(Checkpoint.open(model)))

    @classmethod
    def from_config(cls, name: str, config: Any) -> ModelShape:
        """Read the sizes from a transformers config."""
        experts = next((key for key in ("num_experts", "num_local_experts") if getattr(config, key, None)), None)
        if experts is not None:
            raise UnknownShape(f"{name} has experts ({experts} in config.json); only dense decoders are estimated.")
        if family.latent_dim(config) is not None:
            raise UnknownShape(f"{name} has latent attention (MLA); only decoders with plain keys are estimated.")
        if layer_states(config):
            raise UnknownShape(f"{name} has recurrent layers; only decoders whose layers all attend are estimated.")
        wanted = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        missing = [key for key in wanted if getattr(config, key, None) is None]
        if missing:
            raise UnknownShape(f"The config of {name} has no {missing[0]}; only Llama-like decoders are estimated.")
        heads, kv_heads, head_dim = family.sizes(config)
        inner = config.intermediate_size
        return cls(
            name=name,
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            num_layers=int(config.num_hidden_layers),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=max(inner) if isinstance(inner, list) else int(inner),
            tied=bool(config.tie_word_embeddings),
        )


SHAPES = {
    "1b": ModelShape("1B", 128256, 2048, 16, 32, 8, 64, 8192, tied=True),  # as Llama 3.2 1B
    "7b": ModelShape("7B", 32000, 4096, 32, 32, 32, 128, 11008, tied=False),  # as Llama 2 7B
    "13b": ModelShape("13B", 32000, 5120, 40, 40, 40, 128, 13824, tied=False),  # as Llama 2 13B
}
"""Common models by name."""


UTILISATION = 0.4
"""Share of the datasheet rate that training reaches: common for dense decoders on one GPU, and not measured here."""
ALLOWANCE = 2.0e9  # bytes for the CUDA context, workspaces and what the allocator cannot use
FILL = 0.95  # share of a GPU's memory that a plan may use; the rest is the margin for errors of the estimate
CPU_FILL = 0.8  # share of the free memory that parts are chosen for: other programs run there, and grow, too
GB = 1e9
LOGIT_BYTES = 20
"""Bytes per row and vocabulary entry while a loss is differentiated: the teacher's probabilities, log-probabilities and
their gradients in float32, and the matmul's in half precision."""


@dataclass(frozen=True)
class GpuSpec:
    """One GPU, by its datasheet."""

    name: str
    flops: float  # dense bf16, per second
    memory: float  # bytes


GPUS = {
    "a100": GpuSpec("A100 80GB", 312e12, 80 * GB),
    "h100": GpuSpec("H100", 989e12, 80 * GB),
    "h200": GpuSpec("H200", 989e12, 141 * GB),
}


@dataclass(frozen=True)
class TrainingEstimate:
    """Operations and memory of a plan for a model."""

    shape: ModelShape
    plan: TrainPlan
    masks_per_token: float
    num_trained: int  # trained weights
    flops: dict[str, float]  # operations per real token, by part
    recomputed: float  # operations per real token that are recomputed to save memory
    memory: dict[str, float]  # bytes at the peak, by part

    @property
    def flops_per_token(self) -> float:
        """Operations of the model over all rows, as a run's own counter counts them."""
        return sum(self.flops.values())

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    def fits(self, memory: float, fill: float | None = None) -> bool:
        """Whether the run takes at most the share `fill` of `memory` bytes; None: FILL."""
        return self.bytes <= (FILL if fill is None else fill) * memory

    def seconds(self, num_tokens: float, gpu: GpuSpec, utilisation: float = UTILISATION) -> float:
        """Return the seconds for `num_tokens` real tokens."""
        return num_tokens * (self.flops_per_token + self.recomputed) / (gpu.flops * utilisation)


def masks_per_token(plan: TrainPlan) -> float:
    """Return the mask rows per real token of a text that has masks."""
    if not plan.has_masks:
        return 0.0
    if plan.anchors is Anchors.ONE:
        return plan.num_masks / (plan.length / 2)  # a text is cut in its middle, on average
    return _rows_per_token(plan, plan.num_masks)


def recurrent_per_token(plan: TrainPlan) -> float:
    """Return the drafts of the recurrent head per real token of a text with anchors."""
    return _rows_per_token(plan, plan.num_recurrent_drafts) if plan.has_recurrent_head else 0.0


def _rows_per_token(plan: TrainPlan, most: int) -> float:
    return plan.anchors_per_token * sum(max(plan.keep**depth, plan.least) for depth in range(most))


def estimate(shape: ModelShape, plan: TrainPlan, *, cpu: bool = False) -> TrainingEstimate:
    """Estimate operations and bytes of `plan` for a model of `shape`, with every token a target. `cpu`: the bytes of a
    run on a CPU, of the whole process."""
    head = _head_weights(shape, plan)
    recurrent = 3 * plan.recurrent_head * shape.hidden_size
    adapters = shape.adapters(plan.lora_rank) if plan.method is Method.GATED_LORA else 0
    private = plan.num_masks * shape.hidden_size if plan.method is Method.GATED_LORA else 0
    trained = {
        Method.FULL: shape.num_parameters + head,
        Method.SFT: shape.num_parameters,
        Method.GATED_LORA: adapters + private + head + recurrent,
        Method.HEAD: head + recurrent,
    }[plan.method]
    flops, recomputed = _flops(shape, plan, adapters, head)
    memory = _memory(shape, plan, trained, adapters, head + recurrent)
    if cpu:
        memory = _on_cpu(shape, plan, memory)
    masks = _taught_share(plan) * masks_per_token(plan)
    return TrainingEstimate(shape, plan, masks, trained, flops, recomputed, memory)


def fitted(shape: ModelShape, plan: TrainPlan, memory: float, *, cpu: bool = False) -> TrainPlan | None:
    """Return `plan` with the fewest parts per update that fit in `memory`, recomputing layers only if needed. On a CPU
    they leave room for other programs, where any do. Returns None if nothing fits."""
    parts = [n for n in range(1, plan.rows_per_step + 1) if plan.rows_per_step % n == 0 and n >= plan.accumulate]
    for fill in (CPU_FILL, FILL) if cpu else (FILL,):
        for twice in sorted({plan.activation_checkpointing, plan.trains_base}):
            for accumulate in parts:
                tried = replace(plan, accumulate=accumulate, activation_checkpointing=twice)
                if estimate(shape, tried, cpu=cpu).fits(memory, fill):
                    return tried
    return None


PART_TOKENS = 4096
"""Real tokens from which a part of an update computes at full speed on a CPU; larger parts only take more memory."""


def parts_on_cpu(plan: TrainPlan) -> int:
    """Return the most parts of an update of one process that still compute at full speed on a CPU."""
    rows = plan.rows_per_step
    least = min(rows, math.ceil(PART_TOKENS / plan.length))  # rows of a part
    return next(parts for parts in range(rows, 0, -1) if rows % parts == 0 and rows // parts >= least)


def _flops(shape: ModelShape, plan: TrainPlan, adapters: int, head: int) -> tuple[dict[str, float], float]:
    """Return the operations of one real token by part, and the recomputed ones."""
    masked, masks = _taught_share(plan), _taught_share(plan) * masks_per_token(plan)
    drafts = masked * recurrent_per_token(plan)
    keys = plan.length / 2  # keys that a row sees, on average
    row = 2 * shape.body + shape.attention * keys
    # 1: forward alone; 2: also the rows' gradients; 3: also the weights'.
    real_passes = 3 if plan.trains_base else 1
    mask_passes = {Method.FULL: 3, Method.GATED_LORA: 2}.get(plan.method, 1)
    num_real = 1.0 if plan.trains_base else masked  # a frozen base skips texts without masks
    num_losses = _num_losses(plan)
    teachers = int(plan.distill) if plan.has_masks else 0
    forward = 2 * shape.output
    flops = {
        "real rows": real_passes * row * num_real,
        "mask rows": mask_passes * row * masks,
        "adapters": (6 if plan.method is Method.GATED_LORA else 2) * adapters * masks,
        "draft head": 6.0 * head * masks,
        "next-token logits": 3.0 * forward if plan.trains_base else 0.0,
        "mask logits": num_losses * (3 if plan.trains_base else 2) * forward * masks,
        "teacher logits": teachers * forward * masks,
    }
    if drafts:
        drafted = min(plan.draft_vocab, shape.vocab_size) * shape.hidden_size
        flops["recurrent head"] = 18.0 * plan.recurrent_head * shape.hidden_size * drafts
        flops["recurrent head's logits"] = 6.0 * drafted * drafts
    recomputed = 0.0
    # Distilling over a frozen output recomputes nothing. Elsewhere each loss after the first runs the teacher again,
    # and the backward pass recomputes the logits of more than CHUNK rows.
    if plan.trains_base or not plan.distill:
        recomputed = max(0, num_losses - 1) * int(plan.distill) * forward * masks
        if masks * _tokens_at_once(plan) > CHUNK:
            recomputed += num_losses * (1 + int(plan.distill)) * forward * masks
    if plan.trains_base and _tokens_at_once(plan) > CHUNK:
        recomputed += forward
    if plan.activation_checkpointing and plan.trains_base:
        recomputed += row * (1 + masks)
    return {part: value for part, value in flops.items() if value}, recomputed


def _num_losses(plan: TrainPlan) -> int:
    """Return the number of losses on mask rows: masks alone, masks with the draft head."""
    if not plan.has_masks:
        return 0
    return int(plan.mask_loss_weight > 0 and plan.method is not Method.HEAD) + int(plan.has_head)


def _taught_share(plan: TrainPlan) -> float:
    """Return the share of real tokens that are in texts with anchors, of masks or of the recurrent head."""
    if not plan.teaches_drafts:
        return 0.0
    whole = plan.ar_share
    masked = (1 - plan.ar_share) * (0.5 if plan.anchors is Anchors.ONE else 1.0)  # a cut text is half as long
    return masked / (whole + masked) if whole + masked else 0.0


def _head_weights(shape: ModelShape, plan: TrainPlan) -> int:
    if not plan.has_head:
        return 0
    return plan.head_hidden * shape.hidden_size * (3 if plan.head is HeadForm.MLP else 2)


def activation_bytes(shape: ModelShape, plan: TrainPlan) -> float:
    """Return the bytes that one row keeps of one layer for the backward pass: attention without its scores, matmuls in
    half precision.

    Trained base: a float32 residual stream, and a half-precision copy of it for each matmul that reads it. Frozen
    base: everything in half precision except the norms' input; the matmuls' inputs are kept for the adapters.
    """
    E, D = shape.hidden_size, shape.head_dim
    heads = 2 * (shape.num_heads + 2 * shape.num_kv_heads) * D + 2 * shape.num_heads * D + 4 * shape.num_heads
    mlp = 8 * shape.intermediate_size  # gate, its activation, up, and gate times up
    if plan.trains_base:
        # two norms: input and normalised, float32; five copies for q k v, gate up
        return 2 * (4 + 4) * E + 5 * 2 * E + heads + mlp
    # two norms: input in float32, output once; outputs of the adapters' first matmuls
    return 2 * (4 + 2) * E + heads + mlp + len(shape.linears) * 2 * plan.lora_rank


RECURRENT_ROWS = 8
"""Hidden rows that are kept for each draft of the recurrent head, besides two of its inner size."""


def _memory(shape: ModelShape, plan: TrainPlan, trained: int, adapters: int, head: int) -> dict[str, float]:
    """Return the bytes at the peak: at the start of the backward pass, or in the optimiser step."""
    frozen = 0 if plan.trains_base else shape.num_parameters + (0 if plan.method is Method.GATED_LORA else adapters)
    num_real = _tokens_at_once(plan)
    num_masks = num_real * _taught_share(plan) * masks_per_token(plan)
    rows_of = {Method.FULL: num_real + num_masks, Method.SFT: num_real, Method.GATED_LORA: num_masks}
    learning = rows_of.get(plan.method, 0.0)
    per_layer = activation_bytes(shape, plan)
    if plan.activation_checkpointing and plan.trains_base:
        activations = learning * (4.0 * shape.hidden_size * shape.num_layers + per_layer)
    else:
        activations = learning * per_layer * shape.num_layers
    passing = 0.0 if plan.trains_base else num_real * per_layer  # rows without gradients keep one layer at a time
    kv = 0.0 if plan.trains_base else num_real * 2.0 * 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    drafts = num_real * _taught_share(plan) * recurrent_per_token(plan)
    rows = max(num_masks if plan.has_masks else 0.0, drafts, num_real if plan.trains_base else 0.0)
    kept = 1 if rows > CHUNK else max(1, _num_losses(plan) + int(plan.trains_base))
    states = 2.0 if plan.optimiser == "adamw" else 2.0 - _matrix_share(shape, plan, trained, head)
    memory = {
        "frozen weights": 2.0 * frozen,
        "trained weights": 4.0 * trained,
        "half-precision copies": 2.0 * trained if plan.precision != "no" else 0.0,
        "gradients": 4.0 * trained,
        "optimiser": 4.0 * states * trained,
        "activations": max(activations, passing),
        "keys and values": kv,
        "recurrent head's rows": 2.0 * drafts * (RECURRENT_ROWS * shape.hidden_size + 2 * plan.recurrent_head),
        "logits": min(rows, CHUNK) * shape.vocab_size * LOGIT_BYTES * (1 + 0.5 * (kept - 1)),
        "allowance": ALLOWANCE,
    }
    # The optimiser steps after activations are freed, on its own copy of the trained weights.
    gone = sum(memory[part] for part in ("half-precision copies", "activations", "keys and values", "logits"))
    memory["optimiser at work"] = max(0.0, 4.0 * trained - gone)
    return {part: size for part, size in memory.items() if size}


CPU_ALLOWANCE = 0.6e9
"""Bytes of Python, torch and its libraries in a process on a CPU."""
CPU_CHUNKS = 1.8
"""Bytes of a chunk of logits that the backward pass recomputes, as a multiple of logits that are kept."""
CPU_SPARE = 1.15
"""Bytes of the heap, as a multiple of the tensors in it: freed memory is fragmented."""
FLOAT32_ROWS, FLOAT32_TRAINED_ROWS = 3.3, 1.4
"""Bytes that a row keeps in float32, as a multiple of half precision: over a frozen base, and over a trained one."""


def _on_cpu(shape: ModelShape, plan: TrainPlan, memory: dict[str, float]) -> dict[str, float]:
    """Return the bytes of a run on a CPU, by part, from those on a GPU. With float32 matmuls a frozen base is held in
    float32. Attention keeps the keys that a mask row sees over a frozen base, and its mask over a trained one."""
    num_real = _tokens_at_once(plan)
    num_masks = num_real * _taught_share(plan) * masks_per_token(plan)
    is_half = plan.precision != "no"
    found = dict(memory) | {"allowance": CPU_ALLOWANCE}
    if not plan.trains_base:
        found["frozen weights"] = (1 if is_half else 2) * memory.get("frozen weights", 0.0)
    drafts = num_real * _taught_share(plan) * recurrent_per_token(plan)
    found["recurrent head's rows"] = (1 if is_half else 2) * memory.get("recurrent head's rows", 0.0)
    is_fused = (plan.distill or not num_masks) and not plan.trains_base
    if is_fused:
        rows = max(num_masks, drafts)
        found["logits"] = 2 * (2 if is_half else 6) * min(rows * shape.vocab_size, LOGITS_AT_ONCE["cpu"])
    elif (num_masks or num_real) > CHUNK:
        found["logits"] = CPU_CHUNKS * memory["logits"]
    row = 8.0 * shape.hidden_size
    if plan.trains_base:
        row += 2.0 * plan.length * (1 + masks_per_token(plan))
    elif num_masks:
        row += 4 * shape.num_kv_heads * shape.head_dim * (num_real + num_masks) / num_masks
    learning = {Method.GATED_LORA: num_masks, Method.HEAD: 0.0}.get(plan.method, num_real + num_masks)
    more = (learning if not plan.activation_checkpointing else 0.0) * row * shape.num_layers
    rows = CPU_SPARE * (memory.get("activations", 0.0) + more)
    found["activations"] = rows if is_half else rows * (FLOAT32_TRAINED_ROWS if plan.trains_base else FLOAT32_ROWS)
    return {part: size for part, size in found.items() if size}


def _matrix_share(shape: ModelShape, plan: TrainPlan, trained: int, head: int) -> float:
    """Return the share of trained weights that Muon updates, which needs one state per weight; AdamW needs two."""
    matrices = shape.body if plan.trains_base else 0
    matrices += shape.adapters(plan.lora_rank) if plan.method is Method.GATED_LORA else 0
    return (matrices + head) / trained


def _tokens_at_once(plan: TrainPlan) -> float:
    """Return the real tokens of one part of an update."""
    return plan.length * plan.rows_per_step / plan.accumulate


class DoesNotFit(InvalidPlan):
    """The run needs more memory than the machine has."""


def shape_of(checkpoint: Checkpoint) -> ModelShape | None:
    """Return the shape of a checkpoint's model, or None for a model that is not estimated."""
    try:
        return ModelShape.from_config(checkpoint.name, family.read_config(checkpoint))
    except UnknownShape:
        return None


def check_fits(
    shape: ModelShape | None, plan: TrainPlan, num_processes: int, free: FreeMemory, *, resumes: bool
) -> str | None:
    """Return a line on the memory that a run on a CPU needs, None for an unknown shape. `free`: of each process;
    `resumes`: the folder holds a state. Raises DoesNotFit for a run that needs more than is free, because the kernel
    would kill it without a message."""
    if shape is None:
        return None
    here = replace(plan, rows_per_step=plan.rows_per_step // num_processes)
    needed = estimate(shape, here, cpu=True).bytes
    if needed - CPU_ALLOWANCE > free.num_bytes:  # this process has its libraries already
        raise DoesNotFit(
            f"An update in {_parts(plan)} needs about {needed / GB:.1f} GB, and "
            f"{free.num_bytes / GB:.1f} GB are free ({free.bound}). "
            f"{cure_of(plan, num_processes, shape, free.num_bytes, cpu=True, resumes=resumes)}"
        )
    return (
        f"memory: about {needed / GB:.1f} of the {free.num_bytes / GB:.1f} GB that are free; updates of {_rows(plan)} "
        f"are computed in {_parts(plan)} (--accumulate {plan.accumulate})."
    )


def _rows(plan: TrainPlan) -> str:
    return f"{plan.rows_per_step} row{'s' * (plan.rows_per_step > 1)}"


def _parts(plan: TrainPlan) -> str:
    return f"{plan.accumulate} part{'s' * (plan.accumulate > 1)}"


def does_not_fit(
    checkpoint: Checkpoint,
    plan: TrainPlan,
    num_processes: int,
    memory: int | None,
    error: Exception,
    *,
    cpu: bool,
    resumes: bool,
) -> DoesNotFit:
    """Return the error, with flags that fit. `memory`: bytes of each process; None if unknown. `resumes`: the folder
    holds a state."""
    shape = shape_of(checkpoint)
    cure = cure_of(plan, num_processes, shape, memory, cpu=cpu, resumes=resumes)
    reason = str(error).partition(". ")[0]
    return DoesNotFit(f"An update in {_parts(plan)} does not fit ({reason}). {cure}")


def cure_of(
    plan: TrainPlan,
    num_processes: int,
    shape: ModelShape | None,
    memory: int | None,
    *,
    cpu: bool = False,
    resumes: bool = False,
) -> str:
    """Suggest more accumulation parts: the fewest that fit by the estimate, else the most possible. `resumes`: the
    folder holds a state, which goes on with other parts but not with other rows."""
    rows = plan.rows_per_step // num_processes
    more = [parts for parts in range(plan.accumulate + 1, rows + 1) if rows % parts == 0]
    can_recompute = plan.trains_base and not plan.activation_checkpointing
    smaller = "--activation-checkpointing, a shorter --length" if can_recompute else "a shorter --length"
    restart = ", and --restart" if resumes else ""
    if not more:
        return f"It has one row at a time already: give {smaller} or a smaller model{restart}."
    least = replace(plan, rows_per_step=rows, accumulate=more[0])
    fit = fitted(shape, least, memory, cpu=cpu) if shape is not None and memory is not None else None
    if fit is None and cpu:
        return f"Give {smaller} or a smaller model{restart}."
    if fit is None or fit.activation_checkpointing != plan.activation_checkpointing:
        goes_on = ", with which the run goes on" if resumes else ""
        return f"Give --accumulate {more[-1]}{goes_on}; or {smaller}{restart}."
    goes_on = ": the run goes on with it" if resumes else ""
    return f"Give --accumulate {fit.accumulate}, the smallest that fits by our estimate{goes_on}."


def gpu_memory() -> int | None:
    """Return the memory of the current GPU in bytes, or None without one."""
    return torch.cuda.get_device_properties("cuda").total_memory if torch.cuda.is_available() else None


def to_text(found: TrainingEstimate, num_tokens: float, gpu: GpuSpec, utilisation: float) -> str:
    """Return the estimate as a table for a terminal."""
    plan, fits = found.plan, found.fits(gpu.memory)
    lines = [
        f"{found.shape.name}, {plan.method}: computed, not measured",
        f"  weights            {_count(found.shape.num_parameters)}, of which {_count(found.num_trained)} learn"
        if plan.trains_base
        else f"  weights            {_count(found.shape.num_parameters)} frozen, {_count(found.num_trained)} learn",
        f"  rows per token     1 real, {found.masks_per_token:.2f} masks",
        f"  at once            {plan.rows_per_step // plan.accumulate} texts of {plan.length} ids"
        + (", layers computed twice" if plan.activation_checkpointing and plan.trains_base else ""),
        "",
        f"  {'memory':<24}{'GB':>8}        {'operations per token':<24}{'GFLOP':>8}",
    ]
    left = [(part, f"{size / GB:8.1f}") for part, size in found.memory.items()]
    right = [(part, f"{value / 1e9:8.2f}") for part, value in found.flops.items()]
    if found.recomputed:
        right.append(("(done twice)", f"{found.recomputed / 1e9:8.2f}"))
    for index in range(max(len(left), len(right))):
        one, other = (side[index] if index < len(side) else ("", " " * 8) for side in (left, right))
        lines.append(f"  {one[0]:<24}{one[1]}        {other[0]:<24}{other[1]}".rstrip())
    total = (found.flops_per_token + found.recomputed) / 1e9
    lines.append(f"  {'in all':<24}{found.bytes / GB:8.1f}        {'in all':<24}{total:8.2f}")
    hours = found.seconds(num_tokens, gpu, utilisation) / 3600
    verification = "fits" if fits else f"does not fit ({found.bytes / GB:.0f} of {gpu.memory / GB:.0f} GB)"
    lines += [
        "",
        f"  {gpu.name}: {verification}; {_count(num_tokens)} tokens take {_hours(hours)} at {utilisation:.0%} of "
        f"{gpu.flops / 1e12:.0f} TFLOP/s",
    ]
    if not fits:
        lines.append(f"  {_cure(found, gpu)}")
    return "\n".join(lines) + "\n"


def _cure(found: TrainingEstimate, gpu: GpuSpec) -> str:
    plan = fitted(found.shape, found.plan, gpu.memory)
    if plan is None:
        return "Nothing makes it fit on one: use --method gated-lora, a GPU with more memory, or several (FSDP)."
    flags = [f"--accumulate {plan.accumulate}"] if plan.accumulate != found.plan.accumulate else []
    flags += ["--activation-checkpointing"] if plan.activation_checkpointing else []
    return f"With {' '.join(flags)} it fits: {estimate(found.shape, plan).bytes / GB:.0f} GB."


def to_markdown(shapes: Sequence[ModelShape], num_tokens: float, utilisation: float = UTILISATION) -> str:
    """Return the guide's table: every model with every method, on the smallest GPU it fits. Uses the least memory: one
    text at a time (`--accumulate`), and recomputed layers if the base is trained."""
    gpus = sorted(GPUS.values(), key=lambda gpu: (gpu.memory, gpu.flops))
    rates = {gpu.flops: " / ".join(g.name for g in gpus if g.flops == gpu.flops) for gpu in gpus}
    times = " | ".join(f"{_count(num_tokens)} tokens, {names}" for names in rates.values())
    lines = [
        f"| model | method | weights that learn | GPU memory, at the least | as planned | needs | {times} |",
        "|---" * (6 + len(rates)) + "|",
    ]
    for shape in shapes:
        for method in Method:
            head = HeadForm.NONE if method is Method.SFT else HeadForm.MLP
            plan = TrainPlan(method=method, head=head)
            sizes = sorted({gpu.memory for gpu in gpus})
            fit = next((fit for size in sizes if (fit := fitted(shape, plan, size))), None)
            least = replace(plan, accumulate=plan.rows_per_step, activation_checkpointing=plan.trains_base)
            found = estimate(shape, fit or least)
            if fit is None:
                needs = "several GPUs"
            else:
                needs = next(f"{size / GB:.0f} GB" for size in sizes if found.fits(size))
                needs += f", `--accumulate {fit.accumulate}`" if fit.accumulate > 1 else ""
                needs += ", `--activation-checkpointing`" if fit.activation_checkpointing else ""
            hours = [
                _hours(found.seconds(num_tokens, gpu, utilisation) / 3600) if fit else "–"
                for gpu in {gpu.flops: gpu for gpu in gpus}.values()
            ]
            lines.append(
                f"| {shape.name} | {method} | {_count(found.num_trained)} | {estimate(shape, least).bytes / GB:.0f} GB "
                f"| {found.bytes / GB:.0f} GB | {needs} "
                f"| {' | '.join(hours)} |"
            )
    return "\n".join(lines) + "\n"


def _count(number: float) -> str:
    """1234567 -> 1.2 M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"


def number(text: str) -> float:
    """Parse a number above 0, such as `10M`, `1.5G` or `1e7`."""
    units = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
    factor = units.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0 such as 10M; got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a model or plan that cannot be estimated."""
    own = TrainPlan()
    parser = argparse.ArgumentParser(
        prog="python -m space_train.estimate",
        description="Memory and time of a training run on one GPU, computed and not measured.",
        epilog="Example: python -m space_train.estimate --model 7b --method gated-lora --tokens 10M --gpu h100",
    )
    add = parser.add_argument
    add("--model", default="7b", help=f"{', '.join(SHAPES)}, or a checkpoint: folder or hub id (default: %(default)s)")
    add("--method", choices=[m.value for m in Method], default=own.method.value, help="(default: %(default)s)")
    add("--tokens", type=number, default=10e6, help="real tokens to read, masks not counted (default: 10M)")
    add("--gpu", choices=list(GPUS), default="h100", help="(default: %(default)s)")
    add("--utilisation", type=number, default=UTILISATION, help="share of its datasheet rate (default: %(default)s)")
    add("--length", type=int, default=own.length, help="ids of one row (default: %(default)s)")
    add("--rows-per-step", type=int, default=own.rows_per_step, help="rows of an update (default: %(default)s)")
    add("--accumulate", type=int, default=own.accumulate, help="parts an update comes in (default: %(default)s)")
    add("--num-masks", type=int, default=own.num_masks, help="(default: %(default)s)")
    add("--anchors-per-token", type=float, default=own.anchors_per_token, help="(default: %(default)s)")
    add("--lora-rank", type=int, default=own.lora_rank, help="(default: %(default)s)")
    add("--head", choices=[h.value for h in HeadForm], help="draft head (default: the method's own)")
    add("--optimiser", choices=["adamw", "muon"], default=own.optimiser, help="(default: %(default)s)")
    add("--activation-checkpointing", action="store_true", help="compute layers twice, keep less (full, sft)")
    add("--table", action="store_true", help="instead: 1b, 7b and 13b with every method, as Markdown")
    options = parser.parse_args(argv)
    gpu = GPUS[options.gpu]
    if options.table:
        print(to_markdown(list(SHAPES.values()), options.tokens, options.utilisation), end="")
        return 0
    try:
        method = Method(options.method)
        head = HeadForm(options.head) if options.head else HeadForm.NONE if method is Method.SFT else own.head
        same = ("length", "rows_per_step", "accumulate", "num_masks", "anchors_per_token", "lora_rank", "optimiser")
        plan = TrainPlan(
            method=method,
            head=head,
            activation_checkpointing=options.activation_checkpointing,
            **{name: getattr(options, name) for name in same},
        )
        found = estimate(ModelShape.of(options.model), plan)
    except (InvalidPlan, ModelError, UnknownShape) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(to_text(found, options.tokens, gpu, options.utilisation), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
