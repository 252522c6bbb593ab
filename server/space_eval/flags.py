"""Command-line flags that several evaluations share, and what stops an evaluation before it measures."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from space_common.files import api_key_in


class EvalError(ValueError):
    """`spaceserve eval` prints it and exits with status 2; it names the place, the value and the cure."""


class FlagError(EvalError):
    """Flags that cannot be used."""


class RecordError(EvalError):
    """Prompts, questions or other data that cannot be found or parsed."""


class JournalError(EvalError):
    """The output folder holds another run, or a file that is not a run's."""


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


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return some flags by name, as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def read_api_key(file: Path | None) -> str | None:
    """Return the API key in a file. Raises FlagError."""
    try:
        return None if file is None else api_key_in(file)
    except ValueError as error:
        raise FlagError(str(error)) from None


def check_out(out: Path) -> None:
    """Raise FlagError if nothing can be written to the folder (or .json file) that --out names; it need not exist."""
    folder = (out.parent if out.suffix == ".json" else out).absolute()
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise FlagError(f"--out: {out} cannot be written: {error.strerror or error}. Give another folder.") from error
