"""Those parts of a JSON schema that may have too many ways to go on, as schemas of their own for a trial.

The grammar library counts the ways only where an output comes to them: a schema that is small at its beginning compiles
whatever is inside it.
"""

from __future__ import annotations

from typing import Any

from space_common.grammar import schemas_of

from space_router.text import written_numbers
from space_router.text.schema_walk import Node, as_list, as_values, nodes_of, target_of

MANY_WAYS = 500  # a third of what the library takes: optional properties of an object, or of all of its alternatives
MOST_TRIED = 16  # parts of a grammar, those with the most ways first

_MOST_DEPTH = 100  # of references and alternatives


def parts_to_try(kind: str, source: str) -> list[str]:
    """Return the parts of a grammar's schemas to be compiled by themselves, as JSON; `kind`, `source`: see Grammar."""
    found: list[tuple[int, str]] = []
    if len(source) < MANY_WAYS * len('"a":{},'):
        return []
    for schema in schemas_of(kind, source):
        ways = _Ways(schema)
        for node in nodes_of(schema):
            if (count := ways.of(node)) >= MANY_WAYS and (kind == "lark" or node is not schema):
                found.append((count, written_numbers.as_bytes(_alone(schema, node)).decode()))
    found.sort(key=lambda part: -part[0])
    return list(dict.fromkeys(part for _, part in found))[:MOST_TRIED]


def _alone(schema: Node, node: Node) -> Node:
    """Return a part with what it may refer to."""
    whole = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema} | node
    return {key: value for key, value in whole.items() if key != "x-guidance"}


class _Ways:
    """Counts the optional properties that may come next where a value of a schema begins."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def of(self, node: Any, depth: int = 0) -> int:
        if not isinstance(node, dict) or depth > _MOST_DEPTH:
            return 0
        if id(node) not in self._known:
            self._known[id(node)] = 0  # in a schema that is a part of itself
            properties, required = as_values(node.get("properties")), as_list(node.get("required"))
            count = max(0, len(properties) - len(required)) + len(as_values(node.get("patternProperties")))
            inner = [one for key in ("anyOf", "oneOf", "allOf") for one in as_list(node.get(key))]
            inner.append(target_of(self._root, node))
            self._known[id(node)] = count + sum(self.of(one, depth + 1) for one in inner)
        return self._known[id(node)]
