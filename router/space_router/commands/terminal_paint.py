"""Tokens in the colours of their steps, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

COLOURS = (34, 33, 35, 32, 36)
"""Foregrounds that steps take turns with, as the terminal's own theme has them: blue, yellow, magenta, green, cyan."""
DRAFT, OWN, QUIET, PLAIN = "4", "1", "2", "\x1b[0m"
"""Underlined, bold, dim; and none of it."""


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to paint: on a terminal that can, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


@dataclass(frozen=True)
class Paint:
    """How texts look; `on` False: as they are."""

    on: bool

    def token(self, text: str, step: int, *, draft: bool) -> str:
        """A token of a step: a draft that came true is underlined, the step's own token is bold."""
        return self._lines(text, f"{DRAFT if draft else OWN};{COLOURS[step % len(COLOURS)]}")

    def quiet(self, text: str) -> str:
        """What is not the answer."""
        return self._lines(text, QUIET)

    def _lines(self, text: str, codes: str) -> str:
        """No colour reaches over the end of a line: terminals would paint to the edge."""
        if not self.on:
            return text
        return "\n".join(f"\x1b[{codes}m{line}{PLAIN}" if line else "" for line in text.split("\n"))

    def event(self, text: str, spaceserve: Mapping[str, Any] | None) -> str:
        """The text of an event, by its tokens where it tells them."""
        tokens = (spaceserve or {}).get("tokens", [])
        painted = "".join(self.token(one["text"], one["step"], draft=one["draft"]) for one in tokens)
        return painted + text[sum(len(one["text"]) for one in tokens) :]


def safe(text: str) -> str:
    """Text whose control characters cannot steer the terminal: a model may write anything."""
    return "".join(
        one if one in "\n\t" or not (ord(one) < 32 or 127 <= ord(one) < 160) else f"\\x{ord(one):02x}" for one in text
    )
