"""Time as the engine sees it: something is done so many seconds later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias


class Timer(Protocol):
    """Something that is to be done."""

    def cancel(self) -> None: ...


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Seconds from now, what to do then."""


def on_the_loop(seconds: float, action: Callable[[], None]) -> Timer:
    """By the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, action)
