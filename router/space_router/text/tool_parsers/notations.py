"""Grammars of arguments in other notations than JSON, made from a tool's JSON schema: Python's, Gemma's, MiniMax's.

Arguments come in the order of the schema; those that are not required may be left out. Only listed properties are
written, unless the schema lists none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from space_router.text.schema_walk import as_values, nodes_of, parts_of
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import TEXT_KEYWORDS, joined, json_rule, terminal, text_until

Schema = Mapping[str, Any]
KeyWriter = Callable[[str], tuple[str, str]]  # What stands before and behind the value of a key

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KINDS = ("string", "number", "boolean", "null", "array", "object")
_BRANCHES = ("anyOf", "oneOf")
_ALWAYS_OPEN = ("patternProperties", "minProperties", "maxProperties", "prefixItems")
_MOST_ITEMS = 1000  # a larger bound of an array's length is left open


@dataclass(frozen=True)
class Notation:
    """How a format writes arguments. Numbers are JSON's.

    `text`: around a string; ("", "") for one that ends where what stands behind its value begins; None: JSON strings.
    `free_key`: a regular expression of the keys of objects without listed properties;
    "": such objects are JSON, and such arguments are empty. `kind_head`: what stands before a value, by its JSON type.
    `json_inside`: arrays and objects are JSON.
    """

    argument_key: KeyWriter
    key: KeyWriter
    words: tuple[str, str, str] = ("true", "false", "null")
    arguments: tuple[str, str] = ("", "")  # around all of them
    objects: tuple[str, str] = ("{", "}")
    arrays: tuple[str, str] = ("[", "]")
    item: tuple[str, str] = ("", "")  # before and behind an array's item
    separator: str = ""
    text: tuple[str, str] | None = None
    free_key: str = ""
    kind_head: Callable[[str], str] | None = None
    json_inside: bool = False

    def head(self, kind: str) -> str:
        """Return what stands before a value of this JSON type."""
        return "" if self.kind_head is None else self.kind_head(kind)

    @property
    def json_heads(self) -> tuple[str, ...]:
        """What stands before values that are JSON."""
        return (self.head("array"), self.head("object")) if self.json_inside and self.kind_head is not None else ()

    def rules(self, index: int, schema: Schema, special: SpecialTokens) -> list[str]:
        """Return the rules of `arguments_{index}`: the arguments of the call of this number, by their schema."""
        writer = _GrammarWriter(self, f"n{index}", schema, special)
        before, behind = self.arguments
        inner = writer.members(schema, self.argument_key)
        start = joined(terminal(before, special), inner, terminal(behind, special)) or '""'
        return [f"arguments_{index}: {start}", *writer.rules]

    def left_open(self, schema: Schema) -> list[str]:
        """Return the keywords of a schema that these rules do not enforce."""
        texts = () if self.text is None else TEXT_KEYWORDS
        nodes: list[Schema] = list(nodes_of(dict(schema)))
        if not self.json_inside:
            return [keyword for keyword in _ALWAYS_OPEN + texts if any(keyword in node for node in nodes)]
        whole = parts_of(schema, schema)
        listed = [one for part in whole for one in as_values(part.get("properties"))]
        values = [part for one in listed for part in parts_of(schema, one, ("anyOf", "oneOf", "allOf"))]
        found = [keyword for keyword in _ALWAYS_OPEN if any(keyword in part for part in whole)]
        return found + [keyword for keyword in texts if any(keyword in part for part in values)]


@dataclass
class _GrammarWriter:
    """Writes the rules of one call's arguments. `prefix`: of the rules' names; `root`: what references start from."""

    notation: Notation
    prefix: str
    root: Schema
    special: SpecialTokens
    rules: list[str] = field(default_factory=list)
    _named: dict[str, str] = field(default_factory=dict)  # names of rules by what they are of

    def value(self, schema: Any, end: str = "") -> str:
        """Return what is to be generated for a value of this schema, with `end` behind it."""
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            return self._rule(f"$ref {schema['$ref']} {end}", lambda: self._of_kinds(self._merged(schema), end))
        return self._of_kinds(self._merged(schema), end)

    def _merged(self, schema: Any) -> Schema:
        """Return a schema with what it refers to, and with the parts of `allOf`, beside its own keywords."""
        found: dict[str, Any] = {}
        for part in parts_of(self.root, schema):
            for key, inner in part.items():
                if key == "properties" and isinstance(inner, Mapping):
                    found[key] = {**found.get(key, {}), **inner}
                elif key == "required" and isinstance(inner, list):
                    found[key] = [*found.get(key, []), *inner]
                elif key not in ("$ref", "allOf"):
                    found.setdefault(key, inner)
        return found

    def _of_kinds(self, schema: Schema, end: str) -> str:
        """Return the alternatives of a schema without references."""
        literals = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(literals, list):
            heads = [self.notation.head(_kind_of(one)) for one in literals]
            written = [head + self._literal(one) + end for head, one in zip(heads, literals, strict=True)]
            return _any_of(terminal(one, self.special) for one in written)
        for keyword in _BRANCHES:
            if isinstance(branches := schema.get(keyword), list) and branches:
                shared = {key: inner for key, inner in schema.items() if key not in _BRANCHES}
                return _any_of(self.value({"allOf": [one, shared]} if shared else one, end) for one in branches)
        kinds = schema.get("type", _implied(schema))
        if kinds is None and not self.notation.free_key:
            return self._text(end)  # the parser finds out what it is
        if kinds is None:
            return self._rule(
                f"any {end}", lambda: _any_of(self._of_kind({"type": kind}, kind, end) for kind in _KINDS)
            )
        return _any_of(self._of_kind(schema, kind, end) for kind in (kinds if isinstance(kinds, list) else [kinds]))

    def _of_kind(self, schema: Schema, kind: Any, end: str) -> str:
        known = self.notation
        behind, head = terminal(end, self.special), known.head(str(kind))
        before = terminal(head, self.special)
        match kind:
            case "string" if known.text is None:
                return joined(before, json_rule(_some_of(schema, TEXT_KEYWORDS) | {"type": kind}), behind)
            case "string":
                return joined(before, self._text(end))
            case "integer" | "number":
                return joined(before, json_rule(_some_of(schema, _NUMBERS) | {"type": kind}), behind)
            case "boolean":
                return _any_of(terminal(head + word + end, self.special) for word in known.words[:2])
            case "array" | "object" if known.json_inside:
                shared = _some_of(self.root, ("$defs", "definitions"))
                return joined(before, json_rule({**shared, **schema, "type": kind}), behind)
            case "array":
                return self._around(known.arrays, self._items(schema), end)
            case "object" if not known.free_key and not schema.get("properties"):
                return joined(json_rule({"type": "object"}), behind)
            case "object":
                return self._around(known.objects, self.members(schema, known.key), end)
            case _:
                return terminal(head + known.words[2] + end, self.special)

    def _around(self, brackets: tuple[str, str], inner: str, end: str) -> str:
        before, behind = brackets
        return joined(terminal(before, self.special), inner, terminal(behind + end, self.special)) or '""'

    def _text(self, end: str) -> str:
        """Return a string of any text, and what ends it."""
        before, behind = self.notation.text or ("", "")
        of = f"text {behind + end}"
        if of not in self._named:
            self._named[of] = f"{self.prefix}_{len(self._named)}"
            self.rules += text_until(self._named[of], behind + end, self.special)
        return joined(terminal(before, self.special), self._named[of])

    def _items(self, schema: Schema) -> str:
        before, behind = self.notation.item
        least, most = _size(schema.get("minItems")), _size(schema.get("maxItems"))
        items = schema.get("items", {})
        if most == 0 or items is False:
            return ""
        item = self._own_rule(joined(terminal(before, self.special), self.value(items, behind)))
        least = min(least or 0, _MOST_ITEMS)
        bound = "" if most is None or most > _MOST_ITEMS else str(max(0, most - 1))
        more = joined(terminal(self.notation.separator, self.special), item)
        more = f"({more}){{{max(0, least - 1)},{bound}}}" if least > 1 or bound else f"({more})*"
        return joined(item, more) if least else f"({joined(item, more)})?"

    def members(self, schema: Schema, key: KeyWriter) -> str:
        """Return the keys and values of an object."""
        schema = self._merged(schema)
        listed, required = schema.get("properties"), schema.get("required")
        known = listed if isinstance(listed, Mapping) else {}
        names = [one for one in required if isinstance(one, str)] if isinstance(required, list) else []
        if not known and not names:
            return self._free_members(schema, key)
        parts = []
        for name in dict.fromkeys([*known, *names]):
            before, behind = key(name)
            value = self.value(known.get(name, {}), behind)
            parts.append((self._own_rule(joined(terminal(before, self.special), value)), name in names))
        return self._sequence(parts)

    def _free_members(self, schema: Schema, key: KeyWriter) -> str:
        values = schema.get("additionalProperties", {})
        if values is False or not self.notation.free_key:
            return ""
        written, end = key("KEY")
        before, _, behind = written.partition("KEY")
        name = self._rule("key", lambda: self.notation.free_key)
        head = joined(terminal(before, self.special), name, terminal(behind, self.special))
        member = self._own_rule(joined(head, self.value(values, end)))
        return f"({member} ({joined(terminal(self.notation.separator, self.special), member)})*)?"

    def _sequence(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Return parts with separators between them. Each: its rule, and whether it must be there."""
        separator = terminal(self.notation.separator, self.special)
        behind, rests = "", []  # the rules of what stands behind each part
        for rule, must in reversed(parts):
            rests.append(behind)
            part = joined(separator, rule)
            behind = self._own_rule(joined(part if must else f"({part})?", behind))
        rests.reverse()
        starts = []
        for (rule, must), rest in zip(parts, rests, strict=True):
            starts.append(joined(rule, rest))
            if must:
                return _any_of(starts)
        return f"{_any_of(starts)}?" if len(starts) > 1 else f"({starts[0]})?"

    def _literal(self, value: Any) -> str:
        """Return a constant as it is written."""
        known = self.notation
        if isinstance(value, bool) or value is None:
            return known.words[2 if value is None else int(not value)]
        if isinstance(value, str):
            quoted = json.dumps(value, ensure_ascii=False)
            return quoted if known.text is None else value.join(known.text)
        if isinstance(value, Mapping | list) and known.json_inside:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, Mapping):
            pairs = [self._literal(one).join(known.key(name)) for name, one in value.items()]
            return known.separator.join(pairs).join(known.objects)
        if isinstance(value, list):
            items = [self._literal(one).join(known.item) for one in value]
            return known.separator.join(items).join(known.arrays)
        return json.dumps(value)

    def _own_rule(self, body: str) -> str:
        return self._rule(f"rule {len(self._named)}", lambda: body)

    def _rule(self, of: str, body: Callable[[], str]) -> str:
        """Return the name of the rule of something, which is written when it is first needed; it may need itself."""
        if (name := self._named.get(of)) is None:
            name = self._named[of] = f"{self.prefix}_{len(self._named)}"
            self.rules.append(f"{name}: {body()}")
        return name


