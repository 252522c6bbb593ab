"""Delayed calls, by the event loop or by a test's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Takes a delay in seconds and the function to call then."""


def call_later_on_loop(seconds: float, action: Callable[[], None]) -> Timer:
    """Call `action` in `seconds` on the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, action)
