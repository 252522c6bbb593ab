"""What is fuzzed: something that takes one hostile input after the other, each made by dice of its own."""

from __future__ import annotations

from random import Random
from typing import Protocol


class Finding(Exception):
    """An input did what none may do."""


class Target(Protocol):
    """Entered once, tried many times."""

    name: str

    async def __aenter__(self) -> Target: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def try_one(self, dice: Random) -> str:
        """What became of one input, in a word. Raises anything where that must not be."""

    async def settle(self) -> None:
        """Raises where inputs have left something behind."""


def dice_of(seed: int, name: str, number: int) -> Random:
    """The same for one input, whatever was tried before it."""
    return Random(f"{seed} {name} {number}")


def short(text: str, most: int = 400) -> str:
    """In one line, and not a long one."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
