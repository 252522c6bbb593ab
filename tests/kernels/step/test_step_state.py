"""A step of the batch's state: kernels and reference write the same tensors, read nothing on the host, and sequences
are independent. The server's test_device_state compares it with sequences on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import pytest
import torch
from space_kernels.sampling import device_sampling as choosing
from space_kernels.sampling.device_sampling import SamplingCapacity, Stages, sample
from space_kernels.sampling.sampler import SampledTokens
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.step import state as reference
from space_kernels.step.draft_head import candidates, propose, sampling_columns
from space_kernels.step.state import StateAdmission, StepIndex, StepState
from space_kernels.step.verification import EndCode, StepVerification, num_accepted, verify, verify_sequences
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, WINDOW, LINES = 40, 64, 6


@dataclass(frozen=True)
class Layout:
    num_drafts: int
    masks: tuple[int, ...]
    head_drafts: int = field(default=0, repr=False)


LAYOUTS = [Layout(0, (0,)), Layout(0, (3,)), Layout(2, (2, 0, 3)), Layout(3, (3, 3, 3, 3)), Layout(4, (0, 0, 0, 0, 0))]

SAMPLING_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(key=1, temperature=0.8, top_p=0.9),
    SamplingParams(key=2, bad_words=((5,), (7, 8)), min_tokens=40, end_ids=(20, 21)),
    SamplingParams(key=3, repetition_penalty=1.2, frequency_penalty=0.1, top_k=9),
    SamplingParams(key=4, bias=((3, 1.0),), min_p=0.1, typical_p=0.9),
]


def state_of(seed: int, lines: Sequence[int] = range(LINES), device: str = DEVICE) -> StepState:
    """Batch index 5 is free, 4 has no free slot, 3 may emit two more ids, the others are mid-generation."""
    generator = torch.Generator().manual_seed(seed)
    state = StepState.empty(
        len(lines), max_drafts=4, max_pages=16, block_size=4, window=WINDOW, vocab_size=V,
        room=SamplingCapacity(num_biases=2, num_ends=3, num_words=2, word_length=2), device=device,
    )  # fmt: skip
    ids = torch.randint(0, V, (LINES, 40), generator=generator).tolist()
    for line, number in enumerate(lines):
        if number == 5:
            continue
        count = 9 + number if number != 4 else 13
        state.put(
            line,
            StateAdmission(
                ids=ids[number][:count], num_prompt=count - 2,
                pages=[number * 16 + page for page in range(3 if number == 4 else 6)],
                sampling_params=SAMPLING_PARAMS[number],
                num_left=2 if number == 3 else 30, eos_ids=[20], stop_ids=[21, 20], max_drafts=4 if number != 2 else 2,
                max_masks=4 if number != 2 else 2, drafts=ids[number][30 : 30 + (seed + number) % 5],
            ),
        )  # fmt: skip
    return state


def tensors_of(of: Any) -> dict[str, Tensor]:
    found = {field.name: getattr(of, field.name) for field in fields(of)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def same(one: Any, other: Any) -> None:
    for name, value in tensors_of(one).items():
        assert torch.equal(value, tensors_of(other)[name]), name


def samples_of(state: StepState, index: StepIndex, seed: int) -> SampledTokens:
    """Draw samples for the chain rows: mostly the drafts, sometimes an end id, sometimes unusable."""
    generator = torch.Generator().manual_seed(seed)
    S, k = index.num_sequences, index.num_drafts
    ids = torch.randint(4, V, (LINES, k + 1), generator=generator)[:S].to(state.root.device)
    agrees = torch.rand(LINES, k, generator=generator)[:S].to(ids.device) < 0.75
    ids[:, :k] = torch.where(agrees, state.drafts[:, :k], ids[:, :k])
    ends = (torch.rand(LINES, k + 1, generator=generator) < 0.08)[:S].to(ids.device)
    ids = torch.where(ends, 20 + torch.arange(k + 1, device=ids.device) % 2, ids)
    usable = (torch.rand(LINES, k + 1, generator=generator) > 0.05)[:S].to(ids.device)
    return SampledTokens(ids, usable)


def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from space_kernels.step import state_triton as step_state_triton

    return step_state_triton


BANNED = torch.tensor([1, 2])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_kernels_write_what_the_reference_writes(layout: Layout) -> None:
    made = kernels()
    index = StepIndex.of(LINES, layout, DEVICE)
    mask_ids = torch.arange(1, 5, device=DEVICE)
    banned = BANNED.to(DEVICE)
    ends = set()
    for seed in range(4):
        ours, theirs = state_of(seed), state_of(seed)
        laid_out, expected_rows = made.rows(ours, index, mask_ids), reference.rows(theirs, index, mask_ids)
        same(laid_out, expected_rows)
        same(made.rows(ours, index), reference.rows(theirs, index))
        choice = samples_of(ours, index, seed)
        verification = made.verify_step(ours, index, laid_out, choice)
        expected_verification = reference.verify_step(theirs, index, expected_rows, choice)
        same(verification, expected_verification)
        ends |= set(verification.end.tolist())
        found = (
            made.masks(ours, index, verification) if index.most_drafts else reference.masks(ours, index, verification)
        )
        same(found, reference.masks(theirs, index, expected_verification))
        drafts = torch.randint(-1, V + 1, found.rows.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        result = made.advance(ours, laid_out, verification, drafts, found.count, banned)
        assert torch.equal(
            result, reference.advance(theirs, expected_rows, expected_verification, drafts, found.count, banned)
        )
        ours.history[:, WINDOW], theirs.history[:, WINDOW] = 0, 0  # never read
        same(ours, theirs)
    assert len(ends) > 1


def step(state: StepState, index: StepIndex, stages: Stages, logits: Tensor, banned: Tensor) -> Tensor:
    """A step of the reference, its drafts rescored by a draft head."""
    S, k = index.num_sequences, index.num_drafts
    laid_out = reference.rows(state, index, torch.arange(1, 5, device=logits.device))
    of_rows = logits[laid_out.ids] + 0.1 * logits[laid_out.positions % V]
    before = reference.chain_choices(state, index, stages)
    chain = of_rows[: index.num_chain_rows].view(S, k + 1, V)
    verification = reference.verify_step(
        state, index, laid_out, sample(chain, state.batch_params, stages, before, banned, state.counts)
    )
    found = reference.masks(state, index, verification)
    before = reference.mask_choices(state, verification, index.most_drafts, stages)
    ids, offsets = candidates(
        of_rows[found.rows],
        stages,
        lambda raw: choosing.edit(raw, state.batch_params, stages, before, banned, state.counts),
    )
    last = verification.emitted.gather(1, (verification.lengths - 1).clamp(min=0)[:, None])[:, 0]
    drafts = propose(
        logits[laid_out.ids][found.rows], ids, offsets, last, before.positions, state.batch_params.key,
        sampling_columns(state.batch_params, stages), w1=torch.ones(6, 2 * V, device=logits.device),
        w2=torch.ones(V, 6, device=logits.device), embedding_scale=0.1,
        embed=lambda of: torch.nn.functional.embedding(of, logits), logits_of=lambda h, of: h.gather(1, of),
    )  # fmt: skip
    return reference.advance(state, laid_out, verification, drafts, found.count, banned)


class NothingIsRead(TorchDispatchMode):
    """Raises on operations that synchronise with the device, or whose shapes depend on values."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique", "is_nonzero", "bincount", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in self.REFUSED:
            raise AssertionError(f"{func.name()} reads a tensor on the host")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            for indices in args[1]:
                if indices is not None and indices.dtype in (torch.bool, torch.uint8):
                    raise AssertionError(f"{func.name()} by a mask makes a shape from values")
        if name == "repeat_interleave" and "Tensor" in func.name():
            raise AssertionError(f"{func.name()} makes a shape from values")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if max(layout.masks)], ids=str)
