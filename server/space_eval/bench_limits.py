"""Durations as people write them, and the limits that make a request a good one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from space_eval.load_exchange import Exchange

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NAMES = {"ttft": "to the first token", "itl": "per token after it, mean", "gap": "longest silence", "e2e": "whole"}


def seconds_of(text: str) -> float:
    """`500ms`, `5s`, `2m`; a bare number is seconds. Raises ValueError."""
    number = text.rstrip("ushm")
    unit = text[len(number) :] or "s"
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < 1e9:
        raise ValueError(f"{text!r} is no duration: give one such as 500ms, 5s or 2m")
    return value


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as goodput; seconds by name, see NAMES."""

    seconds: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Limits:
        """`ttft=500ms,itl=50ms`. Raises ValueError."""
        found = []
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in NAMES:
                raise ValueError(f"{part!r} is no limit: give NAME=DURATION with {', '.join(NAMES)}")
            found.append((name, seconds_of(value)))
        return cls(tuple(found))

    def kept(self, exchange: Exchange) -> bool:
        """Whether the answer came whole and within every limit."""
        if not exchange.finished or not exchange.pieces:
            return False
        taken = {
            "ttft": exchange.first_token_seconds,
            "itl": exchange.seconds_per_token,
            "gap": max(exchange.event_gaps, default=0.0),
            "e2e": exchange.seconds,
        }
        return all(taken[name] <= limit for name, limit in self.seconds)

    def num_kept(self, exchanges: Sequence[Exchange]) -> int:
        return sum(map(self.kept, exchanges))
