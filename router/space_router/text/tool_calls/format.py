"""Supported tool call formats: how each is parsed, generated and recognised."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
