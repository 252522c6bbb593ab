"""The draft head gives each sequence of a batch the drafts that it gives the sequence alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from space_kernels.build import cpu_library
from space_kernels.linear.row_table import RowTable
from space_kernels.sampling.sampler import sample_rows
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRow
from space_kernels.step.draft_head import (
    DRAFT_SHARPNESS,
    CompiledDraftHead,
    DraftHeadForm,
    SamplingColumns,
    propose,
    sample_candidates,
)
from torch.nn import functional as F

HIDDEN, VOCAB, K, M = 8, 40, 3, 12


def tensors(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SAMPLING_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(key=5, temperature=0.8),
    SamplingParams(key=6, temperature=1.3, top_k=4),
    SamplingParams(key=7, temperature=0.9, top_p=0.6, min_p=0.05),
]


@pytest.mark.parametrize("form", DraftHeadForm)
def test_many_sequences_at_once_equal_one_by_one(form: DraftHeadForm) -> None:
    S = len(SAMPLING_PARAMS)
    E, w1, w2 = tensors(1, VOCAB, HIDDEN), tensors(2, 6, form.num_inputs(HIDDEN)), tensors(3, HIDDEN, 6)
    hidden = tensors(4, S, K, HIDDEN)
    ids = torch.stack(
        [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(n))[:M].sort().values for n in range(S * K)]
    ).view(S, K, M)
    offsets = torch.zeros(S, K, M)
    offsets[:, :, 3] = -math.inf
    bonus, positions, keys = (
        torch.arange(S),
        torch.arange(S) * 10,
        torch.tensor([sampling_params.key for sampling_params in SAMPLING_PARAMS]),
    )

    def run(at: slice) -> torch.Tensor:
        return propose(
            hidden[at], ids[at], offsets[at], bonus[at], positions[at], keys[at],
            SamplingColumns.of(SAMPLING_PARAMS[at], hidden.device),
            w1=w1, w2=w2, embedding_scale=2.0, form=form,
            embed=lambda chosen: E[chosen],
            logits_of=lambda h, of: (E[of] * h[:, None]).sum(-1),
        )  # fmt: skip

    together = run(slice(0, S))
    assert torch.equal(together, torch.cat([run(slice(n, n + 1)) for n in range(S)]))

    # The greedy sequence, by the equation of SPACE §4.
    previous = 0
    for j in range(K):
        h = hidden[0, j]
        if form is DraftHeadForm.MLP:
            h = h + w2 @ F.silu(w1 @ torch.cat([h, 2.0 * E[previous]]))
        else:
            h = h + w2 @ (w1 @ (2.0 * E[previous]))
        logits = E[ids[0, j]] @ h + offsets[0, j]
        previous = int(ids[0, j][logits.argmax()])
        assert together[0, j] == previous


def test_with_every_id_a_candidate_the_choice_is_the_verdicts() -> None:
    """Of logits times DRAFT_SHARPNESS."""
    ids, keys = (
        torch.arange(VOCAB).expand(len(SAMPLING_PARAMS), VOCAB),
        torch.tensor([params.key for params in SAMPLING_PARAMS]),
    )
    columns, banned = SamplingColumns.of(SAMPLING_PARAMS, ids.device), torch.tensor([], dtype=torch.int64)
    num_changed = 0
    for seed in range(40):
        logits, positions = tensors(seed, len(SAMPLING_PARAMS), VOCAB), torch.tensor([1, 2, 3, 4])
        drafts = sample_candidates(logits, ids, columns, keys, positions)
        rows = [SamplingRow(params, ids=(0,) * (n + 1), num_prompt=1) for n, params in enumerate(SAMPLING_PARAMS)]
        sharper = logits * DRAFT_SHARPNESS
        assert drafts.tolist() == sample_rows(sharper, rows, banned).ids.tolist()
        plain = sample_rows(logits.clone(), rows, banned).ids
        assert drafts[0] == plain[0], "greedy"
        num_changed += int((drafts != plain).sum())
    assert num_changed


WIDTH, INNER, VOCABULARY, CANDIDATES = 64, 48, 300, 40
GREEDY, WARM, HOT = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8), SamplingParams(temperature=2.0)


def drawn(form: DraftHeadForm) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(shape[-1] ** -0.5).bfloat16()

    return {
        "w1": normal(INNER, form.num_inputs(WIDTH)),
        "w2": normal(WIDTH, INNER) * 4,
        "embedding": normal(VOCABULARY, WIDTH) * 8,
        "output": normal(VOCABULARY, WIDTH) * 8,
    }


def both(
    library: cpu_library.CpuLibrary, form: DraftHeadForm, batch_params: list[SamplingParams], masks: int
) -> tuple[Any, Any]:
    """Return the drafts of the compiled head and of the reference, [S, K] each."""
    weights = drawn(form)
    generator = torch.Generator().manual_seed(masks)
    hidden = torch.randn(len(batch_params), masks, WIDTH, generator=generator).bfloat16()
    shuffled = torch.rand(len(batch_params) * masks, VOCABULARY, generator=generator).argsort(dim=1)[:, :CANDIDATES]
    ids = shuffled.sort(dim=1).values.view(len(batch_params), masks, CANDIDATES)
    offsets = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -torch.inf, 0.0)
    numbers = torch.arange(len(batch_params), dtype=torch.int64)
    columns = SamplingColumns.of(batch_params, numbers.device)
    given = hidden, ids, offsets, numbers + 5, 7 * numbers + 100, numbers * 1234567, columns
    tables = {name: RowTable.of(weights[name]) for name in ("embedding", "output")}
    compiled = CompiledDraftHead(library, **(weights | tables), embedding_scale=2.0, form=form)
    wanted = propose(
        *given,
        w1=weights["w1"],
        w2=weights["w2"],
        embedding_scale=2.0,
        form=form,
        embed=lambda chosen: F.embedding(chosen, weights["embedding"]),
        logits_of=lambda rows, of: (F.embedding(of, weights["output"]).float() @ rows.float().unsqueeze(-1)).squeeze(
            -1
        ),
    )
    return compiled.propose(*given), wanted


@pytest.mark.parametrize("form", list(DraftHeadForm))
@pytest.mark.parametrize("batch_params", [[GREEDY] * 40, [WARM] * 40, [GREEDY, WARM, HOT] * 13, [WARM]])
@pytest.mark.parametrize("masks", [1, 3])
def test_it_chooses_as_the_reference_does(
    library: cpu_library.CpuLibrary, form: DraftHeadForm, batch_params: list[SamplingParams], masks: int
) -> None:
    found, wanted = both(library, form, batch_params, masks)
    assert found.shape == (len(batch_params), masks)
    same = (found == wanted).all(dim=1).float().mean()  # activations are rounded once less: a near tie may go otherwise
    assert same >= 0.9
    if len(batch_params) > 1:
        assert len(found.unique()) > masks


def test_it_keeps_the_candidates_that_the_reference_keeps(library: cpu_library.CpuLibrary) -> None:
    truncated = [
        GREEDY,
        SamplingParams(temperature=20.0, top_k=3, key=1),
        SamplingParams(temperature=20.0, top_p=0.6, key=2),
        SamplingParams(temperature=20.0, min_p=0.5, key=3),
        SamplingParams(temperature=20.0, top_k=6, top_p=0.7, min_p=0.1, key=4),
    ]
    found, wanted = both(library, DraftHeadForm.MLP, truncated * 16, 2)
    assert (found == wanted).all(dim=1).float().mean() >= 0.9
    free, _ = both(
        library, DraftHeadForm.MLP, [replace(one, top_k=0, top_p=1.0, min_p=0.0) for one in truncated] * 16, 2
    )
    changed = (found != free).any(dim=1).view(16, len(truncated)).any(dim=0).tolist()
    assert changed == [False, True, True, True, True]


def test_other_dtypes_are_left_to_the_reference() -> None:
    weights = drawn(DraftHeadForm.MLP)
    assert CompiledDraftHead.takes(**weights)
    assert not CompiledDraftHead.takes(**{name: tensor.float() for name, tensor in weights.items()})
