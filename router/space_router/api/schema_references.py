"""References inside a JSON schema, as the grammar library has to be given them.

It takes a `$ref` only as a URI writes it, and no restriction beside one in a schema that contains itself. Such a schema
is written out in `$defs`, its restrictions beside what it refers to, and is referred to there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import quote

from space_router.text import written_numbers
from space_router.text.schema_walk import (
    LISTS_OF_SCHEMAS,
    MOST_PARTS,
    Node,
    as_list,
    as_values,
    parts_of,
    resolve,
    target_of,
)

_IN_FRAGMENT = "!$&'()*+,;=:@/?-._~%"
_PREFIX = "spaceserve-"  # of the names in `$defs`
_MOST_WRITTEN = 256  # schemas
_MOST_NODES = 20_000  # of a schema; a larger one is beyond what a grammar may have

_RESTRICTING = frozenset(
    [
        *("type", "const", "enum", "anyOf", "oneOf", "format", "pattern", "minLength", "maxLength"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ]
)
_OWN = frozenset({"$defs", "definitions", "$schema", "$id", "id", "$anchor"})
"""Keywords that stay where a schema is when what it asks for is written out elsewhere."""


def as_uri(reference: str) -> str:
    """Return a reference as a URI writes it: `#/$defs/List<int>` as `#/$defs/List%3Cint%3E`."""
    address, hash_, fragment = reference.partition("#")
    first, *others = quote(fragment, safe=_IN_FRAGMENT).split("%")
    return address + hash_ + first + "".join(f"%{part}" if _is_octet(part) else f"%25{part}" for part in others)


def _is_octet(part: str) -> bool:
    return len(part) >= 2 and all(character in "0123456789abcdefABCDEF" for character in part[:2])


def may_stand_beside_reference(key: str, value: Any) -> bool:
    """Return whether a keyword restricts, or may hold what is referred to; others hinder the library."""
    return key in _RESTRICTING | _OWN or key in ("$ref", "allOf") or isinstance(value, Mapping | list)


def is_left_out(schema: Mapping[str, Any], kept: Node, reference: str) -> bool:
    """Return whether `schema` has what a reference names, and what is `kept` of it has not."""
    if not reference.startswith("#/"):
        return False
    try:
        resolve(schema, reference)
    except LookupError:
        return False
    try:
        resolve(kept, reference)
    except LookupError:
        return True
    return False


def prepare(root: Node, nodes: list[Node], leave_open: Callable[[str], None]) -> None:
    """Change a schema, with its nodes, in place. `leave_open` gets each keyword taken out."""
    if len(nodes) > _MOST_NODES:
        return
    for node in nodes:
        _leave_sizes_open(root, node, leave_open)
    circles = _circles(root, nodes)
    if circles:
        _write_out(root, nodes, circles)


def _leave_sizes_open(root: Node, node: Node, leave_open: Callable[[str], None]) -> None:
    """Leave open the number of properties where schemas that are put together have optional ones."""
    tops = parts_of(root, node)
    options = [one for key in ("anyOf", "oneOf") for one in as_list(node.get(key)) if isinstance(one, dict)]
    for joined in (tops, *([*tops, *parts_of(root, option)] for option in options)):
        sized = [top for top in joined if top.keys() & {"minProperties", "maxProperties"}]
        if len(joined) < 2 or not sized:
            continue
        required = {name for top in joined for name in _strings(top.get("required"))}
        if all(required >= _strings(top.get("properties")) for top in joined):
            continue
        for top in sized:
            for key in ("minProperties", "maxProperties"):
                if top.pop(key, None) is not None:
                    leave_open(key)


def _strings(value: Any) -> set[str]:
    return {one for one in value if isinstance(one, str)} if isinstance(value, list | dict) else set()


def _circles(root: Node, nodes: list[Node]) -> dict[int, int]:
    """Return, for each schema that contains itself, by its id, a number that it shares with those that it contains and
    that contain it: the strongly connected components, after Kosaraju."""
    edges = {id(node): [id(one) for one in _inner(root, node)] for node in nodes}
    backward: dict[int, list[int]] = {place: [] for place in edges}
    for place, inner in edges.items():
        for one in inner:
            backward.setdefault(one, []).append(place)
    finished: list[int] = []
    seen: set[int] = set()
    for start in edges:
        finished += _finished(start, edges, seen)
    circles: dict[int, int] = {}
    seen.clear()
    for number, start in enumerate(reversed(finished)):
        component = _finished(start, backward, seen)
        if len(component) > 1 or start in edges.get(start, ()):
            circles |= dict.fromkeys(component, number)
    return circles


def _finished(start: int, edges: Mapping[int, list[int]], seen: set[int]) -> list[int]:
    """Return what is reached from `start` and not seen yet, each behind what is reached from it."""
    found: list[int] = []
    waiting = [(start, False)]
    while waiting:
        place, is_done = waiting.pop()
        if is_done:
            found.append(place)
        elif place not in seen:
            seen.add(place)
            waiting.append((place, True))
            waiting += [(one, False) for one in edges.get(place, ())]
    return found


def _inner(root: Node, node: Node) -> Iterator[Node]:
    """Yield the schemas that a schema asks for, and the one that it refers to."""
    for key in _RESTRICTING | {"allOf"}:
        value = node.get(key)
        if key in ("properties", "patternProperties"):
            yield from (one for one in as_values(value) if isinstance(one, dict))
        elif key in LISTS_OF_SCHEMAS and isinstance(value, list):
            yield from (one for one in value if isinstance(one, dict))
        elif key in ("items", "additionalProperties", "additionalItems") and isinstance(value, dict):
            yield value
    if (target := target_of(root, node)) is not None:
        yield target


def _write_out(root: Node, nodes: list[Node], circles: Mapping[int, int]) -> None:
    written: list[tuple[Node, str]] = []
    names: dict[bytes, str] = {}  # of equal schemas, which are written once
    definitions: Node = {}
    for node in nodes:
        circle = circles.get(id(node))
        if circle is None or len(definitions) == _MOST_WRITTEN:
            continue
        join = _Join(root, circles, circle)
        try:
            parts = join.parts(node)
        except LookupError:
            continue
        is_joined = len(parts) > 1 or (len(parts) == 1 and bool(node.keys() & {"anyOf", "oneOf"}) and len(parts[0]) > 1)
        if is_joined and join.num_references:
            name = names.setdefault(written_numbers.as_bytes(node), f"{_PREFIX}{len(names)}")
            definitions[name] = parts[0] if len(parts) == 1 else {"allOf": parts}
            written.append((node, name))
    for node, name in written:
        for key in node.keys() - _OWN:
            del node[key]
        node["$ref"] = f"#/$defs/{name}"
    if definitions:
        given = root.get("$defs")
        root["$defs"] = (given if isinstance(given, dict) else {}) | definitions


@dataclass
class _Join:
    """Puts a schema together from those of its circle that it refers to, without a reference to one of them."""

    root: Node
    circles: Mapping[int, int]
    circle: int
    num_references: int = 0  # that were followed
    _num_parts: int = 0

    def parts(self, node: Node, above: frozenset[int] = frozenset()) -> list[Any]:
        """Return schemas that together ask for what this one does. Raises LookupError if they do not end."""
        self._num_parts += 1
        if id(node) in above or self._num_parts > MOST_PARTS:
            raise LookupError("The schema is its own part, or has too many.")
        above |= {id(node)}
        rest = {key: value for key, value in node.items() if key in _RESTRICTING}
        for key in rest.keys() & {"anyOf", "oneOf"}:
            if isinstance(rest[key], list):
                rest[key] = [self._option(one, above) for one in rest[key]]
        parts: list[Any] = [rest] if rest else []
        for one in as_list(node.get("allOf")):
            parts += self.parts(one, above) if self._is_inside(one) else [one]
        target = target_of(self.root, node)
        if self._is_inside(target):
            self.num_references += 1
            parts += self.parts(target, above)
        elif "$ref" in node:
            parts.append({"$ref": node["$ref"]})
        return parts

    def _option(self, option: Any, above: frozenset[int]) -> Any:
        if not self._is_inside(option) or not option.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
            return option
        parts = self.parts(option, above)
        return parts[0] if len(parts) == 1 else {"allOf": parts}

    def _is_inside(self, node: Any) -> TypeGuard[Node]:
        return isinstance(node, dict) and self.circles.get(id(node)) == self.circle
