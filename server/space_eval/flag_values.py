"""Types of command-line flags that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole_from(low: int) -> Callable[[str], int]:
    """Return a parser of integers of at least `low`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}; got {text!r}")
        return int(text)

    return parse


whole = whole_from(1)


def number_in(low: float, high: float, what: str = "a number") -> Callable[[str], float]:
    """Return a parser of numbers from `low` to `high`; `what` they are, for the error message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {what} from {low:g} to {high:g}; got {text!r}")
        return value

    return parse
