"""Lark grammars that constrain output to tool calls, with JSON schemas for the arguments."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from space_router.text.tool_calls.format import ToolCallLayout

SpecialId = Callable[[str], int | None]
"""Maps a text to the id of its special token, or None."""

_SPACED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_CALL_KEYS = "name|function|type|id|parameters|arguments"


def calls_only(
    layout: ToolCallLayout, tools: Mapping[str, Mapping[str, Any]], special_id: SpecialId, *, many: bool
) -> str:
    """Return a grammar for exactly one call (`many`: one or more). `tools`: JSON schemas of the arguments by name."""
    rules = _rules(layout, tools, special_id, many=many)
    return "\n".join(["start: " + _joined(_terminal(layout.trigger, special_id), "calls"), *rules])


def calls_or(
    answer: Mapping[str, Any] | None,
    layout: ToolCallLayout,
    tools: Mapping[str, Mapping[str, Any]],
    special_id: SpecialId,
    *,
    many: bool,
) -> str:
    """Return a grammar for any text followed by calls, or for an answer without calls (`answer`: its JSON schema)."""
    rules = _rules(layout, tools, special_id, many=many)
    trigger = layout.trigger
    if answer is not None:
        start = f"start: answer | {_joined(_terminal(trigger, special_id), 'calls')}\nanswer: {_json(answer)}"
    elif not trigger:
        # Plain text must not contain lines that the parser would read as the start of a call.
        begins = r"(?s:(.*\n)?)[ \t]*\{[ \t\r\n]*\"(" + _CALL_KEYS + r")\"(?s:.*)"
        start = f"start: PLAIN | calls\nPLAIN: /(?s:.*)/ & ~/{begins}/"
    else:
        marker = _pattern(trigger)
        plain = f"PLAIN: /(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/"  # excludes the letters of a special token too
        special = special_id(trigger)
        head = "head[lazy]: /(?s:.*)" + marker + "/" if special is None else f"head: PLAIN <[{special}]>"
        start = f"start: PLAIN | head calls\n{plain}\n{head}"
    return "\n".join([start, *rules])


def _rules(
    layout: ToolCallLayout, tools: Mapping[str, Mapping[str, Any]], special_id: SpecialId, *, many: bool
) -> Sequence[str]:
    terminal = {name: _terminal(text, special_id) for name, text in vars(layout).items()}
    more = f"({_joined(terminal['between'], 'call')})*" if many else ""
    rules = [
        "calls: " + _joined(terminal["opening"], "call", more, terminal["closing"]),
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    for index, (name, schema) in enumerate(tools.items()):
        parts = (
            _terminal(layout.before_name + name + layout.before_arguments, special_id),
            f"arguments_{index}",
            terminal["behind_arguments"],
        )
        rules += [f"call_{index}: {_joined(*parts)}", f"arguments_{index}: {_json(schema)}"]
    return rules


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(dict(schema) | _SPACED)


def _terminal(text: str, special_id: SpecialId) -> str:
    """Return a text in Lark syntax. Special tokens are given by id, because no characters produce them."""
    parts = []
    for part in re.split(r"(\[[A-Z_]+\]|<[^<>\s]+>)", text):
        if part and (id_ := special_id(part)) is not None:
            parts.append(f"<[{id_}]>")
        elif parts and part and parts[-1].startswith('"'):
            parts[-1] = json.dumps(json.loads(parts[-1]) + part)
        elif part:
            parts.append(json.dumps(part))
    return " ".join(parts)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _pattern(text: str) -> str:
    """Return a text as a regular expression between slashes."""
    return re.sub(r"([][(){}.*+?^$|/\\])", r"\\\1", text)
