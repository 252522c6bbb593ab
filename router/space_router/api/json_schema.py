"""JSON schemas as clients write them, and the part of them that a grammar can enforce.

A schema without `strict` is taken whatever it asks for: what no grammar can enforce is left open and named in a
warning. With `strict` it is refused, because the client relies on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from space_router.api.javascript_patterns import of_javascript
from space_router.api.schema_references import as_uri, is_left_out, may_stand_beside_reference, prepare
from space_router.api.string_formats import with_bounds
from space_router.errors import InvalidRequest
from space_router.http_server.body import short_repr
from space_router.http_server.warnings import warn
from space_router.text.schema_walk import nodes_of

Schema = Mapping[str, Any]

_OPEN = frozenset(
    {
        "uniqueItems",
        "propertyNames",
        "contains",
        "minContains",
        "maxContains",
        "not",
        "if",
        "then",
        "else",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    }
)
"""Keywords that restrict a value in ways that the grammar does not know."""

_NO_EFFECT: Mapping[str, Callable[[Any], bool]] = {
    "uniqueItems": lambda value: value is False,
    "unevaluatedProperties": lambda value: value is True or value == {},
    "unevaluatedItems": lambda value: value is True or value == {},
    "propertyNames": lambda value: value is True or value in ({}, {"type": "string"}),
    "not": lambda value: value is False,
    "then": lambda value: True,  # named with `if`
    "else": lambda value: True,
    "minContains": lambda value: True,  # named with `contains`
    "maxContains": lambda value: True,
    "dependencies": lambda value: value == {},
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "$dynamicAnchor": lambda value: True,
    "$recursiveAnchor": lambda value: True,
}
"""Keyword -> whether leaving it out changes nothing that is not named already."""

_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""Formats of texts that the grammar enforces."""

_ONE, _MANY, _NAMED = (
    frozenset({"items", "additionalProperties", "additionalItems"}),
    frozenset({"anyOf", "oneOf", "allOf", "prefixItems"}),
    frozenset({"properties", "patternProperties", "$defs", "definitions"}),
)
"""Keywords of one schema, of a list of schemas, and of schemas by name."""

_ANNOTATIONS = frozenset({"default", "example", "examples", "title", "description", "$comment", "deprecated"})
"""Keywords that restrict nothing; beside a `$ref` to an outer schema the grammar library takes them for restrictions.
What they hold is data."""

_OF_EDITORS = frozenset(
    {"markdownDescription", "enumDescriptions", "markdownEnumDescriptions", "defaultSnippets", "tsType"}
)
"""Annotations beyond the standard."""

_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
)
"""Keywords that say nothing of values other than objects."""

_TYPES = frozenset({"object", "array", "string", "number", "boolean", "null"})

_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_SIZES = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_DATA = frozenset({"const", "enum"})
_MOST_EXACT = 2**53  # the grammar's numbers are doubles
_MOST_DIGITS = 2**32  # the grammar counts multiples of a number by its digits without the point
_MOST_SIZE = 2**31  # no output is as long, and the grammar's counters hold no more than twice this


def enforceable(schema: Schema, param: str, *, strict: bool) -> dict[str, Any]:
    """Return the part of a JSON schema that a grammar can enforce. `param`: the request's field, for messages.

    What is left open is named in a warning. Raises InvalidRequest for that with `strict`, and for numbers in `const`
    and `enum` that a double cannot hold.
    """
    walk = _SchemaWalk(param, str(schema.get("$schema")))
    kept = walk.object(schema)
    walk.references(schema, kept)
    name_what_is_left_open(walk.left_open, param, strict=strict)
    return kept


def name_what_is_left_open(keywords: Collection[str], param: str, *, strict: bool) -> None:
    """Warn of keywords of a schema that no grammar enforces. `strict`: raises InvalidRequest instead."""
    if not keywords:
        return
    named = ", ".join(f"`{keyword}`" for keyword in keywords)
    if strict:
        raise InvalidRequest(
            f"`{param}` is strict, and its schema asks for {named}, which cannot be enforced. Leave it out, or set "
            "`strict` to false: then it is left open, and a warning names it.",
            param=param,
            code="unsupported_schema",
        )
    warn(f"The schema in `{param}` asks for {named}, which is not enforced.")


