"""All formats of tool calls: their names, the special tokens they need, how calls are required, and their templates."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from space_router.text import harmony
from space_router.text.tool_calls import (
    ARGS,
    CALL_ID,
    CLOSE,
    OPEN,
    PYTHON_END,
    PYTHON_START,
    PYTHON_TAG,
    TOOL_CALLS,
    Form,
    ParameterLayout,
    ToolCallLayout,
    hermes,
    llama3_json,
    mistral,
    pythonic,
)
from space_router.text.tool_parsers import marked_calls as marked
from space_router.text.tool_parsers import xml_calls as xml
from space_router.text.tool_parsers.glm import KEY, KEY_END, VALUE, VALUE_END, glm
from space_router.text.tool_parsers.listed_calls import listed_calls, marked_python


@dataclass(frozen=True)
class ToolFormat:
    """A format: how its calls are parsed, and how they are required."""

    name: str
    form: Form
    markers: tuple[str, ...]  # special tokens that the parser needs
    layout: ToolCallLayout | None  # None: calls are parsed, but cannot be required
    short_ids: bool = False  # templates of this format need ids of nine letters and digits


_HERMES = ToolFormat(
    "hermes",
    hermes,
    (OPEN, CLOSE),
    ToolCallLayout('\n{"name": "', '", "arguments": ', "}\n" + CLOSE, trigger=OPEN, between="\n" + OPEN),
)
_LLAMA_3 = ToolFormat(
    "llama3_json",
    llama3_json,
    (PYTHON_TAG,),
    ToolCallLayout('{"name": "', '", "parameters": ', "}", between="; "),
)
_LISTED = ToolCallLayout('{"name": "', '", "arguments": ', "}", opening="[", between=", ", closing="]")
_MISTRAL = ToolFormat(
    "mistral", mistral, (TOOL_CALLS, CALL_ID, ARGS), replace(_LISTED, trigger=TOOL_CALLS), short_ids=True
)
_MISTRAL_NAMED = replace(_MISTRAL, layout=ToolCallLayout("", ARGS, "", trigger=TOOL_CALLS, between=TOOL_CALLS))
_PYTHONIC = ToolFormat("pythonic", pythonic, (PYTHON_START, PYTHON_END), None)
_GRANITE = ToolFormat(
    "granite", listed_calls("<|tool_call|>"), ("<|tool_call|>",), replace(_LISTED, trigger="<|tool_call|>")
)
_PHI_4 = ToolFormat(
    "phi4_mini_json",
    listed_calls("<|tool_call|>", "<|/tool_call|>"),
    ("<|tool_call|>", "<|/tool_call|>"),
    replace(_LISTED, trigger="<|tool_call|>", closing="]<|/tool_call|>"),
)
_FUNCTOOLS = ToolFormat("functools", listed_calls("functools"), (), replace(_LISTED, trigger="functools"))
_NEMOTRON = ToolFormat(
    "nemotron_json",
    listed_calls("<TOOLCALL>", "</TOOLCALL>"),
    ("<TOOLCALL>", "</TOOLCALL>"),
    replace(_LISTED, trigger="<TOOLCALL>", closing="]</TOOLCALL>"),
)
_LFM2 = ToolFormat(
    "lfm2",
    marked_python("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    None,
)


def _xml(name: str, tags: xml.Tags, *, trim: str = "\n") -> ToolFormat:
    """`trim`: what stands before and behind a value."""
    parameter = ParameterLayout(tags.parameter, tags.key_end + trim, f"{trim}{tags.parameter_end}\n")
    layout = ToolCallLayout(
        f"\n{tags.function}",
        f"{tags.name_end}\n",
        f"{tags.function_end}\n{tags.closing}",
        trigger=tags.opening,
        between=f"\n{tags.opening}",
        parameter=parameter,
    )
    return ToolFormat(name, xml.xml_calls(tags), (tags.opening, tags.closing), layout)


_QWEN_CODER = _xml("qwen3_coder", xml.QWEN)
_SEED = _xml("seed_oss", xml.SEED, trim="")
_MINIMAX = _xml("minimax_m2", xml.MINIMAX, trim="")
_GLM = ToolFormat(
    "glm45",
    glm,
    (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    ToolCallLayout(
        "",
        "\n",
        CLOSE,
        trigger=OPEN,
        between=f"\n{OPEN}",
        parameter=ParameterLayout(KEY, f"{KEY_END}\n{VALUE}", f"{VALUE_END}\n"),
    ),
)
_DEEPSEEK = ToolFormat(
    "deepseek_v3",
    marked.deepseek,
    (marked.CALLS, marked.CALLS_END, marked.CALL, marked.CALL_END, marked.SEPARATOR),
    ToolCallLayout(
        f"{marked.CALL}function{marked.SEPARATOR}",
        f"\n{marked.FENCE}\n",
        f"\n{marked.FENCE_END}{marked.CALL_END}",
        trigger=marked.CALLS,
        between="\n",
        closing=marked.CALLS_END,
    ),
)
_DEEPSEEK_31 = replace(
    _DEEPSEEK,
    name="deepseek_v31",
    layout=ToolCallLayout(
        marked.CALL, marked.SEPARATOR, marked.CALL_END, trigger=marked.CALLS, closing=marked.CALLS_END
    ),
)
_KIMI = ToolFormat(
    "kimi_k2",
    marked.kimi,
    (marked.SECTION, marked.SECTION_END, marked.KIMI_CALL, marked.KIMI_END, marked.KIMI_ARGUMENTS),
    ToolCallLayout(
        f"{marked.KIMI_CALL}functions.",
        f":0{marked.KIMI_ARGUMENTS}",
        marked.KIMI_END,
        trigger=marked.SECTION,
        closing=marked.SECTION_END,
    ),
)
_HARMONY_CALL = f"{harmony.CHANNEL}commentary to=functions."
_HARMONY = ToolFormat(
    "openai",
    harmony.harmony,
    harmony.MARKERS,
    ToolCallLayout(
        _HARMONY_CALL,
        f" {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        "",
        between=f"{harmony.END}{harmony.START}assistant",
        alone=True,
    ),
)

FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        _HERMES, _LLAMA_3, _MISTRAL, _PYTHONIC, _QWEN_CODER, _GLM, _DEEPSEEK, _DEEPSEEK_31, _KIMI, _HARMONY, _GRANITE,
        _PHI_4, _FUNCTOOLS, _NEMOTRON, _LFM2, _SEED, _MINIMAX,
    )
}  # fmt: skip
"""Formats by their `--tool-call-parser` name, which is vLLM's where it has one."""

