"""The operations of recurrent layers: a convolution over few rows, the gated delta rule, and the scans of Mamba.

Convolutions and gates are element-wise sums over rows, and states advance row by row, in tensors of one sequence, so a
row has the same bits whatever else a step computes. On a CPU the compiled operation (cpu/recurrence.cpp) advances
states where it can be had, every head by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref

import torch
from torch import Tensor

from space_kernels.build.cpu_library import CpuLibrary, RecurrenceStruct, cpu_library
from space_kernels.recurrence.states import LayerMemory, StateStep


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, memory: LayerMemory, step: StateStep) -> Tensor:
    """Return the causal convolution of each channel: x [R, C], weight [C, taps], bias [C] -> [replayed rows + R, C], in
    float32. The rows before the step's come from the log, and the step's are logged."""
    num_taps = weight.shape[1]
    windows = step.windows(num_taps)
    wide = x.float()
    rows = torch.cat([wide.new_zeros(1, wide.shape[1]), memory.inputs[windows.logged], wide])
    taps = weight.float()
    out = rows[windows.inputs[:, 0]] * taps[:, 0]
    for tap in range(1, num_taps):
        out += rows[windows.inputs[:, tap]] * taps[:, tap]
    if bias is not None:
        out += bias.float()
    memory.inputs[step.slots, step.written] = rows[windows.log]
    return out


def with_logged(gates: Tensor, memory: LayerMemory, step: StateStep) -> Tensor:
    """Return the gates of replayed rows and the step's: gates [R, 2, H] float32 -> [replayed rows + R, 2, H], or
    [R, 1, num_logged] likewise. The step's are logged."""
    assert memory.gates is not None
    read_from, log = step.gate_rows
    both = torch.cat([memory.gates[read_from], gates])
    memory.gates[step.slots, step.written] = both[log]
    return both


_DELTA, _SCAN, _CHANNELS = 0, 1, 2
"""`Rule` of cpu/recurrence.h."""


def _library(state: Tensor) -> CpuLibrary | None:
    """Return what computes on states there, or None: torch does."""
    return cpu_library() if state.device.type == "cpu" else None


def _compiled(
    library: CpuLibrary,
    rule: int,
    vectors: tuple[Tensor, Tensor, Tensor],
    gates: Tensor,
    state: Tensor,
    step: StateStep,
    out: Tensor,
    rates: Tensor | None,
) -> Tensor:
    """Advance every sequence's state by its rows, and fill out [R, H, …]. vectors: what the state is multiplied by,
    what it grows by, and the values."""
    first, second, values = (part.contiguous() for part in vectors)
    gates = gates.contiguous()
    rates = None if rates is None else rates.contiguous()
    struct = RecurrenceStruct(
        first.data_ptr(),
        second.data_ptr(),
        values.data_ptr(),
        gates.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        values.shape[1],
        second.shape[1],
        second.shape[2],
        values.shape[2],
        step.num_replayed,
        step.runs.ctypes.data,
        len(step.runs),
        step.groups.ctypes.data,
        rule,
        None if rates is None else rates.data_ptr(),
    )
    library.recur(byref(struct), torch.get_num_threads())
    return out


NextState = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""State, row -> the state behind the row, and the row's output."""


def _scan(advance: NextState, out: Tensor, state: Tensor, step: StateStep) -> Tensor:
    """Advance every sequence's state by its rows, and fill out [R, …]. state: [slots, versions, H, …]"""
    skip = step.num_replayed
    for slot, read, write, replayed, num_replayed, chain, num_chain, num_final, group, num_groups in step.runs.tolist():
        now = torch.zeros_like(state[slot, write]) if read < 0 else state[slot, read]
        for row in range(replayed, replayed + num_replayed):
            now, _ = advance(now, row)
        groups = step.groups[group : group + num_groups].tolist()
        for count in range(1, num_chain + 1):
            row = chain + count - 1
            now, out[row - skip] = advance(now, row)
            if count == num_final:
                state[slot, write] = now
            while groups and groups[0][0] == count:
                _, first, masks = groups.pop(0)
                aside = now
                for row in range(first, first + masks):
                    aside, out[row - skip] = advance(aside, row)
    return out