@dataclass
class _SchemaWalk:
    """Goes through a schema and collects what is left open."""

    param: str
    dialect: str = ""  # the schema's `$schema`
    left_open: dict[str, None] = field(default_factory=dict)  # keywords in the order they were met

    def schema(self, value: Any) -> Any:
        """Return a schema's enforceable part; null, which some clients write for no schema, allows everything."""
        if value is None:
            return True
        return self.object(value) if isinstance(value, Mapping) else value

    def object(self, value: Schema) -> dict[str, Any]:
        """Return the enforceable part of a schema that is an object."""
        kept: dict[str, Any] = {}
        value = _modern(value, self.dialect)
        for key, inner in value.items():
            if inner is None and key != "const":
                continue  # as if absent
            if key in _OPEN or (key == "disallow" and "draft-03" in self.dialect):
                self._open(key, inner)
            elif key in _ONE and not isinstance(inner, list):
                kept[key] = self.schema(inner)
            elif (key in _MANY or key == "items") and isinstance(inner, list):
                kept[key] = [self.schema(one) for one in inner]
            elif key in _NAMED and isinstance(inner, Mapping):
                kept[key] = {name: self.schema(one) for name, one in inner.items()}
            elif key == "pattern" and isinstance(inner, str):
                if (pattern := of_javascript(inner)) is None:
                    self._open(key, inner)
                else:
                    kept[key] = pattern
            elif key == "format" and not self._is_known(inner, value.get("type")):
                self._open(f"format: {short_repr(inner)}", inner)
            elif key == "$schema":
                if isinstance(inner, str) and (dialect := _dialect(inner)) is not None:
                    kept[key] = dialect
            elif key == "$ref" and isinstance(inner, str) and not inner.startswith("#"):
                self._open(f"$ref: {short_repr(inner)}", inner)  # nothing is fetched
            elif key == "$ref" and isinstance(inner, str):
                kept[key] = as_uri(inner)
            elif key not in _DATA | _ANNOTATIONS and isinstance(inner, Mapping):
                kept[key] = self.object(inner)  # a place of schemas that a `$ref` may name
            elif key in _SIZES and _is_whole(inner):
                kept[key] = min(int(inner), _MOST_SIZE)
            elif key in _BOUNDS and isinstance(inner, int | float) and not _holds_number(key, inner):
                self._open(f"{key}: {inner}", inner)
            else:
                if key in _DATA:
                    self._check_numbers(key, inner)
                kept[key] = inner
        if "$ref" in kept:
            kept = {key: inner for key, inner in kept.items() if may_stand_beside_reference(key, inner)}
        self._patterns(kept)
        self._sizes(kept)
        if isinstance(kept.get("oneOf"), list):
            kept["oneOf"] = _of_objects(kept["oneOf"])
            if not _are_disjoint(kept["oneOf"]):
                self._open("oneOf", None)  # the grammar takes it for `anyOf`
        return with_bounds(kept)

    def references(self, schema: Schema, kept: dict[str, Any]) -> None:
        """Leave references open to what is left out, and prepare the others. Changes `kept` in place."""
        nodes = list(nodes_of(kept))
        if any(node.keys() & {"$id", "id"} for node in nodes[1:]):
            return  # references begin at those
        for node in nodes:
            reference = node.get("$ref")
            if isinstance(reference, str) and is_left_out(schema, kept, reference):
                del node["$ref"]
                self._open(f"$ref: {short_repr(reference)}", reference)
        prepare(kept, nodes, lambda keyword: self._open(keyword, None))

    def _open(self, keyword: str, value: Any) -> None:
        has_no_effect = _NO_EFFECT.get(keyword)
        if has_no_effect is None or not has_no_effect(value):
            self.left_open.setdefault(keyword)

    @staticmethod
    def _is_known(name: Any, kind: Any) -> bool:
        """Return whether a format is enforced, or only means numbers."""
        return (isinstance(name, str) and name in _FORMATS) or kind in ("integer", "number")

    def _patterns(self, kept: dict[str, Any]) -> None:
        """Leave `patternProperties` open where the grammar cannot tell which pattern a name matches."""
        patterns = kept.get("patternProperties")
        if not isinstance(patterns, Mapping):
            return
        listed = _strings(kept.get("properties"))
        written = {of_javascript(pattern): inner for pattern, inner in patterns.items()}
        overlaps = len(patterns) > 1 or any(_matches(pattern, name) for pattern in written for name in listed)
        if not overlaps and None not in written:
            kept["patternProperties"] = written
        else:
            self._open("patternProperties", patterns)
            del kept["patternProperties"]
            if kept.get("additionalProperties") is not None:
                kept["additionalProperties"] = True  # names that only a pattern allows

    def _sizes(self, kept: dict[str, Any]) -> None:
        """Leave the number of properties open where listed ones are optional, which the grammar does not count."""
        required = _strings(kept.get("required"))
        if _strings(kept.get("properties")) <= required:
            return
        if isinstance(least := kept.get("minProperties"), int) and least <= len(required):
            del kept["minProperties"]  # the required ones are as many
        for key in ("minProperties", "maxProperties"):
            if key in kept:
                self._open(key, kept.pop(key))

    def _check_numbers(self, key: str, value: Any) -> None:
        """Raise InvalidRequest for a number that would be taken for its neighbour."""
        if isinstance(value, Mapping):
            for inner in value.values():
                self._check_numbers(key, inner)
        elif isinstance(value, list):
            for inner in value:
                self._check_numbers(key, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > _MOST_EXACT:
            raise InvalidRequest(
                f"`{self.param}` has {value} in `{key}`: numbers beyond 2^53 are not exact here, so a neighbour "
                "could be generated. Use a string.",
                param=self.param,
                code="unsupported_schema",
            )


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number; JSON readers give those of more than 64 bits as floats."""
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _holds_number(key: str, value: float) -> bool:
    """Return whether the grammar can hold a bound of numbers, or the number that others must be multiples of."""
    if abs(value) > _MOST_EXACT or key != "multipleOf":
        return abs(value) <= _MOST_EXACT
    digits = abs(float(value))
    while digits < _MOST_DIGITS and not digits.is_integer():
        digits *= 10
    return digits < _MOST_DIGITS


def _modern(schema: Schema, dialect: str) -> Schema:
    """Return a schema without what only draft 3 had, and with anchors as they are written now."""
    changed = dict(schema)
    if isinstance(kinds := changed.get("type"), str | list):
        every = kinds if isinstance(kinds, list) else [kinds]
        if "any" in every:
            del changed["type"]
        elif any(isinstance(kind, Mapping) for kind in every) and "anyOf" not in changed:
            changed["anyOf"] = [kind if isinstance(kind, Mapping) else {"type": kind} for kind in every]
            del changed["type"]
    if isinstance(changed.get("required"), bool):
        del changed["required"]  # said of a property
    if isinstance(properties := changed.get("properties"), Mapping) and "required" not in changed:
        names = [name for name, one in properties.items() if isinstance(one, Mapping) and one.get("required") is True]
        changed |= {"required": names} if names else {}
    for key in ("id", "$id"):
        if not _dialect(dialect) and isinstance(anchor := changed.get(key), str) and _ANCHOR.fullmatch(anchor):
            changed["$anchor"] = changed.pop(key)[1:]
    if "draft-03" in dialect:
        if isinstance(base := changed.pop("extends", None), Mapping | list):
            changed["allOf"] = base if isinstance(base, list) else [base]
        if "divisibleBy" in changed:
            changed["multipleOf"] = changed.pop("divisibleBy")
    return changed


_ANCHOR = re.compile(r"#[A-Za-z_][A-Za-z0-9_.-]*")


def without_annotations(value: Any, *, is_named: bool = False) -> Any:
    """Return a schema without what describes values, for one that is too long with it. `is_named`: it holds schemas by
    their names."""
    if isinstance(value, list):
        return [without_annotations(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: inner
        if key in _DATA and not is_named
        else without_annotations(inner, is_named=key in _NAMED and not is_named)
        for key, inner in value.items()
        if is_named or not (key in _ANNOTATIONS or key in _OF_EDITORS or key.startswith("x-"))
    }


def _strings(value: Any) -> frozenset[str]:
    """Return the strings in a list, or the keys of an object; none of anything else."""
    return frozenset(one for one in value if isinstance(one, str)) if isinstance(value, list | Mapping) else frozenset()


def _dialect(uri: str) -> str | None:
    """Return a `$schema` as the grammar library knows it, or None for a dialect that would have to be fetched."""
    if found := re.fullmatch(r"https?://json-schema\.org/draft-0([467])/schema#?", uri):
        return f"http://json-schema.org/draft-0{found[1]}/schema#"
    if found := re.fullmatch(r"https?://json-schema\.org/draft/(2019-09|2020-12)/schema#?", uri):
        return f"https://json-schema.org/draft/{found[1]}/schema"
    return None


def _matches(pattern: str | None, name: str) -> bool:
    """Return whether a name matches a pattern as `of_javascript` writes it; True if it is not known."""
    try:
        return pattern is None or re.search(pattern, name, re.ASCII) is not None
    except re.error:
        return True


def _of_objects(branches: Sequence[Any]) -> list[Any]:
    """Return the branches of a `oneOf`. Those that say something of objects alone, and name no type, allow every other
    value, too; if there are several, such a value matches all of them and so is none of the `oneOf`'s."""
    say_of_objects = [
        isinstance(branch, Mapping)
        and bool(branch.keys() & _OF_OBJECTS)
        and branch.keys() <= _OF_OBJECTS | _ANNOTATIONS
        for branch in branches
    ]
    if sum(say_of_objects) < 2:
        return list(branches)
    pairs = zip(branches, say_of_objects, strict=True)
    return [{"type": "object", **branch} if of_objects else branch for branch, of_objects in pairs]


def _are_disjoint(branches: Sequence[Any]) -> bool:
    """Return whether no value matches two branches: they are of different types, or a property tells them apart."""
    if len(branches) < 2:
        return True
    if not all(isinstance(branch, Mapping) for branch in branches):
        return False
    types = [_types(branch) for branch in branches]
    if None not in types and not _repeats(types):
        return True
    values = [_values(branch) for branch in branches]
    if None not in values:
        return not _repeats(values)
    if _repeats([_TYPES - {"object"} if kinds is None else kinds - {"object"} for kinds in types]):
        return False
    names = frozenset.intersection(*(_strings(branch.get("required")) for branch in branches))
    return any(_tells_apart(name, branches) for name in names)


def _types(branch: Schema) -> frozenset[str] | None:
    """Return the types of a branch's values, integers as numbers; None if it does not say."""
    if "const" in branch or "enum" in branch:
        values = [branch["const"]] if "const" in branch else branch["enum"]
        return frozenset(_type_of(one) for one in values) if isinstance(values, list) else None
    kind = branch.get("type")
    found = [kind] if isinstance(kind, str) else kind
    return frozenset("number" if one == "integer" else str(one) for one in found) if isinstance(found, list) else None


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "number", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "object")


def _tells_apart(name: str, branches: Sequence[Schema]) -> bool:
    """Return whether each branch allows other values of this property."""
    properties = [branch.get("properties") for branch in branches]
    declared = [one.get(name) if isinstance(one, Mapping) else None for one in properties]
    values = [_values(one) if isinstance(one, Mapping) else None for one in declared]
    return None not in values and not _repeats(values)


def _values(schema: Schema) -> frozenset[str] | None:
    """Return the values that a schema lists, as texts; None if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(repr(value) for value in values) if isinstance(values, list) else None


def _repeats(sets: Sequence[frozenset[str] | None]) -> bool:
    every = [one for found in sets for one in found or ()]
    return len(every) != len(set(every))
