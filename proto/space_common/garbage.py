"""When a process looks for garbage that holds itself: a server makes next to none, and looking takes its time."""

from __future__ import annotations

import atexit
import gc

_NEW_OBJECTS = 50_000
"""More of them than were let go of, before garbage is looked for. Steps and events leave none: what they make goes by
itself."""


def collect_seldom() -> None:
    """Never look for garbage among the objects that there are now, and seldom among new ones.

    A step of many sequences, or the events of many streams, make more objects than Python looks at once for by itself:
    between two of them it would. Seen with 1,000 streams: a ninth of the router's time, in pauses.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is there at the end extensions take for lost, and print lists of it
    gc.set_threshold(_NEW_OBJECTS, 20, 50)
