"""How long prompts and answers are: one length, or a law that lengths are drawn from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FORMS = "N, uniform:LOW:HIGH, normal:MEAN:SPREAD[:LOW:HIGH] or lognormal:MEDIAN:SIGMA[:LOW:HIGH]"


class LengthError(ValueError):
    """A law that cannot be read; the message has the forms there are."""


@dataclass(frozen=True)
class Lengths:
    """A law of lengths, in tokens, all from `low` to `high`.

    normal: mean and standard deviation. lognormal: median, and standard deviation of the logarithm. What falls outside
    the bounds is moved to the nearer one.
    """

    form: str  # as it was given
    law: str
    figures: tuple[float, ...]
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises LengthError."""
        law, *rest = text.split(":") if ":" in text else ("fixed", text)
        try:
            figures = [float(part) for part in rest]
        except ValueError:
            figures = []
        if law not in _LAWS or len(figures) not in _COUNTS[law] or not all(map(math.isfinite, figures)):
            raise LengthError(f"{text!r} is no length: give {FORMS}.")
        bounds = figures[2:] if law in ("normal", "lognormal") else figures
        low, high = (min(bounds), max(bounds)) if bounds else (1.0, _far(law, figures))
        if low < 1 or any(bound != int(bound) for bound in bounds) or figures[0] < 1 or figures[-1] < 0:
            raise LengthError(f"{text!r}: lengths are whole numbers of at least 1. Give {FORMS}.")
        if bounds != sorted(bounds):
            raise LengthError(f"{text!r}: the lower bound {bounds[0]:g} is above the upper one, {bounds[1]:g}.")
        if law in ("normal", "lognormal") and figures[1] < 0:
            raise LengthError(f"{text!r}: the spread must be at least 0; got {figures[1]:g}.")
        return cls(text, law, tuple(figures), int(low), int(high))

    def draw(self, source: random.Random) -> int:
        """The next length."""
        drawn = round(_LAWS[self.law](source, self.figures))
        return min(max(drawn, self.low), self.high)


def _far(law: str, figures: Sequence[float]) -> float:
    """An upper bound where none is given: 4 standard deviations."""
    mean, spread = figures[0], figures[1]
    return math.ceil(mean + 4 * spread if law == "normal" else mean * math.exp(4 * min(spread, 5.0)))


_LAWS: dict[str, Callable[[random.Random, Sequence[float]], float]] = {
    "fixed": lambda source, figures: figures[0],
    "uniform": lambda source, figures: source.randint(int(figures[0]), int(figures[1])),
    "normal": lambda source, figures: source.gauss(figures[0], figures[1]),
    "lognormal": lambda source, figures: source.lognormvariate(math.log(figures[0]), figures[1]),
}
_COUNTS = {"fixed": (1,), "uniform": (2,), "normal": (2, 4), "lognormal": (2, 4)}