def test_a_step_reads_nothing_on_the_host(layout: Layout) -> None:
    state, index = state_of(1), StepIndex.of(LINES, layout, DEVICE)
    logits = torch.randn(V, V, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with NothingIsRead():
        step(state, index, Stages.of(SAMPLING_PARAMS), logits, BANNED.to(DEVICE))


def test_reading_would_be_noticed() -> None:
    values = torch.tensor([1, 0])
    for read in (lambda: values[0].item(), lambda: values.nonzero(), lambda: values[values > 0]):
        with NothingIsRead(), pytest.raises(AssertionError):
            read()


def test_shapes_of_a_step_follow_from_the_layout_alone() -> None:
    """On the meta device there are no values to read."""
    layout = LAYOUTS[3]
    index, real = StepIndex.of(LINES, layout, "meta"), state_of(2)
    meta = StepState(
        block_size=real.block_size,
        window=real.window,
        batch_params=type(real.batch_params)(
            vocab_size=V,
            room=real.batch_params.room,
            **{n: t.to("meta") for n, t in tensors_of(real.batch_params).items()},
        ),
        **{name: tensor.to("meta") for name, tensor in tensors_of(real).items()},
    )
    result = step(meta, index, Stages.of(SAMPLING_PARAMS), torch.empty(V, V, device="meta"), BANNED.to("meta"))
    assert result.shape == (LINES, reference.result_width(4))


def test_a_line_goes_on_alone_as_in_company() -> None:
    layout, logits = LAYOUTS[3], torch.randn(V, V, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    together = state_of(3)
    index, stages = StepIndex.of(LINES, layout, DEVICE), Stages.of(SAMPLING_PARAMS)
    results = [step(together, index, stages, logits, BANNED.to(DEVICE)) for _ in range(4)]
    for line in range(LINES):
        alone = state_of(3, lines=[line])
        index = StepIndex.of(1, layout, DEVICE)
        for result in results:
            assert torch.equal(step(alone, index, stages, logits, BANNED.to(DEVICE))[0], result[line])


def test_a_bucket_shares_the_lines_it_has() -> None:
    state = state_of(4)
    bucket = state.first(2)
    bucket.root[1] = 33
    bucket.batch_params.key[0] = 7
    assert (int(state.root[1]), int(state.batch_params.key[0])) == (33, 7)
    index = StepIndex.of(2, LAYOUTS[2], DEVICE)
    same(reference.rows(bucket, index), reference.rows(state_with(state, 2), index))


def state_with(state: StepState, num_lines: int) -> StepState:
    copied = {name: tensor[:num_lines].clone() for name, tensor in tensors_of(state).items()}
    return StepState(block_size=state.block_size, window=state.window, batch_params=state.batch_params, **copied)


@pytest.mark.parametrize(
    ("samples", "num_left", "expected"),
    [
        ([5, 6, 7], 9, (2, [5, 6, 7], 3, EndCode.NONE)),
        ([5, 20, 7], 9, (1, [5, 20, 0], 2, EndCode.EOS)),  # the draft there is 6: the bonus ends it
        ([5, 6, 21], 9, (2, [5, 6, 21], 3, EndCode.STOP_ID)),
        ([5, 6, 7], 2, (2, [5, 6, 0], 2, EndCode.LENGTH)),
        ([5, 6, 20], 3, (2, [5, 6, 20], 3, EndCode.EOS)),  # on the last allowed place it is still what ended it
        ([8, 6, 7], 1, (0, [8, 0, 0], 1, EndCode.LENGTH)),
    ],
)
def test_the_run_is_cut_at_its_first_end(
    samples: list[int], num_left: int, expected: tuple[int, list[int], int, EndCode]
) -> None:
    one = torch.tensor([1])
    verification = verify_sequences(
        torch.tensor([samples]), torch.ones(1, 3, dtype=torch.bool), torch.tensor([[5, 6]]), 2 * one, one.bool(),
        num_left * one, torch.tensor([[20, 21, -1]]), one,
    )  # fmt: skip
    found = (
        verification.accepted.item(),
        verification.emitted[0].tolist(),
        verification.lengths.item(),
        verification.end.item(),
    )
    assert found == expected


def test_a_batch_index_without_room_for_counts_or_words_refuses_sampling_params_that_need_them() -> None:
    state = StepState.empty(
        1, max_drafts=1, max_pages=1, block_size=4, window=8, vocab_size=V, history=False, counts=False
    )
    for sampling_params in (SamplingParams(presence_penalty=1.0), SamplingParams(bad_words=((3,),))):
        with pytest.raises(ValueError, match="Penalties need a state with counts"):
            state.put(0, StateAdmission([1], 1, [0], sampling_params, 3, [], [], 1, 1))


def test_every_accepted_length_in_one_batch() -> None:
    drafts = torch.tensor([[1, 2, 3]] * 5)
    samples = torch.tensor([[9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4], [1, 2, 3, 4], [9, 9, 9, 9]])
    verification = verify(samples, drafts, torch.tensor([3, 3, 3, 3, 3]))
    assert verification.accepted.tolist() == [0, 1, 2, 3, 0]
    assert verification.lengths.tolist() == [1, 2, 3, 4, 1]
    assert verification.emitted.tolist() == [[9, 0, 0, 0], [1, 9, 0, 0], [1, 2, 9, 0], [1, 2, 3, 4], [9, 0, 0, 0]]


def test_drafts_beyond_the_live_ones_never_count() -> None:
    drafts = torch.tensor([[1, 2], [1, 2], [1, 2]])
    samples = torch.tensor([[1, 2, 3]] * 3)
    assert verify(samples, drafts, torch.tensor([0, 1, 2])).accepted.tolist() == [0, 1, 2]


def test_agreement_behind_a_disagreement_does_not_count() -> None:
    assert verify(torch.tensor([[5, 2, 3]]), torch.tensor([[1, 2]]), torch.tensor([2])).accepted.tolist() == [0]


def test_without_drafts_the_sample_is_the_bonus() -> None:
    verification = verify(torch.tensor([[7], [8]]), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    assert (verification.accepted.tolist(), verification.emitted.tolist()) == ([0, 0], [[7], [8]])


def test_one_sequence_on_the_host_is_judged_as_it_is_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randint(0, 2, (100, 5), generator=generator)
    drafts = torch.randint(0, 2, (100, 4), generator=generator)
    live = torch.randint(0, 5, (100,), generator=generator)
    accepted = verify(samples, drafts, live).accepted.tolist()
    assert set(accepted) == {0, 1, 2, 3, 4}
    for of_row, chosen, drafted, count in zip(accepted, samples.tolist(), drafts.tolist(), live.tolist(), strict=True):
        assert num_accepted(chosen[: count + 1], drafted[:count]) == of_row


def test_the_recurrent_head_begins_at_the_row_that_sampled_the_last_token() -> None:
    state, index = state_of(1), StepIndex.of(LINES, Layout(2, (0, 0, 0), head_drafts=3), DEVICE)
    state.max_drafts.copy_(torch.arange(LINES) % 3 + 2)
    state.num_left.copy_(torch.arange(LINES) + 2)
    lengths, end = torch.arange(LINES, device=DEVICE) % 4, torch.zeros(LINES, dtype=torch.int64, device=DEVICE)
    end[1] = int(EndCode.EOS)
    emitted = torch.zeros(LINES, 3, dtype=torch.int64, device=DEVICE)
    with NothingIsRead():
        found = reference.bonus_rows(state, index, StepVerification(lengths - 1, emitted, lengths, end))
    for line in range(LINES):
        length = line % 4
        assert found.rows[line].tolist() == [3 * line + max(length - 1, 0)]
        most = min(3, line % 3 + 2, line + 2 - length - 1) if length and line != 1 else 0
        assert found.count[line] == max(most, 0)
        assert found.first[line] == (most > 0)
    assert index.most_drafts == 3
