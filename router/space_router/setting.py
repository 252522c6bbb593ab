"""Settings as fields: what a field of a configuration must say to be a flag, and the parsers of its text.

The help text of a flag is the docstring below its field.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

MAX_DRAFT_LENGTH = 16  # maximum K of `speculation`; no known checkpoint gains from more

_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}
_UNITS |= {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_SIZE = re.compile(r"(\d+(?:\.\d+(?=\s*[A-Za-z]))?)\s*([A-Za-z]*)")  # a fraction needs a unit
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


class Kind(NamedTuple):
    """How a setting's text is read, and what stands for it in `--help`."""

    parse: Callable[[str], Any]  # raises ValueError("must be ...")
    metavar: str


@dataclass(frozen=True)
class Setting:
    """Metadata of one field's flag."""

    group: str
    parse: Callable[[str], Any]  # raises ValueError("must be ...")
    metavar: str
    own_workers: bool  # applies only to workers that this server starts; others have their own flags
    repeatable: bool  # the flag may be repeated; the variable has the values separated by commas


def setting(group: str, default: Any, kind: Kind, *, own_workers: bool = False, repeatable: bool = False) -> Any:
    return field(default=default, metadata={"setting": Setting(group, *kind, own_workers, repeatable)})


@cache
def help_texts(config: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by field name: meaning, unit, and reason of the default."""
    module = ast.parse(inspect.getsource(sys.modules[config.__module__]))
    [definition] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == config.__name__]
    pairs = itertools.pairwise(definition.body)
    return {
        field.target.id: inspect.cleandoc(text.value.value).replace("\n", " ")
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def text(metavar: str) -> Kind:
    """A text that is not blank."""

    def parse(value: str) -> str:
        if not value.strip():
            raise ValueError("must not be empty")
        return value.strip()

    return Kind(parse, metavar)


def one_of(*allowed: str | int, metavar: str | None = None) -> Kind:
    """One of these texts or numbers."""
    known = {str(value): value for value in allowed}

    def parse(value: str) -> str | int:
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return known[value]

    return Kind(parse, metavar or "|".join(known))


def whole(low: int, high: int | None, metavar: str) -> Kind:
    """A whole number, `low <= value <= high`."""
    bound = f"of at least {low}" if high is None else f"from {low} to {high}"

    def parse(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", value) or int(value) < low or (high is not None and int(value) > high):
            raise ValueError(f"must be a whole number {bound}")
        return int(value)

    return Kind(parse, metavar)


def whole_or_auto(low: int, high: int, metavar: str) -> Kind:
    """A whole number, `low <= value <= high`, or the word auto."""
    number = whole(low, high, metavar)

    def parse(value: str) -> int | str:
        try:
            return value if value == "auto" else int(number.parse(value))
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from None

    return Kind(parse, f"{metavar}|auto")


def seconds(low: float) -> Kind:
    """A time span of `low` seconds or more."""

    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= low):
            raise ValueError(f"must be a number of seconds, {low:g} or more")
        return number

    return Kind(parse, "SECONDS")


def words(metavar: str) -> Kind:
    """Texts separated by commas, at least one."""

    def parse(value: str) -> tuple[str, ...]:
        found = tuple(word.strip() for word in value.split(",") if word.strip())
        if not found:
            raise ValueError("must be one or more values separated by commas")
        return found

    return Kind(parse, metavar)


def _seconds_or_off(value: str) -> str:
    if value != "off" and not seconds(0).parse(value):
        raise ValueError("must be off, or a number of seconds above 0")
    return value


def _size(value: str) -> int:
    match = _SIZE.fullmatch(value.strip())
    if (
        match is None
        or match[2].upper() not in _UNITS
        or (number := int(float(match[1]) * _UNITS[match[2].upper()])) < 1
    ):
        raise ValueError("must be a size such as 4MiB or 1GiB")
    return number


def _size_or_off(text: str) -> str:
    try:
        if text not in ("auto", "off"):
            _size(text)
    except ValueError:
        raise ValueError("must be auto, off, or a size such as 1GiB") from None
    return text


def _memory(value: str) -> str:
    if value == "auto":
        return value
    try:
        if re.fullmatch(r"[0-9.]+", value) and 0 < float(value) <= 1:
            return value
        _size(value)
    except ValueError:
        raise ValueError("must be auto, a size such as 1GiB, or a fraction of free memory such as 0.9") from None
    return value


def _speculation(value: str) -> str:
    if value in ("auto", "off") or (re.fullmatch(r"[0-9]{1,2}", value) and int(value) <= MAX_DRAFT_LENGTH):
        return value
    raise ValueError(f"must be auto, off, or a number of drafts from 0 to {MAX_DRAFT_LENGTH}")


def _chances(value: str) -> str:
    try:
        numbers = [float(word) for word in value.split(",")]
    except ValueError:
        numbers = []
    is_named = numbers in ([0.78], [0.57])
    if not is_named and not (len(numbers) == 5 and all(0 <= number <= 1 for number in numbers)):
        raise ValueError("must be .78, .57, or five chances from 0 to 1 separated by commas")
    return value.strip()


def _adapters(value: str) -> tuple[tuple[str, str], ...]:
    found = [word.strip().partition("=") for word in value.split(",") if word.strip()]
    names = [name for name, _, _ in found]
    if not found or not all(_ADAPTER_NAME.fullmatch(name) and folder for name, _, folder in found):
        raise ValueError("must be NAME=FOLDER, with a name of letters, digits and . _ : / -")
    if len(set(names)) < len(names):
        raise ValueError("must not give two adapters the same name")
    return tuple((name, folder) for name, _, folder in found)


def _json_object(value: str) -> str:
    """Return the text of a JSON object, in one form for equal ones."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError('must be a JSON object such as {"enable_thinking": false}')
    return json.dumps(found, sort_keys=True)


def _ids(value: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", value):
        raise ValueError("must be token ids separated by commas, such as 32002")
    return tuple(int(word) for word in value.split(","))


SIZE = Kind(_size, "SIZE")  # a number of bytes, 1 or more; KiB, MiB, GiB, KB, MB, GB allowed
ON_OFF = one_of("on", "off")
ADAPTERS = Kind(_adapters, "NAME=FOLDER")  # NAME=FOLDER, separated by commas; each name once
JSON_OBJECT = Kind(_json_object, "JSON")
IDS = Kind(_ids, "ID[,ID...]")  # token ids separated by commas

# Checked here and passed to the worker as they are.
MEMORY = Kind(_memory, "SIZE|FRACTION|auto")
SIZE_OR_OFF = Kind(_size_or_off, "SIZE|off|auto")
SPECULATION = Kind(_speculation, "auto|off|K")
SECONDS_OR_OFF = Kind(_seconds_or_off, "SECONDS|off")
CHANCES = Kind(_chances, ".78|.57|P,P,P,P,P")
