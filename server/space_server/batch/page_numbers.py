"""A sequence's page numbers as an append-only array that is compared cheaply with an older version of itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from space_kernels.paging.row_pattern import Ints


# buffer  [0 ........ known)[known .... known + new)[.......... free
#         earlier arrays     written now             of later ones
def appended(known: Ints, pages: Sequence[int]) -> Ints:
    """Return `known` followed by `pages`. Memory is shared while it has capacity; `known` must be the newest array."""
    count = len(known) + len(pages)
    buffer = known.base
    if not isinstance(buffer, np.ndarray) or len(buffer) < count:
        buffer = np.empty(2 * count, dtype=np.int64)
        buffer[: len(known)] = known
    buffer[len(known) : count] = pages
    return buffer[:count]


def begins_with(pages: Ints, known: Ints) -> bool:
    """Whether `pages` starts with `known`."""
    if pages is known:
        return True
    if len(pages) < len(known):
        return False
    if pages.base is not None and pages.base is known.base and _start(pages) == _start(known):
        return True  # written entries never change
    return bool((pages[: len(known)] == known).all())


def _start(numbers: Ints) -> int:
    return int(numbers.__array_interface__["data"][0])