_PYTHON_CALL = re.compile(r"\[\s*\w+\(\w+\s*=")

_SIGNS = (
    (TOOL_CALLS, _MISTRAL),
    ("<|channel|>commentary", _HARMONY),
    (marked.SECTION, _KIMI),
    (xml.SEED.opening, _SEED),
    (xml.MINIMAX.opening, _MINIMAX),
    ("<arg_key>", _GLM),
    ("<|/tool_call|>", _PHI_4),
    ("<|tool_call|>", _GRANITE),
    ("<TOOLCALL>", _NEMOTRON),
    ("<|tool_call_start|>", _LFM2),
    ("functools[", _FUNCTOOLS),
)
"""What the template of each format has, and those of the formats before have not."""


def named(name: str, template: str) -> ToolFormat:
    """Return the format of this name, in the variant that the template mentions."""
    return _MISTRAL_NAMED if name == "mistral" and ARGS in template else FORMATS[name]


def recognised(template: str) -> ToolFormat | None:
    """Return the format that a chat template instructs the model to use, or None if it is not supported."""
    for sign, known in _SIGNS:
        if sign in template:
            return named(known.name, template)
    if marked.CALLS in template:
        return _DEEPSEEK if marked.FENCE in template else _DEEPSEEK_31
    if OPEN in template:
        return _QWEN_CODER if "<function=" in template else _HERMES
    if PYTHON_START in template or _PYTHON_CALL.search(template):
        return _PYTHONIC
    if PYTHON_TAG in template or ('"parameters"' in template and '"name"' in template):
        return _LLAMA_3
    return None
