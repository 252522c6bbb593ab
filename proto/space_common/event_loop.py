"""The event loop of the router and of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes an event loop of uvloop's; None, asyncio's own, where it is not installed.

    A token takes several turns of both loops, each of which costs uvloop a fraction of asyncio's time. Its
    `call_soon_threadsafe` also keeps the GIL: asyncio's gives it to the loop, for which the caller then waits.
    """
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
