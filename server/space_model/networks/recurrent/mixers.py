"""The forward passes of recurrent modules: Gated DeltaNet, Mamba-2, Mamba and short convolutions.

All rows take one path: a row of a prompt, of a decode step, of drafts and of masks has the arithmetic of transformers'
pass over a whole prompt, one position after another, in float32. (transformers' own decode steps differ: they do not
bound Mamba-2's Δ by time_step_limit.)
"""

from __future__ import annotations

from typing import Any

import torch
from space_kernels.layers.row_invariant_calls import RowInvariantCalls, sigmoid, softplus
from space_kernels.recurrence.operations import channel_scan, convolve, gated_delta_rule, selective_scan, with_logged
from space_kernels.recurrence.states import LayerMemory, StateStep
from torch import Tensor
from transformers.activations import ACT2FN


def gated_delta_net(module: Any, hidden: Tensor, memory: LayerMemory, step: StateStep) -> Tensor:
    """Stand in for a module of Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo hybrids): [1, R, hidden] -> the same"""
    mixed, z, b, a = _projected(module, hidden)
    key_dim, value_dim = module.key_dim, module.value_dim
    inputs = _convolved(mixed, module.conv1d, module.activation, memory, step)
    q, k, v = torch.split(inputs, [key_dim, key_dim, value_dim], dim=-1)
    q, k = (_unit(part.reshape(len(part), -1, module.head_k_dim)) for part in (q, k))
    beta = sigmoid(b.float())
    if getattr(module, "allow_neg_eigval", False):
        beta = beta * 2.0
    decay = (softplus(a.float() + module.dt_bias.float()) * -module.A_log.float().exp()).exp()
    gates = with_logged(torch.stack([decay, beta], dim=1), memory, step)
    assert memory.state is not None
    out = gated_delta_rule(
        q / module.head_k_dim**0.5, k, v.reshape(len(v), -1, module.head_v_dim), gates, memory.state, step
    )
    rows = out.reshape(-1, module.head_v_dim).to(hidden.dtype)
    with RowInvariantCalls():
        normed: Tensor = (module.norm if hasattr(module, "norm") else module.o_norm)(rows, z.reshape(rows.shape))
    last = module.out_proj if hasattr(module, "out_proj") else module.o_proj
    projected: Tensor = last(normed.reshape(1, len(out), value_dim))
    return projected


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what is convolved [R, C], the output's gate z [R, …], and b and a [R, heads]."""
    if hasattr(module, "in_proj_qkvz"):
        q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        mixed = torch.cat([part[0].flatten(1) for part in (q, k, v)], dim=-1)
    elif hasattr(module, "in_proj_qkv"):
        mixed, z = module.in_proj_qkv(hidden)[0], module.in_proj_z(hidden)
        b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
    else:
        mixed = torch.cat([linear(hidden)[0] for linear in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        z, b, a = module.g_proj(hidden), module.b_proj(hidden), module.a_proj(hidden)
    return mixed, z[0], b[0], a[0]


def _unit(x: Tensor) -> Tensor:
    """Return x [..., D] over its length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def mamba2(module: Any, hidden: Tensor, memory: LayerMemory, step: StateStep) -> Tensor:
    """Stand in for a module of Mamba-2 (also in Bamba, Granite 4, Falcon-H1, Nemotron-H): [1, R, hidden] -> the same"""
    scaled = hidden * module.ssm_in_multiplier if hasattr(module, "ssm_in_multiplier") else hidden
    projected = module.in_proj(scaled)
    if hasattr(module, "mup_vector"):
        projected = projected * module.mup_vector
    heads, width, size = module.num_heads, module.head_dim, module.ssm_state_size
    gate, mixed, dt = projected[0].split([module.intermediate_size, module.conv_dim, heads], dim=-1)
    inputs = _convolved(mixed, module.conv1d, module.activation, memory, step)
    x, b, c = torch.split(inputs, [heads * width, module.n_groups * size, module.n_groups * size], dim=-1)
    x, b, c = x.reshape(len(x), heads, width), b.reshape(len(b), -1, size), c.reshape(len(c), -1, size)
    low, high = module.time_step_limit
    delta = softplus(dt.float() + module.dt_bias.float()).clamp(min=low, max=high)
    decay = (delta * -module.A_log.float().exp()).exp()
    gates = with_logged(torch.stack([decay, delta], dim=1), memory, step)
    assert memory.state is not None
    out = selective_scan(x, b, c, gates, memory.state, step)
    rows = (out + x[step.num_replayed :] * module.D.float()[:, None]).flatten(1)[None]
    with RowInvariantCalls():
        if getattr(module, "mamba_rms_norm", True):
            rows = module.norm(rows, gate[None])
        else:
            rows = rows * torch.nn.functional.silu(gate[None])
    made: Tensor = module.out_proj(rows.to(hidden.dtype))
    return made


def decay_rates(module: Any) -> Tensor:
    """Return A of a module of Mamba's first version, [channels, state size] float32, below zero: computed once, for it
    has as many numbers as the state. `mamba` reads it as the module's buffer `rates`."""
    rates: Tensor = -module.A_log.detach().float().exp()
    return rates


def mamba(module: Any, hidden: Tensor, memory: LayerMemory, step: StateStep) -> Tensor:
    """Stand in for a module of Mamba's first version (Mamba, FalconMamba, Jamba): [1, R, hidden] -> the same"""
    x, gate = module.in_proj(hidden).chunk(2, dim=-1)
    inputs = _convolved(x[0], module.conv1d, module.activation, memory, step)
    own = inputs[step.num_replayed :]
    rank, size = module.time_step_rank, module.ssm_state_size
    parts = module.x_proj(own.to(hidden.dtype)[None]).split([rank, size, size], dim=-1)
    dt, b, c = parts
    if hasattr(module, "dt_layernorm"):
        dt, b, c = module.dt_layernorm(dt), module.b_layernorm(b), module.c_layernorm(c)
    delta = softplus(module.dt_proj(dt)[0].float())
    logged = with_logged(torch.cat([delta, b[0].float(), c[0].float()], dim=1)[:, None], memory, step)[:, 0]
    delta, b, c = torch.split(logged, [delta.shape[1], size, size], dim=1)
    assert memory.state is not None
    channels = memory.state.shape[2:4]
    out = channel_scan(
        inputs.reshape(-1, *channels),
        b[:, None],
        c[:, None],
        delta.reshape(-1, *channels),
        module.rates.view(*channels, size),
        memory.state,
        step,
    ).flatten(1)
    rows = (out + own * module.D.float())[None]
    with RowInvariantCalls():
        rows = rows * torch.nn.functional.silu(gate.float())
    made: Tensor = module.out_proj(rows.to(hidden.dtype))
    return made


def short_convolution(module: Any, hidden: Tensor, memory: LayerMemory, step: StateStep) -> Tensor:
    """Stand in for a gated short convolution (LFM2, LFM3): [1, R, hidden] -> the same"""
    before, behind, x = module.in_proj(hidden).chunk(3, dim=-1)
    out = _convolved((before * x)[0], module.conv, None, memory, step)[step.num_replayed :]
    made: Tensor = module.out_proj(behind * out.to(hidden.dtype)[None])
    return made


def _convolved(x: Tensor, conv: Any, activation: str | None, memory: LayerMemory, step: StateStep) -> Tensor:
    """x [R, C] -> [replayed rows + R, C], in float32"""
    made = convolve(x, conv.weight[:, 0], conv.bias, memory, step)
    if activation is None:
        return made
    with RowInvariantCalls():
        out: Tensor = ACT2FN[activation](made)
    return out
