"""Synthetic acceptance on the device: replaces drafts so that a chosen share of them is accepted, for benchmarks.
`space_server.speculation.synthetic_acceptance` explains the purpose and produces the known outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.sampling.device_sampling import send
from space_kernels.step.verification import StepVerification


@dataclass(frozen=True, slots=True)
class SyntheticAcceptanceTensors:
    """The known outputs of S sequences, by output position. Tensors are updated in place."""

    chances: Tensor  # [D] float64: acceptance probability of a draft from mask 1 .. D; deeper masks use the last
    ids: Tensor  # [S, N] int32: the known output
    luck: Tensor  # [S, N] float32: a draft is accepted where this is below its acceptance probability
    others: Tensor  # [S, N] int32: the draft where it is to be rejected
    counts: Tensor  # [S] int64: known output positions

    @classmethod
    def empty(
        cls, num_sequences: int, num_places: int, chances: Sequence[float], *, device: torch.device | str = "cpu"
    ) -> SyntheticAcceptanceTensors:
        """Allocate for `num_sequences` batch indexes and `num_places` output positions, with no known outputs."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        S, N = num_sequences, num_places
        return cls(
            chances=torch.tensor(list(chances), dtype=torch.float64, device=device),
            ids=zeros(S, N, dtype=torch.int32),
            luck=zeros(S, N, dtype=torch.float32),
            others=zeros(S, N, dtype=torch.int32),
            counts=zeros(S, dtype=torch.int64),
        )

    @property
    def num_places(self) -> int:
        """N."""
        return self.ids.shape[1]

    def first(self, num_sequences: int) -> SyntheticAcceptanceTensors:
        """Return views of the first batch indexes."""
        ids, luck, others, counts = (of[:num_sequences] for of in (self.ids, self.luck, self.others, self.counts))
        return SyntheticAcceptanceTensors(self.chances, ids, luck, others, counts)

    def put(self, batch_index: int, ids: Sequence[int], luck: Sequence[float], others: Sequence[int]) -> None:
        """Set the known output at a batch index; empty: none. Raises ValueError if it does not fit."""
        count = len(ids)
        if count > self.num_places:
            raise ValueError(f"{count} positions do not fit; the limit is {self.num_places}.")
        if count:
            send(self.ids[batch_index, :count], torch.tensor(list(ids), dtype=torch.int32))
            send(self.luck[batch_index, :count], torch.tensor(list(luck), dtype=torch.float32))
            send(self.others[batch_index, :count], torch.tensor(list(others), dtype=torch.int32))
        self.counts[batch_index].fill_(count)

    def move(self, batch_index: int, to: int) -> None:
        """Copy the known output to another batch index."""
        for tensor in (self.ids, self.luck, self.others, self.counts):
            tensor[to].copy_(tensor[batch_index])


def synthetic_accept(
    synthetic_tensors: SyntheticAcceptanceTensors,
    num_known: Tensor,
    num_prompt: Tensor,
    verification: StepVerification,
    first: Tensor,
    drafts: Tensor,
) -> Tensor:
    """Return the next step's drafts [S, K'] int64 with synthetic acceptance applied.

    num_known, num_prompt [S] int64: before the step; first [S] int64: mask number (from 1) of each first draft;
    drafts [S, K'] int64: the real drafts, kept where the output is unknown or differs from what the step emitted.
    """
    device = drafts.device
    begin = (num_known - num_prompt)[:, None]  # output position of the step's first emitted token
    last = max(synthetic_tensors.num_places - 1, 0)
    place = torch.arange(verification.emitted.shape[1], device=device)
    expected = synthetic_tensors.ids.gather(1, (begin + place).clamp(max=last))
    follows = (expected == verification.emitted) & (begin + place < synthetic_tensors.counts[:, None])
    agrees = (follows | (place >= verification.lengths[:, None])).all(dim=1)  # [S]

    number = torch.arange(drafts.shape[1], device=device)
    at = begin + verification.lengths[:, None] + number  # [S, K']
    known = agrees[:, None] & (at < synthetic_tensors.counts[:, None])
    at = at.clamp(max=last)
    depth = (first[:, None] + number).clamp(1, len(synthetic_tensors.chances))
    is_accepted = synthetic_tensors.luck.gather(1, at) < synthetic_tensors.chances[depth - 1]
    synthetically_accepted = torch.where(
        is_accepted, synthetic_tensors.ids.gather(1, at), synthetic_tensors.others.gather(1, at)
    )
    return torch.where(known, synthetically_accepted.to(drafts.dtype), drafts)
