"""Expected accepted drafts of a step, E-1, over held-out rows: teacher-forced, at several temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from space_train.data.train_batch import Texts, anchor_rows, within_documents
from space_train.networks.trainee import Trainee

EVERY = 8  # tokens from one anchor to the next
RESAMPLES = 1000


@dataclass(frozen=True)
class ExpectedAccepted:
    """E-1 at one temperature, with a 95 % bootstrap interval over the rows of text."""

    temperature: float
    mean: float
    low: float
    high: float
    by_depth: tuple[float, ...]  # mean acceptance of draft 1, 2, …, whatever comes before it
    num_groups: int


@torch.no_grad()
def expected_accepted(
    trainee: Trainee, held_out: Texts, temperatures: Sequence[float] = (0.0, 0.7, 1.0), *, seed: int = 0
) -> list[ExpectedAccepted]:
    """Return Σ_j Π_{i≤j} of the acceptances, averaged over groups, for each temperature.

    Draft j is accepted with Σ min(p, q), both at the temperature; at 0 if both have the same best token. The draft
    head, if there is one, gets the text's token before its target. Groups of which a mask has no target are left out.
    """
    plan = trainee.plan
    sums = torch.zeros(len(temperatures), len(held_out.ids), dtype=torch.float64)
    depths = torch.zeros(len(temperatures), plan.num_masks, dtype=torch.float64)
    counts = torch.zeros(len(held_out.ids), dtype=torch.float64)
    for row in range(len(held_out.ids)):
        texts = held_out.part(slice(row, row + 1))
        places = [(m, plan.num_masks) for m in range(2, texts.ids.shape[1] - plan.num_masks - 1, EVERY)]
        anchors = anchor_rows([places], texts.is_target.cpu().numpy()).to(texts.ids.device)
        anchors = within_documents(anchors, texts)
        real, masks = trainee.hidden_rows(texts, anchors)
        source = anchors.positions
        student = masks
        if trainee.head is not None:
            student = trainee.head(masks, trainee.decoder.embed(texts.ids.gather(1, source)))
        whole = anchors.learns.view(-1, plan.num_masks).all(1)
        counts[row] = float(whole.sum())
        shares = _acceptances(trainee, real[0, source[0]], student[0], temperatures).double().cpu()
        shares = shares.view(len(temperatures), -1, plan.num_masks)[:, whole.cpu()]
        sums[:, row] = shares.cumprod(2).sum((1, 2))
        depths += shares.sum(1)
    return [
        _with_interval(t, total.numpy(), counts.numpy(), depth, seed)
        for t, total, depth in zip(temperatures, sums, depths, strict=True)
    ]


def _acceptances(trainee: Trainee, teacher: Tensor, student: Tensor, temperatures: Sequence[float]) -> Tensor:
    """[T, M] acceptance of each row's draft, from hidden rows [M, E]."""
    found = []
    for some, other in zip(torch.split(teacher, 256), torch.split(student, 256), strict=True):
        p, q = trainee.decoder.logits(some), trainee.decoder.logits(other)
        shares = [
            torch.minimum((p / t).softmax(-1), (q / t).softmax(-1)).sum(-1)
            if t
            else (p.argmax(-1) == q.argmax(-1)).float()
            for t in temperatures
        ]
        found.append(torch.stack(shares))
    return torch.cat(found, dim=1)


def _with_interval(
    temperature: float, sums: np.ndarray, counts: np.ndarray, depths: Tensor, seed: int
) -> ExpectedAccepted:
    drawn = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / np.maximum(counts[drawn].sum(1), 1)
    low, high = np.quantile(means, (0.025, 0.975))
    most = max(float(counts.sum()), 1.0)
    by_depth = tuple((depths / most).tolist())
    return ExpectedAccepted(temperature, float(sums.sum() / most), float(low), float(high), by_depth, int(counts.sum()))