def _recur(
    rule: int,
    vectors: tuple[Tensor, Tensor, Tensor],
    gates: Tensor,
    state: Tensor,
    step: StateStep,
    advance: NextState,
    rates: Tensor | None = None,
) -> Tensor:
    """Return the outputs [R, H, …] of the rows: by the compiled operation where it can be had, else by `advance`."""
    values = vectors[2]
    out = values.new_zeros(len(values) - step.num_replayed, *values.shape[1:])
    if (library := _library(state)) is not None:
        return _compiled(library, rule, vectors, gates, state, step, out, rates)
    return _scan(advance, out, state, step)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor, step: StateStep) -> Tensor:
    """Return the outputs of the gated delta rule (Gated DeltaNet, arXiv 2412.06464, equation 10), [R, H, E]:

        S ← decay·S;   S ← S + k ⊗ β·(v − S·k);   out = S·q

    q, k [N, G, D], v [N, H, E], gates [N, 2, H] (decay, β), all float32; N: replayed rows and the step's; every head of
    k serves H/G heads of v in a row. state [slots, versions, H, D, E], float32, advances."""
    spread = v.shape[1] // k.shape[1]

    def advance(now: Tensor, row: int) -> tuple[Tensor, Tensor]:
        decay, beta = gates[row, 0, :, None, None], gates[row, 1, :, None]
        key, query = (part[row].repeat_interleave(spread, 0)[:, :, None] for part in (k, q))
        now = now * decay
        change = (v[row] - (now * key).sum(1)) * beta
        now = now + key * change[:, None]
        return now, (now * query).sum(1)

    return _recur(_DELTA, (q, k, v), gates, state, step, advance)


def selective_scan(x: Tensor, b: Tensor, c: Tensor, gates: Tensor, state: Tensor, step: StateStep) -> Tensor:
    """Return the outputs of Mamba-2's recurrence (arXiv 2405.21060, section 3), [R, H, P]:

        S ← decay·S + (Δ·x) ⊗ b;   out = S·c

    x [N, H, P], b, c [N, G, D], gates [N, 2, H] (decay, Δ), all float32; N: replayed rows and the step's; every group
    of b and c serves H/G heads in a row. state [slots, versions, H, P, D], float32, advances."""
    spread = x.shape[1] // b.shape[1]

    def advance(now: Tensor, row: int) -> tuple[Tensor, Tensor]:
        decay, delta = gates[row, 0, :, None, None], gates[row, 1, :, None]
        into, out_of = (part[row].repeat_interleave(spread, 0)[:, None] for part in (b, c))
        now = now * decay + (x[row] * delta)[:, :, None] * into
        return now, (now * out_of).sum(2)

    return _recur(_SCAN, (c, b, x), gates, state, step, advance)


def channel_scan(
    x: Tensor, b: Tensor, c: Tensor, delta: Tensor, rates: Tensor, state: Tensor, step: StateStep
) -> Tensor:
    """Return the outputs of Mamba's recurrence (arXiv 2312.00752, algorithm 2), [R, H, P]:

        S ← exp(Δ·A)·S + (Δ·x) ⊗ b;   out = S·c

    x and Δ (`delta`) [N, H, P], A (`rates`, below zero) [H, P, D], b, c [N, 1, D], all float32; N: replayed rows and
    the step's; H·P: the channels, each with a Δ of its own. state [slots, versions, H, P, D], float32, advances."""

    def advance(now: Tensor, row: int) -> tuple[Tensor, Tensor]:
        steps = delta[row, :, :, None]
        now = now * (steps * rates).exp() + (x[row, :, :, None] * steps) * b[row, 0]
        return now, (now * c[row, 0]).sum(2)

    return _recur(_CHANNELS, (c, b, x), delta, state, step, advance, rates)
