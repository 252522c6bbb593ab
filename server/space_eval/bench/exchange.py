"""One request of the load, and its streamed answer with the arrival time of each token."""

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
    arrival: float = 0.0  # seconds after the round's start; open loop only


@dataclass(frozen=True)
class TokenEvent:
    """One stream event that has tokens."""

    seconds: float  # since the request began
    num_tokens: int
    token_ids: tuple[int, ...] = ()  # empty if the server sends none
    num_characters: int = 0


@dataclass
class Exchange:
    """One request and its complete or partial answer.

    A request begins when it is sent; in open loop when it was due, so that client delay counts as latency.
    """

    started: float = 0.0  # seconds after the round's start
    late: float = 0.0  # seconds from the request's beginning to its sending
    events: list[TokenEvent] = field(default_factory=list)
    text: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)  # the `spaceserve` object
    num_prompt_tokens: int | None = None  # as counted by the server
    num_counted: int | None = None  # tokens of the answer, as counted by the server
    seconds: float = 0.0  # from the beginning to the end of the stream
    finished: bool = False  # the stream ended normally
    error: str | None = None  # HTTP status of an error, or "broken"

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
        """Seconds between consecutive events."""
        return [after.seconds - before.seconds for before, after in itertools.pairwise(self.events)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds per token after the first event: an event's gap is divided by its tokens, one entry per token."""
        gaps: list[float] = []
        for gap, event in zip(self.event_gaps, self.events[1:], strict=True):
            gaps += [gap / event.num_tokens] * event.num_tokens
        return gaps

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds per token after the first event; 0 if there is no later event."""
        num_tokens = self.num_tokens - self.events[0].num_tokens
        return (self.events[-1].seconds - self.events[0].seconds) / num_tokens if num_tokens else 0.0

    def share_counted_tokens(self) -> None:
        """Distribute the server's token count over events that have no token ids."""
        if self.num_counted is None or self.token_ids or not self.events:
            return
        counts = shared(self.num_counted, [event.num_characters for event in self.events])
        pairs = zip(self.events, counts, strict=True)
        self.events = [replace(event, num_tokens=count) for event, count in pairs if count]


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into integers in proportion to `weights`, each at least 1 if possible."""
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
