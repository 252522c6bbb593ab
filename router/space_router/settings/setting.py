"""Metadata that turns a configuration field into a flag."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Metadata of one field's flag."""

    group: str
    help: str  # meaning, unit, and reason of the default
    parse: Callable[[str], object]  # raises ValueError("must be ...")
    metavar: str
    own_workers: bool  # applies only to workers that this server starts; others have their own flags
    repeatable: bool  # the flag may be repeated; the variable has the values separated by commas


def setting(
    default: Any,
    group: str,
    help: str,
    parse: Callable[[str], object],
    metavar: str,
    *,
    own_workers: bool = False,
    repeatable: bool = False,
) -> Any:
    """Return a dataclass field that is also a flag."""
    return field(default=default, metadata={"setting": Setting(group, help, parse, metavar, own_workers, repeatable)})
