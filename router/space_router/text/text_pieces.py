"""Where a long text may be cut so that its pieces have together the ids of the whole.

Tokenising a text at once takes up to 300 bytes of memory for each of its bytes, and cannot be interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken

PIECE = 32 * 1024  # characters of a piece, up to its next cut
MAX_STRETCH = 256 * 1024  # characters that are tokenised at once, where a text has no cut
MAX_UNCUT = 1024**2  # most characters of a text where the tokenizer has no safe place to cut

_NORMALIZERS = frozenset({"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace"})
_PRE_TOKENIZERS = frozenset({"Sequence", "ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"})
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[AbBG]|(?<!\[)\^")  # in a pattern: the text before decides


class StretchTooLong(ValueError):
    """A text has too many characters between two places where it may be cut."""

    def __init__(self, num_characters: int, limit: int) -> None:
        super().__init__(
            f"has a stretch of {num_characters} characters without a space or a line end between letters; at most "
            f"{limit} are taken. Break it up."
        )


class Piece(NamedTuple):
    """A part of a text, from `start` to `end`."""

    start: int
    end: int


class TextCuts:
    """Cuts texts before a space or a line end between letters or digits, and before a comma or stop between ideographs.

    Such a place is one only if no token has the character before it and the one behind it, so that no merge crosses
    it, and if nothing else of the tokenizer looks across it.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        vocabulary: Iterable[str],
        alphabet: Mapping[str, int] | None,
        added: Iterable[AddedToken],
    ) -> None:
        """`parts`: tokenizer.json; `alphabet`: byte of each letter of a byte-level vocabulary, or None."""
        self._pattern = _pattern(parts, vocabulary, alphabet, list(added))

    @property
    def has_any(self) -> bool:
        """Whether this tokenizer's texts can be cut at all."""
        return self._pattern is not None

    def pieces(self, text: str) -> Iterator[Piece]:
        """Yield the pieces of a text in order. Raises StretchTooLong."""
        start, limit = 0, MAX_UNCUT if self._pattern is None else MAX_STRETCH
        while True:
            cut = None
            if self._pattern is not None and len(text) - start > PIECE:
                cut = self._pattern.search(text, start + PIECE)
            end = len(text) if cut is None else cut.start() + 1
            if end - start > limit:
                raise StretchTooLong(end - start, limit)
            yield Piece(start, end)
            if cut is None:
                return
            start = end


def _pattern(
    parts: Mapping[str, Any], vocabulary: Iterable[str], alphabet: Mapping[str, int] | None, added: list[AddedToken]
) -> re.Pattern[str] | None:
    """Return a pattern that matches at the character before each cut, or None if there is no safe place."""
    model = parts.get("model") or {}
    if model.get("type") != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    if not _is_local(parts.get("normalizer"), _NORMALIZERS) or not _is_local(
        parts.get("pre_tokenizer"), _PRE_TOKENIZERS
    ):
        return None
    for token in added:
        text = token.content
        if (token.lstrip and text[:1].isalnum()) or (token.rstrip and text[-1:].isalnum()):
            return None
    written = _written(alphabet)
    adds_space = _adds_space(parts.get("pre_tokenizer"))
    tokens = "\0".join((*vocabulary, *(written(token.content) for token in added)))
    kinds = []
    for before, marks in (("A-Za-z0-9", " \n"), ("\u4e00-\u9fff", "\uff0c\u3002\u3001")):
        safe = [
            mark
            for mark in marks
            if not _is_crossed(tokens, before, mark, alphabet) and (mark == " " or not adds_space)
        ]
        if safe:
            kinds.append(f"[{before}](?=[{''.join(map(re.escape, safe))}][{before}])")
    return re.compile("|".join(kinds)) if kinds else None


def _is_local(part: Any, known: frozenset[str]) -> bool:
    """Return whether a normalizer or pre-tokenizer does the same to a piece as to the whole, at every cut."""
    if part is None:
        return True
    if part.get("type") not in known:
        return False
    pattern = part.get("pattern") or {}
    if part["type"] == "Replace" and "".join(map(str, pattern.values())) != " ":
        return False
    if part["type"] == "Split" and _LOOKS_BACK.search(str(pattern.get("Regex", ""))):
        return False
    inner = [*(part.get("normalizers") or ()), *(part.get("pretokenizers") or ())]
    return all(_is_local(one, known) for one in inner)


def _adds_space(part: Any) -> bool:
    """Return whether a byte-level pre-tokenizer adds a space before a text that begins with none."""
    if part is None:
        return False
    adds = part.get("type") == "ByteLevel" and bool(part.get("add_prefix_space", True))
    return adds or any(_adds_space(one) for one in part.get("pretokenizers") or ())


def _written(alphabet: Mapping[str, int] | None) -> Any:
    """Return the function from a text to the form in which the vocabulary has it."""
    if alphabet is None:
        return lambda text: text.replace(" ", "\u2581")
    letters = {byte: letter for letter, byte in alphabet.items()}
    return lambda text: "".join(letters[byte] for byte in text.encode())


def _is_crossed(tokens: str, before: str, mark: str, alphabet: Mapping[str, int] | None) -> bool:
    """Return whether a token has a character of `before` with the mark, or the first bytes of it, behind it."""
    form = _written(alphabet)(mark)
    if before.isascii() or alphabet is None:
        return re.search(f"[{before}]{re.escape(form)}", tokens) is not None
    last = "".join(re.escape(letter) for letter, byte in alphabet.items() if 0x80 <= byte <= 0xBF)
    begun = "|".join([re.escape(form), *(f"{re.escape(form[:length])}(?=\0|$)" for length in range(1, len(form)))])
    return re.search(f"[{last}](?:{begun})", tokens) is not None
