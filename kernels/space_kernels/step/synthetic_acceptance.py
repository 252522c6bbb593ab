"""Drafts by decree, on the device: what a draft is replaced by where the text that follows is known beforehand.

A measuring aid: `space_server.speculation.synthetic_acceptance` says what it is for, and makes what the lines are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.sampling.sampling_tensors import send
from space_kernels.step.step_verification import StepVerification


@dataclass(frozen=True, slots=True)
class SyntheticAcceptanceTensors:
    """What S lines are told of the text behind their prompts, by place. Tensors keep their addresses."""

    chances: Tensor  # [D] float64: that a draft from mask 1 .. D comes true; a deeper mask has the last
    ids: Tensor  # [S, N] int32: the text
    luck: Tensor  # [S, N] float32: a draft comes true where this lies below its chance
    others: Tensor  # [S, N] int32: what a draft is that does not
    counts: Tensor  # [S] int64: places that are known

    @classmethod
    def empty(
        cls, num_sequences: int, num_places: int, chances: Sequence[float], *, device: torch.device | str = "cpu"
    ) -> SyntheticAcceptanceTensors:
        """Room for so many lines and places; nothing is known."""

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
        """The first lines, as views."""
        ids, luck, others, counts = (of[:num_sequences] for of in (self.ids, self.luck, self.others, self.counts))
        return SyntheticAcceptanceTensors(self.chances, ids, luck, others, counts)

    def put(self, line: int, ids: Sequence[int], luck: Sequence[float], others: Sequence[int]) -> None:
        """Tell a line what follows its prompt; nothing, where that is empty."""
        count = len(ids)
        if count > self.num_places:
            raise ValueError(f"{count} places do not fit; a line has {self.num_places}.")
        if count:
            send(self.ids[line, :count], torch.tensor(list(ids), dtype=torch.int32))
            send(self.luck[line, :count], torch.tensor(list(luck), dtype=torch.float32))
            send(self.others[line, :count], torch.tensor(list(others), dtype=torch.int32))
        self.counts[line].fill_(count)

    def move(self, line: int, to: int) -> None:
        """Another line is told what this one was."""
        for tensor in (self.ids, self.luck, self.others, self.counts):
            tensor[to].copy_(tensor[line])


def synthetic_accept(
    synthetic_tensors: SyntheticAcceptanceTensors,
    num_known: Tensor,
    num_prompt: Tensor,
    verification: StepVerification,
    first: Tensor,
    drafts: Tensor,
) -> Tensor:
    """The drafts of the next step as they are decreed. [S, K'] int64

    num_known, num_prompt [S] int64: before the step; first [S] int64: mask number (from 1) of each first draft;
    drafts [S, K'] int64: what the masks made, which stays where a line is not told what follows, or where what the
    step emitted is not what it was told.
    """
    device = drafts.device
    begin = (num_known - num_prompt)[:, None]  # the place of what the step emitted
    last = max(synthetic_tensors.num_places - 1, 0)
    place = torch.arange(verification.emitted.shape[1], device=device)
    told = synthetic_tensors.ids.gather(1, (begin + place).clamp(max=last))
    follows = (told == verification.emitted) & (begin + place < synthetic_tensors.counts[:, None])
    agrees = (follows | (place >= verification.lengths[:, None])).all(dim=1)  # [S]

    number = torch.arange(drafts.shape[1], device=device)
    at = begin + verification.lengths[:, None] + number  # [S, K']
    known = agrees[:, None] & (at < synthetic_tensors.counts[:, None])
    at = at.clamp(max=last)
    depth = (first[:, None] + number).clamp(1, len(synthetic_tensors.chances))
    comes_true = synthetic_tensors.luck.gather(1, at) < synthetic_tensors.chances[depth - 1]
    synthetically_accepted = torch.where(
        comes_true, synthetic_tensors.ids.gather(1, at), synthetic_tensors.others.gather(1, at)
    )
    return torch.where(known, synthetically_accepted.to(drafts.dtype), drafts)
