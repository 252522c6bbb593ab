"""The compiled draft head proposes the same drafts as its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from space_kernels.build import cpu_library
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.step.draft_head import CompiledDraftHead, DraftHeadForm, SamplingColumns, propose
from torch.nn import functional as F

HIDDEN, INNER, VOCABULARY, CANDIDATES = 64, 48, 300, 40
GREEDY, WARM, HOT = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8), SamplingParams(temperature=2.0)


def drawn(form: DraftHeadForm) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(shape[-1] ** -0.5).bfloat16()

    return {
        "w1": normal(INNER, form.num_inputs(HIDDEN)),
        "w2": normal(HIDDEN, INNER) * 4,
        "embedding": normal(VOCABULARY, HIDDEN) * 8,
        "output": normal(VOCABULARY, HIDDEN) * 8,
    }


def both(
    library: cpu_library.CpuLibrary, form: DraftHeadForm, batch_params: list[SamplingParams], masks: int
) -> tuple[Any, Any]:
    """Return the drafts of the compiled head and of the reference, [S, K] each."""
    weights = drawn(form)
    generator = torch.Generator().manual_seed(masks)
    hidden = torch.randn(len(batch_params), masks, HIDDEN, generator=generator).bfloat16()
    shuffled = torch.rand(len(batch_params) * masks, VOCABULARY, generator=generator).argsort(dim=1)[:, :CANDIDATES]
    ids = shuffled.sort(dim=1).values.view(len(batch_params), masks, CANDIDATES)
    offsets = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -torch.inf, 0.0)
    numbers = torch.arange(len(batch_params), dtype=torch.int64)
    columns = SamplingColumns.of(batch_params, numbers.device)
    given = hidden, ids, offsets, numbers + 5, 7 * numbers + 100, numbers * 1234567, columns
    compiled = CompiledDraftHead(library, **weights, embedding_scale=2.0, form=form)
    assert compiled.obeys(given[-1])
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


def test_laws_that_truncate_are_left_to_the_reference() -> None:
    sampling_params = SamplingParams(temperature=1.0, top_k=5)
    assert not CompiledDraftHead.obeys(SamplingColumns.of([sampling_params], torch.device("cpu")))


def test_other_dtypes_are_left_to_the_reference() -> None:
    weights = drawn(DraftHeadForm.MLP)
    assert CompiledDraftHead.takes(**weights)
    assert not CompiledDraftHead.takes(**{name: tensor.float() for name, tensor in weights.items()})