def _some_of(schema: Schema, keywords: Sequence[str]) -> dict[str, Any]:
    return {key: schema[key] for key in keywords if key in schema}


def _kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case Mapping():
            return "object"
        case list():
            return "array"
        case _:
            return "number"


def _implied(schema: Schema) -> str | None:
    """Return the type that a schema without one has by its keywords."""
    if schema.keys() & {"properties", "required", "additionalProperties"}:
        return "object"
    if "items" in schema:
        return "array"
    if schema.keys() & {*TEXT_KEYWORDS}:
        return "string"
    return "number" if schema.keys() & {*_NUMBERS} else None


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _any_of(alternatives: Iterator[str] | Sequence[str]) -> str:
    found = list(dict.fromkeys(alternatives))
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _json_key(name: str) -> tuple[str, str]:
    return json.dumps(name, ensure_ascii=False) + ": ", ""


PYTHON = Notation(
    argument_key=lambda name: (f"{name}=", ""),
    key=_json_key,
    words=("True", "False", "None"),
    separator=", ",
    free_key="/[A-Za-z_][A-Za-z0-9_]{0,63}/",
)
"""`a=1, b="x", c=[True, {"d": None}]`"""


def in_braces(quote: str) -> Notation:
    """Return Gemma's: `{a:1,b:<|"|>x<|"|>,c:[true,{d:null}]}`. `quote`: the token around strings and unusual keys."""

    def key(name: str) -> tuple[str, str]:
        return (f"{name}:" if re.fullmatch(r"[\w-]+", name) else f"{quote}{name}{quote}:"), ""

    return Notation(
        key, key, arguments=("{", "}"), separator=",", text=(quote, quote), free_key="/[A-Za-z0-9_-]{1,64}/"
    )


def in_tags(space: str) -> Notation:
    """Return MiniMax-M3's: a tag around each value and item, behind the token `space`."""

    def key(name: str) -> tuple[str, str]:
        return f"{space}<{name}>", f"{space}</{name}>"

    return Notation(key, key, objects=("", ""), arrays=("", ""), item=key("item"), text=("", ""))


def in_typed_tags(key: Callable[[str], str], kind_head: Callable[[str], str], end: str) -> Notation:
    """Return Kimi K3's: a tag around each value, which names its type; what is no text is JSON in it."""
    return Notation(
        lambda name: (key(name), end),
        lambda name: (key(name), end),
        text=("", ""),
        free_key="/[A-Za-z0-9_-]{1,64}/",
        kind_head=kind_head,
        json_inside=True,
    )
