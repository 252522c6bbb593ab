"""Incremental detokeniser: ids to text, one at a time, emitting only whole characters."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from space_router.text.tokenizer import Tokenizer


class TokenSpan(NamedTuple):
    """The span of one token in the text of its stream: [start, end) in characters.

    A token that is part of a character spans that character; the text comes with the token that completes it.
    start == end: the token has no characters (a skipped special token).
    """

    id: int
    start: int
    end: int


class Detokenizer:
    """Detokenises one stream. Each character is returned once, whole, with the token that completes it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False  # bytes of an incomplete character are buffered
        self._length = 0  # characters returned so far
        # Strip SentencePiece's space before the first word only if the text begins here.
        self._strip = tokenizer.bytes_of.strips_first_space and all(id_ in tokenizer.special_ids for id_ in prompt_ids)

    def push(self, id_: int) -> tuple[str, TokenSpan]:
        """Return the characters that this token completes, and its span."""
        start = self._length
        whole = "" if id_ in self._skipped else self._bytes_of.text(id_)
        if whole == "" or (whole is not None and not self._pending and not self._strip):
            self._length = end = start + len(whole)
            return whole, TokenSpan(id_, start, end)
        content = self._bytes_of[id_]
        if self._pending:
            head = self._decoder.decode(content[:1])
            # The first byte does not continue the buffered ones: they become a replacement character.
            if len(head) > 1 or (head and self._decoder.getstate()[0]):
                start += 1
            text = head + self._decoder.decode(content[1:])
        else:
            text = self._decoder.decode(content)
        self._pending = bool(self._decoder.getstate()[0])
        if self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        self._length += len(text)
        end = self._length + self._pending
        return text, TokenSpan(id_, start, max(start, end))

    def finish(self) -> str:
        """End the stream; return a replacement character for an incomplete one, else ""."""
        text = self._decoder.decode(b"", final=True)
        self._pending = False
        self._length += len(text)
        return text
