"""The compiled recurrent head drafts what its definition drafts, for each of several sequences and with any threads."""

from __future__ import annotations

import pytest
import torch
from space_kernels.build import cpu_library
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.row_table import RowTable
from space_kernels.step.recurrent_head import CompiledRecurrentHead, next_state
from torch import Tensor
from torch.nn import functional as F

HIDDEN, INNER, VOCAB, S, K, SCALE = 64, 48, 200, 5, 4, 2.0
IDS = torch.tensor([0, *range(3, VOCAB, 2)])  # the draft vocabulary


def tensors(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


W1, W2 = tensors(1, INNER, 2 * HIDDEN) / HIDDEN**0.5, tensors(2, HIDDEN, INNER) / INNER**0.5
E, OUTPUT = tensors(3, VOCAB, HIDDEN), tensors(4, VOCAB, HIDDEN)
STATES, PREVIOUS = tensors(5, S, HIDDEN), torch.tensor([7, 0, 7, VOCAB - 1, 12])


def head(ids: Tensor | None, *, padding: int = 0, weights: str = "plain") -> CompiledRecurrentHead:
    """`padding`: zero rows behind those of the output."""
    library = cpu_library.cpu_library()
    if library is None:
        pytest.skip("there are no compiled operations here")
    rows = OUTPUT if ids is None else OUTPUT[ids]
    output = CompiledLinear(library, F.pad(rows, (0, 0, 0, padding)), None, wide=True, weights=weights)
    first, second = (CompiledLinear(library, weight, None) for weight in (W1, W2))
    return CompiledRecurrentHead(
        library, first, second, RowTable.of(E), output, ids, num_ids=len(rows), embedding_scale=SCALE
    )


def by_definition(state: Tensor, previous: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the next state [hidden] and the logits in float32, from weights that are widened."""
    token = E[previous][None].float()
    state = next_state(state[None].float(), token, lambda x: x @ W1.float().T, lambda x: x @ W2.float().T, SCALE)
    rows = OUTPUT if ids is None else OUTPUT[ids]
    return state[0], (state @ rows.float().T)[0]


@pytest.mark.parametrize("padding", [0, 13])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole vocabulary", "draft vocabulary"])
def test_each_draft_is_the_likeliest_behind_those_before_it(ids: Tensor | None, padding: int) -> None:
    drafts = head(ids, padding=padding).draft(STATES, PREVIOUS, K)
    assert drafts.shape == (S, K)
    for sequence, made in enumerate(drafts.tolist()):
        state, previous = STATES[sequence], int(PREVIOUS[sequence])
        for draft in made:
            state, logits = by_definition(state, previous, ids)
            place = draft if ids is None else int((ids == draft).nonzero()[0, 0])
            # states are rounded to 8 bits: logits, sums over HIDDEN, are off by some hundredths of their size
            assert logits[place] >= logits.max() - 0.05 * logits.std()
            previous = draft
    assert len({tuple(made) for made in drafts.tolist()}) > 1


@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_s_drafts_do_not_depend_on_the_others(threads: int, weights: str) -> None:
    compiled, before = head(IDS, weights=weights), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = compiled.draft(STATES, PREVIOUS, K)
        alone = [compiled.draft(STATES[n : n + 1], PREVIOUS[n : n + 1], K) for n in range(S)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))


def test_one_at_a_time_makes_the_same_drafts_and_leaves_its_argument() -> None:
    compiled, state, previous, kept = head(IDS), STATES, PREVIOUS, STATES.clone()
    drafts = []
    for _ in range(K):
        state, logits = compiled.advance(state, previous)
        assert logits.shape == (S, len(IDS))
        previous = IDS[logits.argmax(dim=1)]
        drafts.append(previous)
    assert torch.equal(torch.stack(drafts, dim=1), compiled.draft(STATES, PREVIOUS, K))
    assert torch.equal(STATES, kept)
    wanted, _ = by_definition(STATES[0], int(PREVIOUS[0]), IDS)
    once, _ = compiled.advance(STATES, PREVIOUS)
    # five roundings to 8 bits on the way: the embedding, both products' inputs, silu and the sum
    assert torch.allclose(once[0].float(), wanted, rtol=0.03, atol=0.03)


def test_of_equal_logits_the_lower_id_is_drafted() -> None:
    library = cpu_library.cpu_library()
    if library is None:
        pytest.skip("there are no compiled operations here")
    output = CompiledLinear(library, torch.ones(32, HIDDEN, dtype=torch.bfloat16), None, wide=True)
    first, second = (CompiledLinear(library, weight, None) for weight in (W1, W2))
    ids = torch.arange(4, 36)
    compiled = CompiledRecurrentHead(
        library, first, second, RowTable.of(E), output, ids, num_ids=32, embedding_scale=SCALE
    )
    assert compiled.draft(STATES, PREVIOUS, 2).tolist() == [[4, 4]] * S
