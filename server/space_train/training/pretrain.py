"""Next-token training of the small Llama: steps until the budget is used, with progress lines and checkpoints."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from space_train.data.rows import PackedTokens
from space_train.networks.network import TrainNetwork
from space_train.run_folder import Measures, load_checkpoint, save_atomically
from space_train.self_generation.loops import loop_loss, looped
from space_train.train_plan import Budget, LearningRate, between
from space_train.training.optimiser import Optimiser


@dataclass
class StageCounters:
    """Progress of a stage."""

    step: int = 0
    num_tokens: int = 0
    elapsed_seconds: float = 0.0
    drawn: dict[str, int] = field(default_factory=dict)  # ids drawn from each stream
    history: list[Measures] = field(default_factory=list)  # one entry per evaluation


@dataclass(frozen=True)
class StagePace:
    """Intervals, in seconds, of a stage's logging, evaluation and checkpoints."""

    checkpoint: float = 90.0
    line: float = 20.0
    evaluation: float = 300.0


DEFAULT_PACE = StagePace()


def describe(measures: Measures) -> str:
    """Format measures as `loss 2.310  bits_per_byte 0.981`, without the keys that only locate an entry."""
    return "  ".join(f"{key} {value:.3f}" for key, value in measures.items() if key not in ("progress", "tokens"))


@dataclass(frozen=True)
class PretrainPlan:
    """Settings of next-token training, except its budget."""

    seed: int = 0
    tokens_per_step: int = 8192
    # Mostly short windows (cheaper attention, more documents per step), some as long as the served window.
    lengths: tuple[int, ...] = (256, 256, 512, 256, 256, 1024)
    # Share of stand-alone documented functions; it grows as the learning rate decays.
    function_share: tuple[float, float] = (0.2, 0.4)
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    learning_rate: LearningRate = field(default_factory=lambda: LearningRate(decay_from=0.4, final=0.1))
    # Every so many steps, a batch of loops to unlearn is added (0: never).
    loops_every: int = 0
    loop_tokens: int = 2048
    loop_length: int = 256
    compile: bool = True
    autocast: bool = True


def can_compile() -> bool:
    """Return whether torch.compile finds a C++ compiler; compilation doubles the rate on a CPU."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def autocast(enabled: bool) -> AbstractContextManager[object]:
    """bf16 matmuls with float32 weights and residual stream."""
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def next_token_loss(network: TrainNetwork, ids: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy of `ids` [B, R] in nats."""
    hidden = network(ids)[:, :-1].reshape(-1, network.shape.hidden_size)
    return F.cross_entropy(network.logits(hidden).float(), ids[:, 1:].reshape(-1))


