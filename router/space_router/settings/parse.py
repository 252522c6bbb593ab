"""Parsers of flags and environment variables. Each raises ValueError("must be ...") for an invalid text."""

import math
import re
from collections.abc import Callable

_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_SIZE = re.compile(r"(\d+(?:\.\d+(?=\s*[A-Za-z]))?)\s*([A-Za-z]*)")  # a fraction needs a unit
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
MAX_DRAFT_LENGTH = 16
"""Maximum K of `speculation`; no known checkpoint gains from more."""


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def chances(value: str) -> str:
    """Check the acceptance probabilities of --synthetic-acceptance; returned as text for the worker."""
    words = value.split(",")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    named = numbers in ([0.78], [0.57])
    if not named and not (len(numbers) == 5 and all(0 <= number <= 1 for number in numbers)):
        raise ValueError("must be .78, .57, or five chances from 0 to 1 separated by commas")
    return value.strip()


def one_of(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return parse


def one_of_numbers(*allowed: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if value not in [str(number) for number in allowed]:
            raise ValueError(f"must be one of {', '.join(map(str, allowed))}")
        return int(value)

    return parse


def whole(low: int, high: int | None) -> Callable[[str], int]:
    """A whole number, `low <= value <= high`."""
    bound = f"of at least {low}" if high is None else f"from {low} to {high}"

    def parse(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", value) or int(value) < low or (high is not None and int(value) > high):
            raise ValueError(f"must be a whole number {bound}")
        return int(value)

    return parse


def seconds(low: float) -> Callable[[str], float]:
    """A time span of `low` seconds or more."""

    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= low):
            raise ValueError(f"must be a number of seconds, {low:g} or more")
        return number

    return parse


def seconds_or_off(value: str) -> str:
    """`off`, or a time span above 0; returned as text for the worker."""
    if value != "off" and not seconds(0)(value):
        raise ValueError("must be off, or a number of seconds above 0")
    return value


def size(value: str) -> int:
    """A number of bytes, 1 or more; KiB, MiB, GiB, KB, MB, GB allowed."""
    match = _SIZE.fullmatch(value.strip())
    if (
        match is None
        or match[2].upper() not in _UNITS
        or (number := int(float(match[1]) * _UNITS[match[2].upper()])) < 1
    ):
        raise ValueError("must be a size such as 4MiB or 1GiB")
    return number


def memory(value: str) -> str:
    """`auto`, a fraction in (0, 1], or a size; returned as text for the worker."""
    if value == "auto":
        return value
    try:
        if re.fullmatch(r"[0-9.]+", value) and 0 < float(value) <= 1:
            return value
        size(value)
    except ValueError:
        raise ValueError("must be auto, a size such as 1GiB, or a fraction of free memory such as 0.9") from None
    return value


def speculation(value: str) -> str:
    if value in ("auto", "off") or (re.fullmatch(r"[0-9]{1,2}", value) and int(value) <= MAX_DRAFT_LENGTH):
        return value
    raise ValueError(f"must be auto, off, or a number of drafts from 0 to {MAX_DRAFT_LENGTH}")


def words(value: str) -> tuple[str, ...]:
    """Texts separated by commas, at least one."""
    found = tuple(word.strip() for word in value.split(",") if word.strip())
    if not found:
        raise ValueError("must be one or more values separated by commas")
    return found


def adapters(value: str) -> tuple[tuple[str, str], ...]:
    """NAME=FOLDER, separated by commas; each name once."""
    found = [word.strip().partition("=") for word in value.split(",") if word.strip()]
    names = [name for name, _, _ in found]
    if not found or not all(_ADAPTER_NAME.fullmatch(name) and folder for name, _, folder in found):
        raise ValueError("must be NAME=FOLDER, with a name of letters, digits and . _ : / -")
    if len(set(names)) < len(names):
        raise ValueError("must not give two adapters the same name")
    return tuple((name, folder) for name, _, folder in found)


def ids(value: str) -> tuple[int, ...]:
    """Token ids separated by commas."""
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", value):
        raise ValueError("must be token ids separated by commas, such as 32002")
    return tuple(int(word) for word in value.split(","))
