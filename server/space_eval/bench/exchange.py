"""One request of the load, and its streamed answer as the client saw it: which tokens came when."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class LoadRequest:
    """One request of the load."""

    number: int  # within its round
    prompt: str | tuple[int, ...]  # text or token ids
    max_tokens: int
    arrival: float = 0.0  # seconds after the round's begin; open loop only


@dataclass(frozen=True)
class TokenEvent:
    """One event of a stream that carried tokens."""

    seconds: float  # since the request began
    num_tokens: int
    token_ids: tuple[int, ...] = ()  # empty if the server sends none
    num_characters: int = 0


@dataclass
class Exchange:
    """One request and its answer, whole or as far as it came.

    A request begins when it is sent; in open loop when it was due, so that a client that falls behind hides nothing.
    """

    started: float = 0.0  # seconds after the round's begin
    late: float = 0.0  # seconds between begin and sending
    events: list[TokenEvent] = field(default_factory=list)
    text: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)  # the `spaceserve` object
    num_prompt_tokens: int | None = None  # as the server counts
    num_counted: int | None = None  # tokens of the answer, as the server counts
    seconds: float = 0.0  # from the begin to the end of the stream
    finished: bool = False  # the stream came to its own end
    error: str | None = None  # the status of a refusal, or "broken"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id_ for event in self.events for id_ in event.token_ids)

    @property
    def num_tokens(self) -> int:
        return sum(event.num_tokens for event in self.events)

    @property
    def first_token_seconds(self) -> float:
        return self.events[0].seconds

    @property
    def event_gaps(self) -> list[float]:
        """Seconds between events: how long the reader saw nothing new."""
        return [after.seconds - before.seconds for before, after in itertools.pairwise(self.events)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds per token after the first event: an event's gap is shared among its tokens, once for each."""
        gaps: list[float] = []
        for gap, event in zip(self.event_gaps, self.events[1:], strict=True):
            gaps += [gap / event.num_tokens] * event.num_tokens
        return gaps

    @property
    def seconds_per_token(self) -> float:
        """The mean after the first event; 0 if nothing came after it."""
        num_tokens = self.num_tokens - self.events[0].num_tokens
        return (self.events[-1].seconds - self.events[0].seconds) / num_tokens if num_tokens else 0.0

    def share_counted_tokens(self) -> None:
        """Share the tokens that the server has counted among events that came without token ids."""
        if self.num_counted is None or self.token_ids or not self.events:
            return
        counts = shared(self.num_counted, [event.num_characters for event in self.events])
        pairs = zip(self.events, counts, strict=True)
        self.events = [replace(event, num_tokens=count) for event, count in pairs if count]


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, at least 1 for each if the total allows; they sum to it."""
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