def draw(
    streams: Mapping[str, PackedTokens], counters: StageCounters, length: int, num_tokens: int, function_share: float
) -> Tensor:
    """Draw the next `num_tokens / length` windows [B, length]: some from `functions`, the rest from `files`."""
    count = max(1, num_tokens // length)
    num_functions = round(function_share * count) if streams["functions"].holds(length) else 0
    windows = []
    for name, some in (("files", count - num_functions), ("functions", num_functions)):
        if some:
            drawn = counters.drawn.get(name, 0)
            # Rounded up to a whole window, so that no window of this length is drawn twice in an epoch.
            drawn = -(-drawn // length) * length
            windows.append(streams[name].windows(drawn, some, length))
            counters.drawn[name] = drawn + some * length
    return torch.cat(windows)


def bits_per_byte(network: TrainNetwork, held_out: Tensor, bytes_of_id: Tensor) -> Measures:
    """Return held-out next-token loss in nats per token and in bits per byte of text; `held_out` [N, length]."""
    nats, num_bytes = 0.0, int(bytes_of_id[held_out[:, 1:]].sum())
    with torch.no_grad():
        for ids in torch.split(held_out, 8):
            nats += float(next_token_loss(network, ids)) * ids[:, 1:].numel()
    return {"loss": nats / held_out[:, 1:].numel(), "bits_per_byte": nats / math.log(2) / num_bytes}


def pretrain(
    network: TrainNetwork,
    streams: Mapping[str, PackedTokens],
    evaluate: Callable[[], Measures],
    plan: PretrainPlan,
    budget: Budget,
    checkpoint: Path,
    *,
    ends_line: NDArray[np.bool_] | None = None,
    pace: StagePace = DEFAULT_PACE,
    stop_after_steps: int | None = None,
) -> StageCounters:
    """Train `network` in place until `budget` is used, from its current weights or, if `checkpoint` exists, from that
    state, with its counters and data position. Return the final counters.

    `ends_line` [V]: ids that contain a line end; without it no loops are unlearned. `stop_after_steps` stops early
    without finishing, like a kill.
    """
    optimiser = Optimiser(dict(network.named_parameters()), muon_rate=plan.muon_rate, adam_rate=plan.adam_rate)
    compiled = plan.compile and can_compile()
    loss_of = torch.compile(next_token_loss, dynamic=False) if compiled else next_token_loss
    loop_loss_of = torch.compile(loop_loss, dynamic=False) if compiled else loop_loss
    counters = StageCounters()
    if checkpoint.exists():
        state = load_checkpoint(checkpoint)
        network.load_state_dict(state["parts"]["network"])
        optimiser.load_state_dict(state["parts"]["optimiser"])
        counters = StageCounters(**state["counters"])
        print(f"next-token: resumed at step {counters.step}, {counters.num_tokens / 1e6:.2f} M tokens", flush=True)

    def update(progress: float) -> Measures:
        length, share = plan.lengths[counters.step % len(plan.lengths)], between(*plan.function_share, progress)
        ids = draw(streams, counters, length, plan.tokens_per_step, share)
        num_ids = ids.numel()
        with autocast(plan.autocast):
            loss = loss_of(network, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        measures = {"loss": float(loss.detach())}
        if ends_line is not None and plan.loops_every and counters.step % plan.loops_every == 0:
            ids = draw(streams, counters, plan.loop_length, plan.loop_tokens, share)
            windows = looped(ids, ends_line, np.random.default_rng([plan.seed, counters.step]))
            with autocast(plan.autocast):
                loops = loop_loss_of(network, *windows)
            loops.backward()  # type: ignore[no-untyped-call]
            measures["loops"] = float(loops.detach())
            counters.num_tokens += ids.numel()
        optimiser.step(plan.learning_rate.at(progress))
        counters.num_tokens += num_ids
        return measures

    def save() -> None:
        state = {"network": network.state_dict(), "optimiser": optimiser.state_dict()}
        save_atomically({"parts": state, "counters": asdict(counters)}, checkpoint)

    def assess(progress: float) -> None:
        measures = {"progress": progress, "tokens": float(counters.num_tokens), **evaluate()}
        counters.history.append(measures)
        print(f"next-token: held out: {describe(measures)}", flush=True)

    last = last_line = last_save = last_evaluation = time.monotonic()
    line_tokens, steps_here = counters.num_tokens, 0
    while (progress := budget.progress(counters.elapsed_seconds, counters.num_tokens)) < 1.0:
        if stop_after_steps is not None and steps_here >= stop_after_steps:
            return counters
        measures = update(progress)
        counters.step, steps_here = counters.step + 1, steps_here + 1
        now = time.monotonic()
        counters.elapsed_seconds, last = counters.elapsed_seconds + now - last, now
        if now - last_line >= pace.line:
            rate = (counters.num_tokens - line_tokens) / (now - last_line)
            done = budget.progress(counters.elapsed_seconds, counters.num_tokens)
            left = counters.elapsed_seconds * (1 - done) / max(done, 1e-9) / 60
            print(
                f"next-token: {100 * done:5.1f} %  step {counters.step}  {counters.num_tokens / 1e6:.2f} M tokens  "
                f"{rate:,.0f} tokens/s  {describe(measures)}  ETA {left:.0f} min",
                flush=True,
            )
            last_line, line_tokens = now, counters.num_tokens
        if now - last_evaluation >= pace.evaluation:
            assess(progress)
            last_evaluation = time.monotonic()
        if now - last_save >= pace.checkpoint:
            save()
            last_save = time.monotonic()
    if not counters.history or counters.history[-1]["progress"] < 1.0:
        assess(1.0)
        save()
    return counters
