"""What kind of token: whitespace, punctuation, identifier, number, word. Read off the text, not off a vocabulary."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from unicodedata import category


class TokenClass(StrEnum):
    """A token with letters or digits has the class of the run of them that it ends in."""

    WHITESPACE = "whitespace"
    PUNCTUATION = "punctuation"
    IDENTIFIER = "identifier"  # a name in code, or a piece of one
    NUMBER = "number"
    WORD = "word"  # of prose, or a keyword
    OTHER = "other"  # special tokens, pieces of a character, pictures


KEYWORDS = frozenset(
    {word.lower() for word in keyword.kwlist}
    | {"self", "const", "let", "var", "function", "new", "public", "private", "static", "void", "int", "float", "bool"}
    | {"char", "double", "long", "struct", "enum", "switch", "case", "default", "do", "catch", "throw", "this", "null"}
    | {"true", "false", "func", "fn", "use", "impl", "match", "interface", "extends", "package", "typeof", "instanceof"}
)
_RUN = re.compile(r"\w+")
_NUMBER = re.compile(r"\d[\d_]*([eE]\d+)?[jLlfF]?|0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+")
_NAME = re.compile(r"_|[^\W\d]\d|[a-z][A-Z]")  # snake_case, x1, camelCase
_NAME_BEFORE = re.compile(
    r"[\w)\]]\.$"  # an attribute
    r"|\w\($"  # a first argument
    r"|\b(def|class|import|lambda|fn|func|function|struct|let|const|var) $"
    r"|[\w)\]'\"] ?([=+*%<>/]=?|-=|:=|!=) ?$"  # the right side of an operator
)
_NAME_BEHIND = re.compile(
    r"[(\[]"  # a call, an element
    r"|\.\w"
    r"| ?([+*/%-]?=|:=|==|!=)"
    r"| [+*%<>] "
)
_RETURNED = re.compile(r"\b(return|yield|raise) $")
_TESTED = re.compile(r"\b(in|if|elif|while|return|yield) $")


def token_classes(pieces: Sequence[str], *, specials: Collection[str] = ()) -> list[TokenClass]:
    """The class of each piece of one text; `specials` are tokens that are no text.

    A run of letters that nothing marks as a name is a word: bare names inside an expression count as words.
    """
    text = "".join(pieces)
    runs = [(match.start(), match.end()) for match in _RUN.finditer(text)]
    classes: list[TokenClass] = []
    begin, at = 0, 0
    for piece in pieces:
        end = begin + len(piece)
        while at < len(runs) and runs[at][1] <= begin:
            at += 1
        last = at
        while last + 1 < len(runs) and runs[last + 1][0] < end:
            last += 1
        touched = at < len(runs) and runs[last][0] < end
        if not piece or piece in specials or "\ufffd" in piece:
            classes.append(TokenClass.OTHER)
        elif touched:
            classes.append(_run_class(text, *runs[last]))
        else:
            classes.append(_unworded_class(piece))
        begin = end
    return classes


def _run_class(text: str, begin: int, end: int) -> TokenClass:
    run = text[begin:end]
    if _NUMBER.fullmatch(run):
        return TokenClass.NUMBER
    if run.lower() in KEYWORDS:
        return TokenClass.WORD
    before, behind = text[max(0, begin - 12) : begin], text[end : end + 4]
    if _NAME.search(run) or _NAME_BEFORE.search(before) or _NAME_BEHIND.match(behind):
        return TokenClass.IDENTIFIER
    returned = _RETURNED.search(before) and behind[:1] == "\n"
    tested = _TESTED.search(before) and behind[:2] == ":\n"
    looped = before.endswith("for ") and behind == " in "
    return TokenClass.IDENTIFIER if returned or tested or looped else TokenClass.WORD


def _unworded_class(piece: str) -> TokenClass:
    if piece.isspace():
        return TokenClass.WHITESPACE
    marks = (c for c in piece if not c.isspace())
    if all(category(c)[0] == "P" or (category(c) in ("Sm", "Sc", "Sk") or c.isascii()) for c in marks):
        return TokenClass.PUNCTUATION
    return TokenClass.OTHER


def pieces_of(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text that each id adds to those before it; "" where it leaves a character unfinished.

    Each is decoded behind the piece before it, so that it has the space it has in company.
    """
    pieces = []
    before, done = 0, 0  # the piece before begins and ends here
    for at in range(len(ids)):
        known, whole = decode(ids[before:done]), decode(ids[before : at + 1])
        if whole.endswith("\ufffd") or len(whole) <= len(known):
            pieces.append("")
            continue
        pieces.append(whole[len(known) :])
        before, done = done, at + 1
    return pieces
