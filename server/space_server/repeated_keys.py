"""Keeps the keys of each JSON object apart: which ids would write a key again.

A context-free grammar cannot know the keys that an object has. This automaton runs over the same bytes beside it:

    {"a": 1, "b": {"a": 2, "a       the open objects have the keys {a, b} and {a}; ids that begin with " are impossible

Keys are compared as written. So that a key can be written in one way only, `\\u` escapes in keys are allowed only for
control characters without a short escape, in lower-case letters, as the grammar writes the names that a schema lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from space_common.json_places import JSON, NOTHING, SPECIAL, JsonPlaces, Units
from space_kernels.sampling.sampling_params import IdBits

_QUOTE, _BACKSLASH, _COMMA = 0x22, 0x5C, 0x2C
_SPACE = frozenset(b" \t\r\n")
_NO_KEYS: frozenset[bytes] = frozenset()

_ESCAPES = frozenset(
    [b"\\" + bytes((letter,)) for letter in b'bfnrt"\\']
    + [b"\\u%04x" % code for code in (*range(0x20), 0x7F) if code not in b"\b\f\n\r\t"]
)
"""The escapes that a key may have."""
_ESCAPES_BEGUN = frozenset(escape[:length] for escape in _ESCAPES for length in range(1, len(escape)))
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")


class _Mode(IntEnum):
    PLACE = 0  # outside JSON texts
    VALUE = 1  # at the beginning of a JSON text
    BETWEEN = 2  # in an object or a list, in no text
    TEXT = 3  # in a string that is no key
    KEY = 4


class _Frame(NamedTuple):
    """An open object or list."""

    keys: frozenset[bytes] | None  # as written; None: a list
    outer: _Frame | None


class KeyState(NamedTuple):
    """Where an output stands. It does not change: looking ahead keeps the states before."""

    mode: _Mode
    place: int  # the state of JsonPlaces, or the one behind the JSON text
    frame: _Frame | None = None  # the innermost
    at_key: bool = False  # between: a string that begins now is a key
    held: Units = ()  # place: the units that a target may begin with
    key: bytes = b""  # as written so far
    escape: bytes = b""  # text: a backslash that is not followed yet; key: an escape that is not complete


class RepeatedKeys:
    """The automaton of one grammar. `tokens`: the texts of the vocabulary."""

    def __init__(self, tokens: KeyTokens, places: JsonPlaces) -> None:
        self._tokens = tokens
        self._places = places.states
        self._longest = [max([len(text) for text, _ in one.targets], default=1) for one in self._places]
        self._skips_text = [
            all(len(text) == 1 and text[0] >= SPECIAL for text, _ in one.targets) for one in self._places
        ]
        self.start = self._go_to(0 if self._places else JSON, NOTHING)

    def advance(self, state: KeyState, id_: int) -> KeyState | None:
        """Return the state behind an id; None if it repeats a key."""
        text = self._tokens.texts[id_]
        if state.mode is _Mode.TEXT and not state.escape and id_ not in self._tokens.marked:
            return state
        if state.mode is _Mode.PLACE and state.place == NOTHING:
            return state
        if text and id_ not in self._tokens.special:
            found: KeyState | None = state
            for byte in text:
                found = self._step(found, byte) if found is not None else None
            return found
        return self._step(state, SPECIAL + id_)

    def without_repeats(self, state: KeyState, possible: IdBits) -> IdBits:
        """Return `possible` without the ids that would repeat a key. [ceil(V / 32)]"""
        found = [id_ for id_ in self._repeats(state, possible) if possible[id_ >> 5] >> (id_ & 31) & 1]
        if found:
            possible = possible.copy()
            for id_ in found:
                possible[id_ >> 5] &= ~np.int32(np.uint32(1 << (id_ & 31)).view(np.int32))
        return possible

    def may_be_stuck(self, state: KeyState) -> bool:
        """Return whether a key must come, or goes on, and its object has keys that begin alike."""
        keys = None if state.frame is None else state.frame.keys
        if not keys or not (state.mode is _Mode.KEY or (state.mode is _Mode.BETWEEN and state.at_key)):
            return False
        return state.mode is _Mode.BETWEEN or any(key.startswith(state.key) for key in keys)

    def into_keys(self, state: KeyState, possible: IdBits) -> Iterator[tuple[int, KeyState]]:
        """Return the possible ids behind which `may_be_stuck` holds, and the states there."""
        tokens = self._tokens
        if state.frame is None:
            return
        if state.mode is _Mode.KEY:
            rests = {key[len(state.key) :] for key in state.frame.keys or () if key.startswith(state.key)}
            starts = {rest[:length] for rest in rests for length in range(1, min(len(rest), tokens.longest_text) + 1)}
            ids = [id_ for start in starts for id_ in tokens.by_text.get(start, ())] + [*tokens.quoted_commas]
        else:
            ids = [*tokens.quoted] if state.mode is _Mode.TEXT or state.at_key else [*tokens.commas]
        for id_ in ids:
            if possible[id_ >> 5] >> (id_ & 31) & 1:
                behind = self.advance(state, id_)
                if behind is not None and self.may_be_stuck(behind):
                    yield id_, behind

    def _repeats(self, state: KeyState, possible: IdBits) -> Iterator[int]:
        if state.mode is _Mode.PLACE and state.place == NOTHING:
            return
        tokens = self._tokens
        if state.mode is _Mode.KEY and state.frame is not None and state.frame.keys is not None:
            begun = len(state.key)
            for key in state.frame.keys:
                if len(key) - begun <= tokens.longest and key.startswith(state.key):
                    yield from tokens.closing.get(key[begun:], ())
            if len(state.escape) > 1:  # only hexadecimal digits follow
                yield from self._tried(state, _ids_in(possible), possible)
            else:
                yield from self._tried(state, tokens.any_key, possible)
                yield from self._tried(state, tokens.escapes, possible)
        elif state.mode is _Mode.BETWEEN and state.at_key:
            if state.frame is not None and state.frame.keys:
                for key in state.frame.keys:
                    yield from tokens.whole.get(key, ())
            yield from self._tried(state, tokens.any_key, possible)
            yield from self._tried(state, tokens.escapes, possible)
        else:
            has_keys = state.frame is not None
            yield from self._tried(state, tokens.any_key if has_keys else tokens.two_keys, possible)

    def _tried(self, state: KeyState, ids: Sequence[int], possible: IdBits) -> Iterator[int]:
        """Return those of `ids` that are possible and repeat a key."""
        for id_ in ids:
            if possible[id_ >> 5] >> (id_ & 31) & 1 and self.advance(state, id_) is None:
                yield id_

    def _go_to(self, place: int, then: int) -> KeyState:
        return KeyState(_Mode.VALUE, then) if place == JSON else KeyState(_Mode.PLACE, place)

    def _step(self, state: KeyState, unit: int) -> KeyState | None:
        """Return the state behind a byte or a special id; None if it repeats a key."""
        mode = state.mode
        if mode is _Mode.TEXT:
            if state.escape:
                return state._replace(escape=b"")
            if unit == _BACKSLASH:
                return state._replace(escape=b"\\")
            return self._behind_text(state) if unit == _QUOTE else state
        if mode is _Mode.BETWEEN:
            return self._between(state, unit)
        if mode is _Mode.KEY:
            return self._in_key(state, unit)
        if mode is _Mode.PLACE:
            return self._outside(state, unit)
        if unit in _SPACE:
            return state
        if unit in _OPENING:
            return self._opened(state, unit)
        if unit == _QUOTE:
            return state._replace(mode=_Mode.TEXT)
        return self._step(self._go_to(state.place, NOTHING), unit)  # a number or a word

    @staticmethod
    def _opened(state: KeyState, unit: int) -> KeyState:
        keys = _NO_KEYS if unit == 0x7B else None
        return KeyState(_Mode.BETWEEN, state.place, _Frame(keys, state.frame), keys is not None)

    def _behind_text(self, state: KeyState) -> KeyState:
        if state.frame is None:
            return self._go_to(state.place, NOTHING)
        return state._replace(mode=_Mode.BETWEEN, at_key=False)

    def _between(self, state: KeyState, unit: int) -> KeyState:
        if unit == _QUOTE:
            return state._replace(mode=_Mode.KEY if state.at_key else _Mode.TEXT, key=b"")
        if unit in _OPENING:
            return self._opened(state, unit)
        if unit in _CLOSING and state.frame is not None:
            return self._behind_text(KeyState(_Mode.TEXT, state.place, state.frame.outer))
        if unit == _COMMA and state.frame is not None:
            return state._replace(at_key=state.frame.keys is not None)
        return state

    def _in_key(self, state: KeyState, unit: int) -> KeyState | None:
        if unit >= SPECIAL or state.frame is None or state.frame.keys is None:
            return None
        if unit == _QUOTE and not state.escape:
            if state.key in state.frame.keys:
                return None
            frame = _Frame(state.frame.keys | {state.key}, state.frame.outer)
            return KeyState(_Mode.BETWEEN, state.place, frame)
        key = state.key + bytes((unit,))
        if not state.escape and unit != _BACKSLASH:
            return state._replace(key=key)
        escape = state.escape + bytes((unit,))
        if escape in _ESCAPES:
            return state._replace(key=key, escape=b"")
        return state._replace(key=key, escape=escape) if escape in _ESCAPES_BEGUN else None

    def _outside(self, state: KeyState, unit: int) -> KeyState | None:
        if state.place < 0:
            return state
        place = self._places[state.place]
        if place.searches:
            if unit < SPECIAL and self._skips_text[state.place]:
                return state
            held = (*state.held, unit)[-self._longest[state.place] :]
            found = [(len(text), target) for text, target in place.targets if held[-len(text) :] == text]
            if found:
                return self._go_to(max(found)[1], place.then)
            return state._replace(held=held)
        if not state.held and unit in _SPACE and not any(text[0] == unit for text, _ in place.targets):
            return state
        held = (*state.held, unit)
        for text, target in place.targets:
            if text == held:
                return self._go_to(target, place.then)
        if any(text[: len(held)] == held for text, _ in place.targets):
            return state._replace(held=held)
        found_state: KeyState | None = self._go_to(place.otherwise, place.then)
        for one in held:
            found_state = self._step(found_state, one) if found_state is not None else None
        return found_state


_KEY_IN_TOKEN = re.compile(rb'[{,][ \t\r\n]*"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEY_AT_START = re.compile(rb'[ \t\r\n]*"((?:[^"\\]|\\.)*)"', re.DOTALL)
_AN_ESCAPE = re.compile(rb"\\u|^u[0-9a-fA-F]{4}|^u[0-9a-fA-F]{0,3}$")


@dataclass(frozen=True)
class KeyTokens:
    """The ids of a vocabulary whose texts can end keys.

    `closing`: by what stands before a quote, so that they end a key whose rest that is. `whole`: ids that begin with a
    key. `any_key`: those with a key behind a bracket or comma, `two_keys` with two. `escapes`: with a `\\u`.
    `marked`: with a quote or a backslash, and special ones. `quoted`: with a quote, `commas` with a comma,
    `quoted_commas` with both. `by_text`: ids without either.
    """

    texts: Sequence[bytes]
    special: frozenset[int]
    closing: dict[bytes, list[int]]
    whole: dict[bytes, list[int]]
    any_key: tuple[int, ...]
    two_keys: tuple[int, ...]
    escapes: tuple[int, ...]
    marked: frozenset[int]
    quoted: tuple[int, ...]
    commas: tuple[int, ...]
    quoted_commas: tuple[int, ...]
    by_text: dict[bytes, list[int]]
    longest: int  # bytes before a quote
    longest_text: int

    @classmethod
    def of(cls, texts: Sequence[bytes], special: Iterable[int]) -> KeyTokens:
        special = frozenset(special)
        closing: dict[bytes, list[int]] = {}
        whole: dict[bytes, list[int]] = {}
        by_text: dict[bytes, list[int]] = {}
        any_key, two_keys, escapes, quoted, commas, marked = [], [], [], [], [], set(special)
        for id_, text in enumerate(texts):
            if not text or id_ in special:
                marked.add(id_)
                continue
            has_escape = _AN_ESCAPE.search(text) is not None
            if has_escape:
                escapes.append(id_)
            if b"\\" in text:
                marked.add(id_)
            if b"," in text:
                commas.append(id_)
            if b'"' not in text:
                by_text.setdefault(text, []).append(id_)
                continue
            marked.add(id_)
            quoted.append(id_)
            for place, byte in enumerate(text):
                if byte == _QUOTE:
                    closing.setdefault(text[:place], []).append(id_)
            if found := _KEY_AT_START.match(text):
                whole.setdefault(found[1], []).append(id_)
            if _KEY_IN_TOKEN.search(text) or has_escape:
                any_key.append(id_)
            if text.count(b'"') >= 4:
                two_keys.append(id_)
        both = set(quoted).intersection(commas)
        return cls(
            texts, special, closing, whole, tuple(any_key), tuple(two_keys), tuple(escapes), frozenset(marked),
            tuple(quoted), tuple(commas), tuple(sorted(both)), by_text,
            longest=max(map(len, closing), default=0),
            longest_text=max(map(len, by_text), default=0),
        )  # fmt: skip


def _ids_in(bits: IdBits) -> list[int]:
    return [int(id_) for id_ in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]
