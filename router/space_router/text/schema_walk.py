"""The schemas inside a JSON schema, what a local reference refers to, and the schemas that make up one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Node = dict[str, Any]

LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
MOST_PARTS = 64  # that one schema is put together from; beyond them it stays as it is


def resolve(root: Any, reference: str) -> Any:
    """Return what `#/...` refers to. Raises LookupError if there is nothing, or it is no such reference."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        raise LookupError(reference)
    found = root
    for name in unquote(reference[2:]).split("/"):
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal():
            found = found[int(key[:9])]
        elif isinstance(found, Mapping):
            found = found[key]
        else:
            raise LookupError(reference)
    return found


def nodes_of(root: Node) -> Iterator[Node]:
    """Yield the schemas in `root`, and the objects that may be referred to as schemas."""
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        yield node
        for key, value in node.items():
            if key in ("const", "enum", "default", "example", "examples"):
                continue
            inner = as_values(value) if key in NAMED_SCHEMAS else [value]
            inner = value if key in LISTS_OF_SCHEMAS and isinstance(value, list) else inner
            waiting += [one for one in inner if isinstance(one, dict)]


def as_values(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else []


def target_of(root: Node, node: Node) -> Node | None:
    """Return the schema that a `$ref` names, if it is one in `root`."""
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return None
    try:
        found = resolve(root, reference)
    except LookupError:
        return None
    return found if isinstance(found, dict) else None


def parts_of(root: Any, node: Any, branches: Sequence[str] = ("allOf",)) -> list[Node]:
    """Return a schema, and those of its `$ref` and of its keywords in `branches`, and so on, each once."""
    parts: list[Node] = []
    waiting = [node]
    while waiting and len(parts) < MOST_PARTS:
        part = waiting.pop(0)
        if not isinstance(part, dict) or any(part is one for one in parts):
            continue
        parts.append(part)
        waiting += [one for key in branches for one in as_list(part.get(key))]
        waiting.append(target_of(root, part))
    return parts


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
