"""One streamed answer as its client saw it: which tokens came when."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Piece:
    """One event that carried tokens."""

    seconds: float  # since the request began
    num_tokens: int
    token_ids: tuple[int, ...] = ()  # empty where the server tells none
    num_characters: int = 0


@dataclass
class Exchange:
    """One request and its answer, whole or as far as it came.

    A request begins when it is sent; in open loop when it was due, so that a client that falls behind hides nothing.
    """

    started: float = 0.0  # seconds after the round's begin
    late: float = 0.0  # seconds between begin and sending
    pieces: list[Piece] = field(default_factory=list)
    text: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)  # the `spaceserve` object
    num_prompt_tokens: int | None = None  # as the server counts
    num_counted: int | None = None  # tokens of the answer, as the server counts
    seconds: float = 0.0  # from the begin to the end of the stream
    finished: bool = False  # the stream came to its own end
    error: str | None = None  # the status of a refusal, or "broken"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id_ for piece in self.pieces for id_ in piece.token_ids)

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def first_token_seconds(self) -> float:
        return self.pieces[0].seconds

    @property
    def event_gaps(self) -> list[float]:
        """Seconds between events: how long the reader saw nothing new."""
        return [after.seconds - before.seconds for before, after in itertools.pairwise(self.pieces)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds per token after the first event: an event's gap, once for each of its tokens, shared among them."""
        gaps: list[float] = []
        for gap, piece in zip(self.event_gaps, self.pieces[1:], strict=True):
            gaps += [gap / piece.num_tokens] * piece.num_tokens
        return gaps

    @property
    def seconds_per_token(self) -> float:
        """The mean after the first event; 0 where nothing came after it."""
        num_tokens = self.num_tokens - self.pieces[0].num_tokens
        return (self.pieces[-1].seconds - self.pieces[0].seconds) / num_tokens if num_tokens else 0.0

    def settle(self) -> None:
        """Once the server has said how many tokens it sent, share them among events whose tokens it did not tell."""
        if self.num_counted is None or self.token_ids or not self.pieces:
            return
        counts = shared(self.num_counted, [piece.num_characters for piece in self.pieces])
        told = zip(self.pieces, counts, strict=True)
        self.pieces = [replace(piece, num_tokens=count) for piece, count in told if count]


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, at least 1 for each where the total allows; they sum to it."""
    if total < len(weights):
        return [1] * total + [0] * (len(weights) - total)
    if not any(weights):
        weights = [1] * len(weights)
    ends, so_far = [0], 0
    for place, weight in enumerate(weights, start=1):
        so_far += weight
        fair = total * so_far // sum(weights)
        ends.append(min(max(fair, ends[-1] + 1), total - (len(weights) - place)))
    return [after - before for before, after in itertools.pairwise(ends)]
