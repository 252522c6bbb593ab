"""The blocks that a request would use on a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The blocks of a possible admission."""

    shared: list[int]  # cached blocks of its prefix
    num_fresh: int  # further blocks that it needs
