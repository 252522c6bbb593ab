"""Incremental search for stop strings in streamed text."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """The first stop string that is completed; the longest if several end at the same character."""

    stop: str
    start: int  # absolute, in characters of the searched text
    end: int


class _Pattern:
    """Knuth-Morris-Pratt matcher for one stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text so far ends with
        self._fallback = [0] * (len(stop) + 1)  # longest proper border of stop[:i]
        border = 0
        for i in range(1, len(stop)):
            while border and stop[i] != stop[border]:
                border = self._fallback[border]
            border += stop[i] == stop[border]
            self._fallback[i + 1] = border

    def advance(self, piece: str) -> int | None:
        """Read a piece of text; return the end of the first match, in characters of the piece, or None."""
        stop, matched = self.stop, self.matched
        position = 0
        while position < len(piece):
            if not matched:
                position = piece.find(stop[0], position)
                if position < 0:
                    break
            character = piece[position]
            while matched and character != stop[matched]:
                matched = self._fallback[matched]
            matched += character == stop[matched]
            position += 1
            if matched == len(stop):
                return position
        self.matched = matched
        return None


class StopStrings:
    """Searches streamed text for stop strings.

    The first `num_certain` characters can no longer become part of a match; later ones can.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._length = 0
        self.num_certain = 0

    def push(self, piece: str) -> StopMatch | None:
        """Read the next piece of text; return the match that ends the stream, or None."""
        found: StopMatch | None = None
        for pattern in self._patterns:
            end = pattern.advance(piece)
            if end is not None:
                match = StopMatch(pattern.stop, self._length + end - len(pattern.stop), self._length + end)
                if found is None or (match.end, match.start) < (found.end, found.start):
                    found = match
        self._length += len(piece)
        held = max((pattern.matched for pattern in self._patterns), default=0)
        self.num_certain = self._length - held if found is None else found.start
        return found
