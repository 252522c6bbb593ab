"""Where JSON texts stand in an output that a grammar constrains, as a small automaton over its bytes and special ids.

The router knows it, because it writes the grammar; the worker follows it, to keep the keys of each object apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Units: TypeAlias = tuple[int, ...]
"""A text: its UTF-8 bytes, and SPECIAL + id for a special token."""

SPECIAL = 256

JSON, NOTHING = -1, -2
"""States of an output beside those of JsonPlaces: a JSON text begins here; no JSON text follows."""


@dataclass(frozen=True)
class PlaceState:
    """A state outside JSON texts: which texts lead out of it.

    `searches`: the text goes on until the first of them has come. Otherwise one of them must stand here, after white
    space; if none does, the output goes on in `otherwise` from here. `then`: the state behind a JSON text that begins
    from this one.
    """

    targets: tuple[tuple[Units, int], ...]
    searches: bool = True
    otherwise: int = NOTHING
    then: int = NOTHING


@dataclass(frozen=True)
class JsonPlaces:
    """The states; the output begins in the first. Without any, the whole output is one JSON text."""

    states: tuple[PlaceState, ...] = ()

    def to_json(self) -> str:
        return json.dumps([[one.targets, one.searches, one.otherwise, one.then] for one in self.states])

    @classmethod
    def from_json(cls, text: str) -> JsonPlaces:
        """Raises ValueError for anything that `to_json` does not write."""
        try:
            return cls(tuple(_state(one) for one in json.loads(text)))
        except (TypeError, KeyError) as error:
            raise ValueError(f"The places of JSON texts cannot be read: {str(error)[:100]}") from error


def _state(written: Sequence[Any]) -> PlaceState:
    targets, searches, otherwise, then = written
    found = tuple((tuple(int(unit) for unit in text), int(target)) for text, target in targets)
    if any(not text for text, _ in found):
        raise ValueError("A place of a JSON text is marked by no text.")
    return PlaceState(found, bool(searches), int(otherwise), int(then))


@dataclass
class PlacesBuilder:
    """Collects states, which can refer to one another before they are filled in."""

    special_ids: Mapping[str, int] = field(default_factory=dict)
    _states: list[PlaceState] = field(default_factory=list)

    def new(self) -> int:
        """Return the number of a state to be filled in by `set`."""
        self._states.append(PlaceState(()))
        return len(self._states) - 1

    def set(self, number: int, state: PlaceState) -> None:
        self._states[number] = state

    def append(self, state: PlaceState) -> int:
        self._states.append(state)
        return len(self._states) - 1

    def insert(self, places: JsonPlaces) -> int:
        """Append the states of an inner text; return the number of its first, JSON if all of it is one JSON text."""
        if not places.states:
            return JSON
        first = len(self._states)

        def move(number: int) -> int:
            return number if number < 0 else number + first

        for one in places.states:
            targets = tuple((text, move(target)) for text, target in one.targets)
            self._states.append(PlaceState(targets, one.searches, move(one.otherwise), move(one.then)))
        return first

    def places(self) -> JsonPlaces:
        return JsonPlaces(tuple(self._states))
