"""Statistics of generated text (repetition inflates acceptance), and the text of ids that follow a prompt."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

LOOP_SHARE = 0.5
PUNCTUATION_AND_SPACE = frozenset(string.punctuation + string.whitespace)


def repeated_share(ids: Sequence[int], n: int = 4) -> float:
    """Return the share of n-grams of `ids` that occurred before in `ids`; 0 for texts shorter than n."""
    num_grams = len(ids) - n + 1
    if num_grams < 1:
        return 0.0
    distinct = {tuple(ids[i : i + n]) for i in range(num_grams)}
    return 1.0 - len(distinct) / num_grams


def is_looping(ids: Sequence[int]) -> bool:
    """Return whether an output loops: at least half of its 4-grams occurred before in it."""
    return repeated_share(ids) >= LOOP_SHARE


def is_filler(text: str) -> bool:
    """Return whether the text is only whitespace or punctuation, which any drafter predicts."""
    return all(character in PUNCTUATION_AND_SPACE for character in text)


def is_blank(text: str) -> bool:
    """Return whether the text is only whitespace."""
    return not text.strip()


def text_behind(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decode `answer` as it follows `prompt`: some tokenizers drop a space at the start of a text."""
    before, whole = decode(prompt), decode([*prompt, *answer])
    return whole[len(before) :] if whole.startswith(before) else decode(answer)
