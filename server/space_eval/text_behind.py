"""What a model wrote, as it stands behind its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def text_behind(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The text of the ids `answer` behind those of `prompt`: some tokenizers drop a space at a text's beginning."""
    before, whole = decode(prompt), decode([*prompt, *answer])
    return whole[len(before) :] if whole.startswith(before) else decode(answer)
