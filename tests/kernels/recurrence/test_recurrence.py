"""Recurrent operations against dense definitions in float64, and row by row whatever else a step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from space_kernels.build.cpu_library import cpu_library
from space_kernels.paging.step_rows import StepRows
from space_kernels.recurrence import operations
from space_kernels.recurrence.operations import channel_scan, convolve, gated_delta_rule, selective_scan, with_logged
from space_kernels.recurrence.states import LayerState, RecurrentStates, StateStep
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from torch import Tensor

HEADS, GROUPS, WIDE, DEEP, TAPS = 4, 2, 6, 5, 4
CONV = 2 * GROUPS * DEEP + HEADS * WIDE
SHAPES = {"delta": (HEADS, DEEP, WIDE), "scan": (HEADS, WIDE, DEEP), "conv": (), "channels": (HEADS, WIDE, DEEP)}
MOST = 5  # drafts
FULL = DraftLayout.full(3, 5)


@dataclass
class Text:
    """The rows of one sequence, by position: what is convolved, and gates. Rows of masks have a place beside it."""

    seed: int
    x: Tensor = field(init=False)  # [positions, C]
    gates: Tensor = field(init=False)  # [positions, 2, H]

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.x = torch.randn(64, CONV, generator=generator)
        self.gates = torch.rand(64, 2, HEADS, generator=generator)


GENERATOR = torch.Generator().manual_seed(99)
WEIGHT, BIAS = torch.randn(CONV, TAPS, generator=GENERATOR), torch.randn(CONV, generator=GENERATOR)
RATES = -torch.rand(HEADS, WIDE, DEEP, generator=GENERATOR)
MASKS = Text(1234)
"""Rows of masks: that of mask j of the group behind position p is 10·(p mod 6) + j."""


def steps_of(gates: Tensor) -> Tensor:
    """Return the Δ of each channel [..., HEADS, WIDE], from gates [..., 2, HEADS]."""
    return gates[..., 0, :, None] + gates[..., 1, :, None] * torch.arange(WIDE)


def mask_row(position: int, mask: int) -> int:
    return 10 * (position % 6) + mask


@dataclass
class Part:
    """A sequence's rows in a step: `pending` rows from `start` on, and drafts of `drafted` rows of another text."""

    text: Text
    slot: int
    start: int
    pending: int
    layout: DraftLayout
    drafted: Text | None = None


def packed(parts: Sequence[Part]) -> tuple[StepRows, Tensor, Tensor]:
    """Return the rows of a step, and what they convolve and their gates."""
    segments = [
        Segment([0] * (one.pending + one.layout.num_drafts), one.start, range(20), one.layout, state=one.slot)
        for one in parts
    ]
    batch = ForwardBatch.build(segments, block_size=4, mask_ids=range(1, 6))
    x, gates = torch.zeros(len(batch.ids), CONV), torch.zeros(len(batch.ids), 2, HEADS)
    for one, chain, groups in zip(parts, batch.chain_rows, batch.mask_rows, strict=True):
        for place, row in enumerate(chain):
            source = one.text if place < one.pending else one.drafted or one.text
            x[row], gates[row] = source.x[one.start + place], source.gates[one.start + place]
        for number, group in enumerate(groups):
            for mask, row in enumerate(group):
                at = mask_row(one.start + one.pending - 1 + number, mask)
                x[row], gates[row] = MASKS.x[at], MASKS.gates[at]
    return batch.rows, x, gates


def computed(kind: str, inputs: Tensor, gates: Tensor, state: Tensor, step: StateStep) -> Tensor:
    """Return what the operation of a kind gives for convolved rows."""
    if kind == "delta":
        q, k, v = torch.split(inputs, [GROUPS * DEEP, GROUPS * DEEP, HEADS * WIDE], dim=1)
        heads = (part.reshape(len(part), -1, width) for part, width in ((q, DEEP), (0.3 * k, DEEP), (v, WIDE)))
        return gated_delta_rule(*heads, gates, state, step)
    b, c, x = torch.split(inputs, [GROUPS * DEEP, GROUPS * DEEP, HEADS * WIDE], dim=1)
    if kind == "channels":
        rows = (x.reshape(len(x), HEADS, WIDE), b[:, None, :DEEP], c[:, None, :DEEP])
        return channel_scan(*rows, steps_of(gates), RATES, state, step)
    heads = (part.reshape(len(part), -1, width) for part, width in ((x, WIDE), (b, DEEP), (c, DEEP)))
    return selective_scan(*heads, gates, state, step)


