"""The pages of a sequence as an array that grows, and is compared with an older one, by what is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from space_kernels.paging.row_pattern import Ints


# room    [0 ........ known)[known .... known + new)[.......... free
#         earlier arrays     written now             of later ones
def appended(known: Ints, pages: Sequence[int]) -> Ints:
    """The known numbers, then these. The same memory as long as it has room, so `known` must be its newest array."""
    count = len(known) + len(pages)
    room = known.base
    if not isinstance(room, np.ndarray) or len(room) < count:
        room = np.empty(2 * count, dtype=np.int64)
        room[: len(known)] = known
    room[len(known) : count] = pages
    return room[:count]


def begins_with(pages: Ints, known: Ints) -> bool:
    """`pages` are the known ones, and perhaps more."""
    if pages is known:
        return True
    if len(pages) < len(known):
        return False
    if pages.base is not None and pages.base is known.base and _start(pages) == _start(known):
        return True  # what was written once stays
    return bool((pages[: len(known)] == known).all())


def _start(numbers: Ints) -> int:
    return int(numbers.__array_interface__["data"][0])
