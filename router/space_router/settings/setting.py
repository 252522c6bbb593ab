"""What the command line knows about one field of the configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """What the command line knows about one field."""

    group: str
    help: str  # what it is, its unit, and why the default is what it is
    parse: Callable[[str], object]  # raises ValueError("must be ...")
    metavar: str
    own_workers: bool  # only for workers that this server starts: those at --worker-address have flags of their own
    repeatable: bool  # the flag may be given several times; in the variable the values are separated by commas


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
    """A config field that is also a flag."""
    return field(default=default, metadata={"setting": Setting(group, help, parse, metavar, own_workers, repeatable)})
