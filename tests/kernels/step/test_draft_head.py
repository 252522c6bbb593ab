"""The draft head gives each sequence of a batch the drafts that it gives the sequence alone."""

import math

import pytest
import torch
from space_kernels.sampling.sampler import sample_rows
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.sampling.sampling_rows import SamplingRow
from space_kernels.step.draft_head import DraftHeadForm, SamplingColumns, propose, sample_candidates
from torch.nn import functional as F

HIDDEN, VOCAB, K, M = 8, 40, 3, 12


def tensors(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LAWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(key=5, temperature=0.8),
    SamplingParams(key=6, temperature=1.3, top_k=4),
    SamplingParams(key=7, temperature=0.9, top_p=0.6, min_p=0.05),
]


@pytest.mark.parametrize("form", DraftHeadForm)
def test_many_sequences_at_once_equal_one_by_one(form: DraftHeadForm) -> None:
    S = len(LAWS)
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
        torch.tensor([sampling_params.key for sampling_params in LAWS]),
    )

    def run(at: slice) -> torch.Tensor:
        return propose(
            hidden[at], ids[at], offsets[at], bonus[at], positions[at], keys[at],
            SamplingColumns.of(LAWS[at], hidden.device),
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
    logits = tensors(9, len(LAWS), VOCAB)
    ids = torch.arange(VOCAB).expand(len(LAWS), VOCAB)
    keys, positions = torch.tensor([sampling_params.key for sampling_params in LAWS]), torch.tensor([1, 2, 3, 4])
    drafts = sample_candidates(logits, ids, SamplingColumns.of(LAWS, logits.device), keys, positions)
    rows = [SamplingRow(sampling_params, ids=(0,) * (n + 1), num_prompt=1) for n, sampling_params in enumerate(LAWS)]
    assert drafts.tolist() == sample_rows(logits.clone(), rows, torch.tensor([], dtype=torch.int64)).ids.tolist()
