"""Supported tool call formats: how each is parsed, recognised, and required by a grammar."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from space_router.text.tool_calls import forms
from space_router.text.tool_calls.parser import Form


@dataclass(frozen=True)
class ToolCallLayout:
    """How a required call is generated: `trigger opening CALL between CALL closing`."""

    before_name: str
    before_arguments: str
    behind_arguments: str
    trigger: str = ""  # only calls begin with it; "": the start of a call itself
    opening: str = ""
    between: str = ""
    closing: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """One format."""

    name: str
    form: Form
    markers: tuple[str, ...]  # special tokens that the parser needs
    layout: ToolCallLayout | None  # None: calls are parsed, but cannot be required
    short_ids: bool = False  # templates of this format need ids of nine letters and digits


_HERMES = ToolFormat(
    "hermes",
    forms.hermes,
    (forms.OPEN, forms.CLOSE),
    ToolCallLayout(
        '\n{"name": "',
        '", "arguments": ',
        "}\n" + forms.CLOSE,
        trigger=forms.OPEN,
        between="\n" + forms.OPEN,
    ),
)
_LLAMA_3 = ToolFormat(
    "llama3_json",
    forms.llama3_json,
    (forms.PYTHON_TAG,),
    ToolCallLayout('{"name": "', '", "parameters": ', "}", between="; "),
)
_MISTRAL = ToolFormat(
    "mistral",
    forms.mistral,
    (forms.TOOL_CALLS, forms.CALL_ID, forms.ARGS),
    ToolCallLayout(
        '{"name": "', '", "arguments": ', "}", trigger=forms.TOOL_CALLS, opening="[", between=", ", closing="]"
    ),
    short_ids=True,
)
_MISTRAL_NAMED = ToolFormat(
    "mistral",
    forms.mistral,
    _MISTRAL.markers,
    ToolCallLayout("", forms.ARGS, "", trigger=forms.TOOL_CALLS, between=forms.TOOL_CALLS),
    short_ids=True,
)
_PYTHONIC = ToolFormat("pythonic", forms.pythonic, (forms.PYTHON_START, forms.PYTHON_END), None)

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {one.name: one for one in (_HERMES, _LLAMA_3, _MISTRAL, _PYTHONIC)}
)
"""Formats by their `--tool-call-parser` name."""

_PYTHON_CALL = re.compile(r"\[\s*\w+\(\w+\s*=")


def named(name: str, template: str) -> ToolFormat:
    """Return the format of this name, in the variant that the template mentions."""
    return _MISTRAL_NAMED if name == "mistral" and forms.ARGS in template else FORMATS[name]


def recognised(template: str) -> ToolFormat | None:
    """Return the format that a chat template instructs the model to use, or None if it is not supported."""
    if forms.TOOL_CALLS in template:
        return named("mistral", template)
    if forms.OPEN in template:
        return None if "<function=" in template else _HERMES
    if forms.PYTHON_START in template or _PYTHON_CALL.search(template):
        return _PYTHONIC
    if forms.PYTHON_TAG in template or ('"parameters"' in template and '"name"' in template):
        return _LLAMA_3
    return None


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
