"""`bad_words` beside a grammar: leave out the texts that the grammar lists and that have a bad word.

The worker bans the tokens of a bad word. A grammar that allows the word would have it spelled by other tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import orjson

from space_router.engine.request.request import Grammar
from space_router.errors import InvalidRequest
from space_router.text import written_numbers
from space_router.text.schema_walk import LISTS_OF_SCHEMAS, NAMED_SCHEMAS, target_of

_MOST_TEXTS, _MOST_LETTERS = 32, 128  # of a regular expression; one with more is left as it is
_MOST_WORK = 2**16  # letters of a grammar times bad words: at most .2 s of the event loop on a slow machine
_ANCHORED = re.compile(r"\^(?P<inner>.*)\$", re.DOTALL)
_LETTERS = re.compile(r"[^.^$*+{}\[\]\\()|?]+(?!\?)|[^.^$*+{}\[\]\\()|?](?=\?)")
"""As many letters as no `?` is about the last of, or one that it is about."""


def without_bad_words(grammar: Grammar | None, words: Sequence[str] | None) -> Grammar | None:
    """Return a grammar without the texts, constants and keys that it lists and that have a bad word.

    Where both are too large to be compared, the grammar is returned as it is, and only the tokens of the words as they
    are written stay banned. Raises InvalidRequest if no text is left.
    """
    if grammar is None or (bad := _pattern_of(words)) is None:
        return grammar
    if len(grammar.source) * len(words or ()) > _MOST_WORK:
        return grammar
    try:
        return _without(grammar, bad)
    except RecursionError:  # refused for its depth where it is compiled
        return grammar


def _without(grammar: Grammar, bad: re.Pattern[str]) -> Grammar:
    if grammar.kind == "json_schema":
        schema = written_numbers.loads(grammar.source)
        left = _Filter(bad, schema).of(schema)
        if left is False:
            raise _contradiction("every value that the schema allows")
        return grammar if left == schema else replace(grammar, source=written_numbers.as_bytes(left).decode())
    texts = orjson.loads(grammar.source) if grammar.kind == "choice" else None
    texts = _texts_of(grammar.source) if grammar.kind == "regex" else texts
    if texts is None:
        return grammar
    kept = [text for text in texts if not bad.search(text)]
    if not kept:
        raise _contradiction("every text that the output may be")
    return grammar if len(kept) == len(texts) else Grammar("choice", orjson.dumps(kept).decode())


def _pattern_of(words: Sequence[str] | None) -> re.Pattern[str] | None:
    """Return what finds a bad word that is no part of a longer one; None: there are none."""
    found = [_as_word(stripped) for word in words or () if (stripped := word.strip())]
    return re.compile("|".join(found)) if found else None


def _contradiction(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"`bad_words` has a word of {what}, so nothing is left to answer. Leave one of both out.",
        param="bad_words",
        code="contradictory_constraints",
    )


def _as_word(text: str) -> str:
    """Return a pattern of a text that is no part of a longer word."""
    return r"(?<!\w)" * bool(re.match(r"\w", text)) + re.escape(text) + r"(?!\w)" * bool(re.search(r"\w$", text))


class _Filter:
    """Filters the schemas of one root, each once."""

    def __init__(self, bad: re.Pattern[str], root: dict[str, Any]) -> None:
        self._bad, self._root = bad, root
        self._known: dict[int, Any] = {}  # by id of a schema, which the root keeps

    def of(self, schema: Any) -> Any:
        """Return a schema without what has a bad word; False: no value is left."""
        if not isinstance(schema, Mapping):
            return schema
        if id(schema) not in self._known:
            self._known[id(schema)] = schema  # what refers to itself is not empty for that
            self._known[id(schema)] = self._filtered({**schema})
        return self._known[id(schema)]

    def _filtered(self, left: dict[str, Any]) -> Any:
        for key in ("items", "additionalProperties", "additionalItems"):
            if key in left:
                left[key] = self.of(left[key])
        for key in LISTS_OF_SCHEMAS:
            if isinstance(left.get(key), list):
                left[key] = [self.of(one) for one in left[key]]
        for key in NAMED_SCHEMAS:
            if isinstance(left.get(key), Mapping):
                left[key] = {name: self.of(one) for name, one in left[key].items()}
        if isinstance(left.get("properties"), Mapping):
            left["properties"] = {
                name: False if self._has_word(name) else one for name, one in left["properties"].items()
            }
        return False if self._is_empty(left) or not self._keep_literals(left) else left

    def _is_empty(self, left: dict[str, Any]) -> bool:
        """Return whether the parts of a filtered schema leave no value. Alternatives that are empty are dropped."""
        target = target_of(self._root, left)
        if target is not None and self.of(target) is False:
            return True
        for key in ("anyOf", "oneOf"):
            if isinstance(left.get(key), list) and left[key]:
                left[key] = [one for one in left[key] if one is not False]
                if not left[key]:
                    return True
        if any(one is False for one in left.get("allOf") or ()):
            return True
        if left.get("type") == "object":
            known, required = left.get("properties") or {}, left.get("required")
            names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
            return any(known.get(name) is False or self._has_word(name) for name in names)
        least = left.get("minItems", 0)
        return left.get("type") == "array" and left.get("items") is False and isinstance(least, int) and least > 0

    def _keep_literals(self, left: dict[str, Any]) -> bool:
        """Drop the constants with a bad word. Returns whether any is left, or there were none."""
        listed = [left["const"]] if "const" in left else left.get("enum")
        if not isinstance(listed, list):
            listed = _listed(left)
        if listed is None:
            return True
        kept = [one for one in listed if not self._has_word(one)]
        if len(kept) < len(listed):
            left.pop("pattern", None)
            left.pop("const", None)
            left["enum"] = kept
        return bool(kept)

    def _has_word(self, value: Any) -> bool:
        return self._bad.search(written_numbers.as_bytes(value).decode()) is not None


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of a schema that has few without listing them; None: it has others."""
    match schema.get("type"):
        case "boolean":
            return [True, False]
        case "null":
            return [None]
        case "string" if isinstance(schema.get("pattern"), str) and (found := _ANCHORED.fullmatch(schema["pattern"])):
            return _texts_of(found["inner"])
        case _:
            return None


def _texts_of(pattern: str) -> list[str] | None:
    """Return the texts that a regular expression matches if it is made of letters, groups, `|` and `?`; None: it may
    match others, or too many."""
    if len(pattern) > _MOST_LETTERS:
        return None
    try:
        reader = _Letters(pattern)
        found = reader.alternatives()
    except ValueError:
        return None
    return sorted(found) if reader.at == len(pattern) else None


class _Letters:
    """Reads a regular expression of few texts. Raises ValueError for another."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternatives(self) -> set[str]:
        found = self._sequence()
        while self._takes("|"):
            found |= self._sequence()
        return found

    def _sequence(self) -> set[str]:
        found = {""}
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            one = self._piece()
            if self._takes("?"):
                one = one | {""}
            if len(found) * len(one) > _MOST_TEXTS:
                raise ValueError
            found = {before + behind for before, behind in product(found, one)}
        return found

    def _piece(self) -> set[str]:
        if self._takes("("):
            if not self._takes("?:") and self._pattern.startswith("?", self.at):
                raise ValueError
            found = self.alternatives()
            if not self._takes(")"):
                raise ValueError
            return found
        letters = _LETTERS.match(self._pattern, self.at)
        if letters is None:
            raise ValueError
        self.at = letters.end()
        return {letters[0]}

    def _takes(self, word: str) -> bool:
        found = self._pattern.startswith(word, self.at)
        self.at += len(word) * found
        return found