class Memory:
    """Sequences that step on one layer's memory."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.states = RecurrentStates({0: LayerState(CONV, TAPS, SHAPES[kind])}, 4, MOST)

    def step(self, parts: Sequence[Part], *, commits: bool = True) -> Tensor:
        """Return the outputs of the step's rows, chain rows of all first."""
        rows, x, gates = packed(parts)
        memory, step = self.states.layers[0], self.states.begin(rows)
        inputs = convolve(x, WEIGHT, BIAS, memory, step)
        if self.kind == "conv":
            out = inputs[step.num_replayed :]
        else:
            assert memory.state is not None
            out = computed(self.kind, inputs, with_logged(gates, memory, step), memory.state, step)
        if commits:
            self.states.commit(step)
        return out


def dense(kind: str, rows: Tensor, gates: Tensor) -> Tensor:
    """Return the outputs of a text's rows [N, C], from its beginning, in float64."""
    padded = torch.cat([torch.zeros(TAPS - 1, CONV), rows]).double()
    conv = sum(padded[tap : tap + len(rows)] * WEIGHT[:, tap].double() for tap in range(TAPS)) + BIAS.double()
    assert isinstance(conv, Tensor)
    if kind == "conv":
        return conv
    first, second, third = torch.split(conv, [GROUPS * DEEP, GROUPS * DEEP, HEADS * WIDE], dim=1)
    first, second = (part.view(-1, GROUPS, DEEP).repeat_interleave(HEADS // GROUPS, 1) for part in (first, second))
    if kind == "channels":
        return dense_channels(third.view(-1, HEADS, WIDE), first[:, 0], second[:, 0], steps_of(gates.double()))
    values, state = third.view(-1, HEADS, WIDE), torch.zeros(HEADS, DEEP, WIDE, dtype=torch.float64)
    out = []
    for number, (decay, strength) in enumerate(gates.double()):
        state = decay[:, None, None] * state
        if kind == "delta":
            key = 0.3 * second[number]
            wanted = values[number] - torch.einsum("hd,hde->he", key, state)
            state = state + torch.einsum("hd,he->hde", key, strength[:, None] * wanted)
            out.append(torch.einsum("hd,hde->he", first[number], state))
        else:
            state = state + torch.einsum("hd,he->hde", first[number], strength[:, None] * values[number])
            out.append(torch.einsum("hd,hde->he", second[number], state))
    return torch.stack(out)


def dense_channels(x: Tensor, b: Tensor, c: Tensor, delta: Tensor) -> Tensor:
    """Return the same of Mamba: output t is the sum of what each row before t has left, faded since."""
    since = delta.cumsum(0)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for before in range(row + 1):
            fade = ((since[row] - since[before])[:, :, None] * RATES.double()).exp()
            out[row] += (fade * (b[before] * c[row])).sum(2) * delta[before] * x[before]
    return out


KINDS = pytest.mark.parametrize("kind", SHAPES)


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the compiled operation, and with torch's definition."""
    if request.param == "torch":
        monkeypatch.setattr(operations, "_library", lambda state: None)
    elif cpu_library() is None:
        pytest.skip("there is no compiled operation here")


@KINDS
def test_prompts_in_chunks_and_decoded_rows_are_those_of_the_whole_text(kind: str) -> None:
    text, memory = Text(1), Memory(kind)
    wanted = dense(kind, text.x[:30], text.gates[:30])
    start = 0
    for count in (1, 2, 11, 1, 1, 14):
        found = memory.step([Part(text, 2, start, count, DraftLayout.plain())])[:count]
        torch.testing.assert_close(found.double(), wanted[start : start + count], rtol=1e-4, atol=1e-5)
        start += count


@KINDS
def test_mask_groups_begin_with_the_state_of_their_chain_row_and_leave_no_trace(kind: str) -> None:
    text, memory = Text(2), Memory(kind)
    memory.step([Part(text, 0, 0, 9, DraftLayout.plain())])
    out = memory.step([Part(text, 0, 9, 1, FULL)])
    for group in range(4):
        rows = [mask_row(9 + group, mask) for mask in range(5)]
        x, gates = (
            torch.cat([text.x[: 10 + group], MASKS.x[rows]]),
            torch.cat([text.gates[: 10 + group], MASKS.gates[rows]]),
        )
        first = 4 + 5 * group
        torch.testing.assert_close(out[first : first + 5].double(), dense(kind, x, gates)[-5:], rtol=1e-4, atol=1e-5)
    plain = Memory(kind)
    plain.step([Part(text, 0, 0, 9, DraftLayout.plain())])
    plain.step([Part(text, 0, 9, 4, DraftLayout.plain())])
    two = [one.step([Part(text, 0, 13, 3, DraftLayout.plain())]) for one in (memory, plain)]
    assert torch.equal(*two)


@KINDS
@pytest.mark.parametrize("accepted", range(4))
def test_rejected_drafts_leave_no_bit_behind(kind: str, accepted: int) -> None:
    text, wrong = Text(3), Text(4)
    wrong.x[:20], wrong.gates[:20] = text.x[:20], text.gates[:20]
    wrong.x[10 + accepted :], wrong.gates[10 + accepted :] = Text(4).x[10 + accepted :], Text(4).gates[10 + accepted :]
    drafted, plain = Memory(kind), Memory(kind)
    for memory in (drafted, plain):
        memory.step([Part(text, 1, 0, 9, DraftLayout.plain())])
    drafted.step([Part(text, 1, 9, 1, FULL, wrong)])
    drafted.step([Part(text, 1, 10 + accepted, 1, FULL, text)])
    drafted.step([Part(text, 1, 12 + accepted, 1, FULL, text)])
    found = drafted.step([Part(text, 1, 16 + accepted, 1, DraftLayout.plain())])[:1]
    for position in range(9, 16 + accepted):
        plain.step([Part(text, 1, position, 1, DraftLayout.plain())])
    assert torch.equal(found, plain.step([Part(text, 1, 16 + accepted, 1, DraftLayout.plain())])[:1])


@KINDS
def test_a_row_has_the_same_bits_in_any_company_and_slot(kind: str) -> None:
    texts = [Text(seed) for seed in (5, 6, 7)]
    together, alone = Memory(kind), [Memory(kind) for _ in texts]
    steps = [
        [Part(texts[0], 3, 0, 7, DraftLayout.plain()), Part(texts[1], 1, 0, 2, DraftLayout.plain())],
        [Part(texts[1], 1, 2, 3, FULL), Part(texts[0], 3, 7, 1, DraftLayout.full(1, 2)), Part(texts[2], 0, 0, 1, FULL)],
        [Part(texts[0], 3, 9, 1, FULL), Part(texts[2], 0, 2, 1, DraftLayout.plain()), Part(texts[1], 1, 5, 4, FULL)],
    ]
    for parts in steps:
        rows, _, _ = packed(parts)
        out = together.step(parts)
        for number, part in enumerate(parts):
            memory = alone[texts.index(part.text)]
            own = memory.step([Part(part.text, 2, part.start, part.pending, part.layout)])
            chain, masks = rows.pattern.chain_runs[number], rows.pattern.mask_runs[number]
            mine = [*chain, *masks]
            assert torch.equal(out[mine], own[: len(mine)])


@KINDS
def test_a_step_that_failed_behind_its_layers_can_be_taken_again(kind: str) -> None:
    text, memory = Text(8), Memory(kind)
    memory.step([Part(text, 0, 0, 9, DraftLayout.plain())])
    part = Part(text, 0, 9, 6, FULL)
    first = memory.step([part], commits=False)
    second = memory.step([part])
    assert torch.equal(first, second)
    assert torch.equal(memory.step([part]), first)
    alone = Memory(kind)
    alone.step([Part(text, 0, 0, 9, DraftLayout.plain())])
    alone.step([part])
    behind = Part(text, 0, 17, 2, DraftLayout.plain())
    assert torch.equal(memory.step([behind]), alone.step([behind]))


def test_a_slot_knows_nothing_of_the_sequence_that_had_it_before() -> None:
    memory, fresh = Memory("delta"), Memory("delta")
    memory.step([Part(Text(9), 0, 0, 20, FULL)])
    memory.step([Part(Text(9), 0, 20, 1, FULL)])
    part = Part(Text(10), 0, 0, 3, DraftLayout.plain())
    assert torch.equal(memory.step([part]), fresh.step([part]))
    with pytest.raises(ValueError, match="not the one before position 21"):
        memory.step([Part(Text(9), 0, 21, 1, FULL)])


def test_steps_that_do_not_go_on_where_the_state_is_are_refused() -> None:
    memory = Memory("scan")
    with pytest.raises(ValueError, match="not the one before position 4"):
        memory.step([Part(Text(1), 0, 4, 1, DraftLayout.plain())])
    memory.step([Part(Text(1), 0, 0, 4, FULL)])
    with pytest.raises(ValueError, match="not the one before position 8"):
        memory.step([Part(Text(1), 0, 8, 1, DraftLayout.plain())])
    with pytest.raises(ValueError, match="same slot"):
        memory.step([Part(Text(1), 1, 0, 1, FULL), Part(Text(2), 1, 0, 1, FULL)])
    with pytest.raises(ValueError, match="no slot 4"):
        memory.step([Part(Text(1), 4, 0, 1, FULL)])
    with pytest.raises(ValueError, match="6 drafts; states can be rolled back by 5"):
        memory.step([Part(Text(1), 0, 5, 1, DraftLayout(6, (0,) * 7))])


@pytest.mark.parametrize(
    ("rule", "deep", "wide"), [("delta", 128, 128), ("delta", 96, 192), ("scan", 256, 64), ("channels", 16, 64)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_heads_of_real_sizes_have_the_same_bits_in_chunks_and_are_those_of_torch(
    rule: str, deep: int, wide: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    count, heads, groups = 24, 4, 2
    first, second = (torch.randn(count, groups, deep, generator=generator) * deep**-0.5 for _ in range(2))
    values = torch.randn(count, heads, wide, generator=generator)
    gates = torch.rand(count, 2, heads, generator=generator)
    operation: Callable[..., Tensor] = gated_delta_rule if rule == "delta" else selective_scan
    rates = -torch.rand(heads, wide, deep, generator=generator)
    delta = torch.rand(count, heads, wide, generator=generator)
    shape = (heads, deep, wide) if rule == "delta" else (heads, wide, deep)

    def compute(chunks: Sequence[int]) -> Tensor:
        states, parts, start = RecurrentStates({0: LayerState(4, 2, shape)}, 1, 0), [], 0
        state = states.layers[0].state
        assert state is not None
        for length in chunks:
            segment = Segment([0] * length, start, range(9))
            step = states.begin(ForwardBatch.build([segment], block_size=4, mask_ids=()).rows)
            rows = slice(start, start + length)
            vectors = (first[rows], second[rows], values[rows])
            if rule == "scan":
                vectors = (values[rows], second[rows], first[rows])
            if rule == "channels":
                one = values[rows], second[rows, :1], first[rows, :1], delta[rows]
                parts.append(channel_scan(*one, rates, state, step))
            else:
                parts.append(operation(*vectors, gates[rows], state, step))
            states.commit(step)
            start += length
        return torch.cat(parts)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = compute([count])
        assert torch.equal(compute([1, 2, 13, 8]), whole)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(operations, "_library", lambda state: None)
    torch.testing.assert_close(whole, compute([count]), rtol=1e-4, atol=1e-5)


def test_memory_is_counted_as_it_is_allocated() -> None:
    layers = {0: LayerState(CONV, TAPS, SHAPES["delta"]), 3: LayerState(8, 3), 4: LayerState(8, 3, (2, 4, 3), 14)}
    states = RecurrentStates(layers, 6, MOST)
    assert states.num_bytes == 6 * sum(layer.num_bytes(MOST) for layer in layers.values())
