"""How far a generated text repeats itself, for evaluation and for training on own texts."""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 4  # ids of an n-gram
LOOP_SHARE = 0.5  # share of repeated n-grams from which a text loops


def repeated_share(ids: Sequence[int], n: int = GRAM) -> float:
    """Return the share of n-grams of `ids` that occurred before in `ids`; 0 for texts shorter than n."""
    num_grams = len(ids) - n + 1
    if num_grams < 1:
        return 0.0
    distinct = {tuple(ids[i : i + n]) for i in range(num_grams)}
    return 1.0 - len(distinct) / num_grams


def is_looping(ids: Sequence[int]) -> bool:
    """Return whether a text loops: at least half of its 4-grams occurred before in it."""
    return repeated_share(ids) >= LOOP_SHARE
