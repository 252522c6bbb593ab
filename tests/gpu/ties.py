"""Where two texts of one request differ, and whether rounding may decide there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from greedy_oracle import TIE_FACTOR, GreedyOracle
from space_kernels.sampling.noise import gumbel, request_key
from space_proto import worker_pb2 as pb


@dataclass(frozen=True)
class Difference:
    """A position at which two texts have different ids."""

    where: str
    position: int  # absolute
    ours: int | None  # None: our text had ended
    theirs: int | None
    gap: float = float("inf")  # between the two values that are compared, noise included, in the oracle
    bound: float = 0.0

    @property
    def is_tie(self) -> bool:
        """Whether rounding may have decided."""
        return abs(self.gap) < self.bound

    def __str__(self) -> str:
        return (
            f"{self.where}, position {self.position}: {self.ours} and {self.theirs}; they are {self.gap:.3g} apart, "
            f"a tie is below {self.bound:.3g}"
        )


@dataclass
class Comparison:
    """The differences of some texts."""

    num_texts: int = 0
    num_tokens: int = 0
    ties: list[Difference] = field(default_factory=list)
    faults: list[Difference] = field(default_factory=list)

    def add(self, found: Sequence[Difference], num_tokens: int) -> None:
        """Add one text."""
        self.num_texts += 1
        self.num_tokens += num_tokens
        self.ties += [one for one in found if one.is_tie]
        self.faults += [one for one in found if not one.is_tie]


class TieRule:
    """Measures how near two choices were: in transformers' float32 logits of the same weights."""

    def __init__(self, oracle: GreedyOracle, dtype: torch.dtype) -> None:
        """`dtype` is the one that the texts were computed in."""
        self._oracle, self._unit = oracle, TIE_FACTOR * torch.finfo(dtype).eps

    def difference(self, where: str, known: Sequence[int], ours: int, theirs: int, sampling: pb.Sampling) -> Difference:
        """Behind the ids `known` one text has `ours`, the other `theirs`. Of `sampling` seed and temperature count."""
        logits = self._oracle.logits(known).double()
        bound = self._unit * float(logits[logits.isfinite()].abs().max())
        value = logits
        if sampling.temperature > 0.0:
            key = torch.tensor([request_key(sampling.seed, 0)])
            noise = gumbel(key, torch.tensor([len(known)]), torch.arange(len(logits))[None])[0]
            value = logits / sampling.temperature + noise
            bound /= sampling.temperature
        return Difference(where, len(known), ours, theirs, float(value[theirs] - value[ours]), bound)


def differences(
    where: str,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs_behind: Callable[[Sequence[int]], Sequence[int]],
    rule: TieRule,
    sampling: pb.Sampling,
) -> list[Difference]:
    """Every position at which `ours` differs from the other text, which goes on from our id behind each.

    `theirs_behind(ids)`: the other text behind these ids of ours, as long as ours is.
    """
    found: list[Difference] = []
    done = 0
    while done < len(ours):
        rest, theirs = ours[done:], theirs_behind(ours[:done])
        same = next((i for i, (a, b) in enumerate(zip(rest, theirs, strict=False)) if a != b), None)
        if same is None:
            if len(rest) != len(theirs):
                shorter = min(len(rest), len(theirs))
                ends = [text[shorter] if shorter < len(text) else None for text in (rest, theirs)]
                found.append(Difference(where, len(prompt) + done + shorter, ends[0], ends[1]))
            break
        known = [*prompt, *ours[: done + same]]
        found.append(rule.difference(where, known, rest[same], theirs[same], sampling))
        done += same + 1
    return found
