"""What a router's one process takes for its part of a simulated run: one thing after the other."""

from __future__ import annotations

from dataclasses import dataclass

from space_eval.bench_limits import seconds_of


@dataclass(frozen=True)
class RouterCost:
    """Processor seconds of a router, as `spaceserve bench streams` measures them."""

    per_request: float = 0.0
    per_piece: float = 0.0  # of an answer: what one step brings one sequence, be it one token or more

    @classmethod
    def parse(cls, text: str) -> RouterCost:
        """`3ms,75us`. Raises ValueError."""
        request, comma, piece = text.partition(",")
        try:
            made = cls(seconds_of(request), seconds_of(piece))
        except ValueError:
            comma = ""
        if not comma:
            raise ValueError(f"must be what a request and what a piece of its answer takes: 3ms,75us; got {text!r}")
        return made

    @property
    def name(self) -> str:
        if not (self.per_request or self.per_piece):
            return "nothing"
        return f"{1e3 * self.per_request:g} ms a request, {1e6 * self.per_piece:g} µs a piece of an answer"


NOTHING = RouterCost()
"""Of a router that is infinitely fast."""
