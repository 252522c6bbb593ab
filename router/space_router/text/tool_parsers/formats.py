"""All formats of tool calls: their names, the special tokens they need, how calls are required, and their templates."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from space_router.text import harmony
from space_router.text.tool_calls import (
    ARGS,
    CALL_ID,
    CALL_KEYS,
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
from space_router.text.tool_parsers import kimi_k3 as kimi_3
from space_router.text.tool_parsers import marked_calls as marked
from space_router.text.tool_parsers import xml_calls as xml
from space_router.text.tool_parsers.gemma import FUNCTION_GEMMA, GEMMA_4, gemma
from space_router.text.tool_parsers.glm import GLM, hy3, pair_calls
from space_router.text.tool_parsers.listed_calls import (
    list_at_start,
    listed_calls,
    marked_python,
    named_objects,
    python_lines,
)
from space_router.text.tool_parsers.minimax_m3 import CLOSING, INVOKE, INVOKE_END, OPENING, SPACE_NAME, minimax_m3
from space_router.text.tool_parsers.notations import PYTHON, in_braces, in_tags


@dataclass(frozen=True)
class ToolFormat:
    """A format: how its calls are parsed, and how they are required."""

    name: str
    form: Form
    markers: tuple[str, ...]  # special tokens that the parser needs
    layout: ToolCallLayout | None  # None: calls are parsed, but cannot be required
    short_ids: bool = False  # templates of this format need ids of nine letters and digits
    marks_answers: bool = False  # marks stand around answers, too, which are read even without tools


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
    ToolCallLayout(
        '{"name": "',
        '", "parameters": ',
        "}",
        between="; ",
        begins=r"(?s:(.*\n)?)[ \t]*\{[ \t\r\n]*\"(" + CALL_KEYS + r")\"(?s:.*)",
    ),
)
_LISTED = ToolCallLayout('{"name": "', '", "arguments": ', "}", opening="[", between=", ", closing="]")
_MISTRAL = ToolFormat(
    "mistral", mistral, (TOOL_CALLS, CALL_ID, ARGS), replace(_LISTED, trigger=TOOL_CALLS), short_ids=True
)
_MISTRAL_NAMED = replace(_MISTRAL, layout=ToolCallLayout("", ARGS, "", trigger=TOOL_CALLS, between=TOOL_CALLS))
_PYTHON_LIST = ToolCallLayout("", "(", ")", opening="[", between=", ", closing="]", notation=PYTHON)
_PYTHONIC = ToolFormat(
    "pythonic",
    pythonic,
    (PYTHON_START, PYTHON_END),
    replace(_PYTHON_LIST, begins=r"[ \t\r\n]*\[[ \t\r\n]*[A-Za-z0-9_.-]+\((?s:.*)"),
)
_PYTHONIC_MARKED = replace(
    _PYTHONIC, layout=replace(_PYTHON_LIST, trigger=PYTHON_START, closing=f"]{PYTHON_END}")
)  # fmt: skip
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
    replace(_PYTHON_LIST, trigger="<|tool_call_start|>", closing="]<|tool_call_end|>"),
)


_COMMAND = ToolFormat(
    "cohere_command3",
    listed_calls("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ToolCallLayout(
        '{"tool_call_id": "0", "tool_name": "',
        '", "parameters": ',
        "}",
        trigger="<|START_ACTION|>",
        opening="[\n    ",
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
    ),
)
_COMMAND_R = ToolFormat(
    "command_r",
    listed_calls("Action:\n```json", "```"),
    (),
    ToolCallLayout(
        '{"tool_name": "',
        '", "parameters": ',
        "}",
        trigger="Action:\n```json",
        opening="\n[\n    ",
        between=",\n    ",
        closing="\n]\n```",
    ),
)
_HUNYUAN = ToolFormat(
    "hunyuan_a13b",
    listed_calls("<tool_calls>", "</tool_calls>"),
    ("<tool_calls>", "</tool_calls>"),
    replace(_LISTED, trigger="<tool_calls>", closing="]</tool_calls>"),
)
_MINIMAX_1 = replace(
    _HUNYUAN,
    name="minimax",
    layout=ToolCallLayout(
        '{"name": "',
        '", "arguments": ',
        "}",
        trigger="<tool_calls>",
        opening="\n",
        between="\n",
        closing="\n</tool_calls>",
    ),
)
_GIGACHAT = ToolFormat(
    "gigachat3",
    listed_calls("<|function_call|>"),
    ("<|function_call|>",),
    ToolCallLayout('{"name": "', '", "arguments": ', "}", trigger="<|function_call|>", between="<|function_call|>"),
)
_GIGACHAT_ROLE = "function call<|role_sep|>"
_GIGACHAT_TURN = "'role': 'function call'"  # calls are a turn of their own
_GIGACHAT_3 = replace(
    _GIGACHAT,
    form=listed_calls(f"<|message_sep|>\n\n{_GIGACHAT_ROLE}"),
    markers=("<|message_sep|>", "<|role_sep|>"),
    layout=ToolCallLayout(
        f'\n\n{_GIGACHAT_ROLE}\n{{"name": "',
        '", "arguments": ',
        "}",
        trigger="<|message_sep|>",
        between="<|message_sep|>",
    ),
)
_APERTUS = ToolFormat(
    "apertus",
    named_objects("<|tools_prefix|>", "<|tools_suffix|>"),
    ("<|tools_prefix|>", "<|tools_suffix|>"),
    ToolCallLayout(
        '{"', '": ', "}", trigger="<|tools_prefix|>", opening="[", between=", ", closing="]<|tools_suffix|>"
    ),
)
_XLAM = ToolFormat(
    "xlam",
    list_at_start,
    (),
    replace(_LISTED, begins=r"((?s:.*)```json)?[ \t\r\n]*\[[ \t\r\n]*\{(?s:.*)"),
)
_OLMO = ToolFormat(
    "olmo3",
    python_lines("<function_calls>", "</function_calls>"),
    ("<function_calls>", "</function_calls>"),
    ToolCallLayout(
        "", "(", ")", trigger="<function_calls>", between="\n", closing="</function_calls>", notation=PYTHON
    ),
)
_LONGCAT = ToolFormat(
    "longcat",
    listed_calls("<longcat_tool_call>", "</longcat_tool_call>"),
    ("<longcat_tool_call>", "</longcat_tool_call>"),
    ToolCallLayout(
        '\n{"name": "',
        '", "arguments": ',
        "}\n</longcat_tool_call>",
        trigger="<longcat_tool_call>",
        between="\n<longcat_tool_call>",
    ),
)
_INTERN = ToolFormat(
    "internlm",
    listed_calls("<|action_start|><|plugin|>", "<|action_end|>"),
    ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ToolCallLayout(
        '\n{"name": "',
        '", "parameters": ',
        "}<|action_end|>",
        trigger="<|action_start|>",
        opening="<|plugin|>",
        between="\n<|action_start|><|plugin|>",
    ),
)


def _gemma(name: str, markers: tuple[str, str, str]) -> ToolFormat:
    start, end, quote = markers
    layout = ToolCallLayout("call:", "", end, trigger=start, between=start, notation=in_braces(quote))
    return ToolFormat(name, gemma(markers), markers, layout)


_GEMMA_4 = _gemma("gemma4", GEMMA_4)
_FUNCTION_GEMMA = _gemma("functiongemma", FUNCTION_GEMMA)
_MINIMAX_3 = ToolFormat(
    "minimax_m3",
    minimax_m3,
    (SPACE_NAME, OPEN, CLOSE),
    ToolCallLayout(
        INVOKE,
        '">',
        INVOKE_END,
        trigger=SPACE_NAME,
        opening=OPENING.removeprefix(SPACE_NAME) + "\n",
        between="\n",
        closing=f"\n{CLOSING}",
        notation=in_tags(SPACE_NAME),
    ),
)
_SOLAR = ToolFormat(
    "solar_open2",
    marked.solar,
    (marked.SOLAR_CALL, marked.SOLAR_NAME, marked.SOLAR_ARGUMENTS, marked.SOLAR_END),
    ToolCallLayout(
        f"0{marked.SOLAR_NAME}",
        marked.SOLAR_ARGUMENTS,
        marked.SOLAR_END,
        trigger=marked.SOLAR_CALL,
        between=marked.SOLAR_CALL,
    ),
)
_FUNCTIONARY = ToolFormat(
    "functionary_v31",
    marked.functionary,
    (),
    ToolCallLayout("", ">", marked.FUNCTION_END, trigger=marked.FUNCTION, between=marked.FUNCTION),
)
_FUNCTIONARY_32 = ToolFormat(
    "functionary_v32",
    marked.functionary_32,
    (),
    ToolCallLayout(
        "",
        "\n",
        "",
        between=marked.RECIPIENT,
        begins=r"((?s:.*)>>>)?[A-Za-z0-9_.-]+\n[ \t\r\n]*\{(?s:.*)",
    ),
    marks_answers=True,
)
_KIMI_3 = ToolFormat(
    "kimi_k3",
    kimi_3.kimi_k3,
    kimi_3.MARKERS,
    ToolCallLayout(
        f'{kimi_3.TAG}call tool="',
        '" index="',
        kimi_3.closing("call"),
        trigger=kimi_3.opening("tools"),
        closing=kimi_3.closing("tools"),
        notation=kimi_3.ARGUMENTS,
        behind_number=f'"{kimi_3.END}',
        behind_answer=kimi_3.closing("response"),
    ),
    marks_answers=True,
)


def _xml(name: str, tags: xml.Tags, *, trim: str = "\n") -> ToolFormat:
    """`trim`: what stands before and behind a value."""
    text_key, json_key = tags.typed or (tags.key_end + trim, "")
    parameter = ParameterLayout(tags.parameter, text_key, f"{trim}{tags.parameter_end}\n", json_key)
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
_DEEPSEEK_32 = _xml("deepseek_v32", xml.DEEPSEEK_32, trim="")
_DEEPSEEK_4 = _xml("deepseek_v4", xml.DEEPSEEK_4, trim="")
_GLIMMER = _xml("muse_glimmer", xml.GLIMMER, trim="")
_MINICPM = ToolFormat(
    "minicpm5",
    xml.xml_calls(xml.MINICPM),
    ("<function", "</function>", "<param", "</param>", "<![CDATA[", "]]>"),
    ToolCallLayout(
        "",
        '">',
        "</function>",
        trigger=xml.MINICPM.function,
        between=f"\n{xml.MINICPM.function}",
        parameter=ParameterLayout('<param name="', '"><![CDATA[', "]]></param>", '">', "</param>"),
    ),
)
_GLM = ToolFormat(
    "glm45",
    pair_calls(GLM),
    GLM.markers,
    ToolCallLayout(
        "",
        "\n",
        CLOSE,
        trigger=OPEN,
        between=f"\n{OPEN}",
        parameter=ParameterLayout(GLM.key, f"{GLM.key_end}\n{GLM.value}", f"{GLM.value_end}\n"),
    ),
)


def _hy3(suffix: str) -> ToolFormat:
    tags = hy3(suffix)
    layout = ToolCallLayout(
        tags.call,
        f"{tags.name_end}\n",
        f"{tags.call_end}\n",
        trigger=tags.opening,
        opening="\n",
        closing=tags.closing,
        parameter=ParameterLayout(tags.key, f"{tags.key_end}\n{tags.value}", f"{tags.value_end}\n"),
    )
    return ToolFormat("hy_v3", pair_calls(tags), tags.markers, layout)


_HY_3, _HY_3_OPEN = _hy3(""), _hy3(":opensource")
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
        _PHI_4, _FUNCTOOLS, _NEMOTRON, _LFM2, _SEED, _MINIMAX, _GEMMA_4, _FUNCTION_GEMMA, _DEEPSEEK_32, _DEEPSEEK_4,
        _COMMAND, _COMMAND_R, _MINIMAX_3, _MINIMAX_1, _HUNYUAN, _APERTUS, _OLMO, _XLAM, _GIGACHAT, _SOLAR, _LONGCAT,
        _INTERN, _FUNCTIONARY, _GLIMMER, _MINICPM, _HY_3, _FUNCTIONARY_32, _KIMI_3,
    )
}  # fmt: skip
"""Formats by their `--tool-call-parser` name, which is vLLM's where it has one."""

_PYTHON_CALL = re.compile(r"\[\s*\w+\(\w+\s*=")

_LLAMA_CALL = re.compile(r"""\{"name": [^"{}]{1,40}, "parameters": """)
"""How Llama's templates say what a call is. Others list tools as JSON with the same keys, and want other calls."""

_SIGNS = (
    (SPACE_NAME, _MINIMAX_3),
    ("<atem:function_calls>", _GLIMMER),
    ("<|tool_call>", _GEMMA_4),
    ("<start_function_call>", _FUNCTION_GEMMA),
    ("<|START_ACTION|>", _COMMAND),
    ("<|tools_prefix|>", _APERTUS),
    ("<|function_call|>", _GIGACHAT),
    (marked.SOLAR_CALL, _SOLAR),
    ("<longcat_tool_call>", _LONGCAT),
    ("<|action_start|>", _INTERN),
    (_GIGACHAT_TURN, _GIGACHAT_3),
    ("{start_tag}={function_name}", _FUNCTIONARY),
    ("\\n>>>${recipient}", _FUNCTIONARY_32),
    ("'<function name=\"'", _MINICPM),
    ("<tool_sep", _HY_3),
    ("Action:\\n```json", _COMMAND_R),
    ("<tool_calls>\\n{", _MINIMAX_1),
    ("<tool_calls>", _HUNYUAN),
    ("<function_calls>", _OLMO),
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
    ("<|tool_list_start|>", _LFM2),
    ("List of tools: [", _LFM2),
    ("functools[", _FUNCTOOLS),
    ("open_tag('call'", _KIMI_3),
)
"""What the template of each format has, and those of the formats before have not."""


_VARIANTS = (
    (PYTHON_START, _PYTHONIC_MARKED),
    (_GIGACHAT_TURN, _GIGACHAT_3),
    (":opensource", _HY_3_OPEN),
    (ARGS, _MISTRAL_NAMED),
)
"""What the template of a variant has, of a format that `FORMATS` has under the same name."""


def named(name: str, template: str) -> ToolFormat:
    """Return the format of this name, in the variant that the template mentions."""
    variant = next((one for sign, one in _VARIANTS if one.name == name and sign in template), None)
    return variant or FORMATS[name]


@lru_cache(maxsize=16)
def recognised(template: str) -> ToolFormat | None:
    """Return the format that a chat template instructs the model to use, or None if it is not supported."""
    if "｜DSML｜" in template:
        return _DEEPSEEK_4 if "tool_calls>" in template else _DEEPSEEK_32
    for sign, known in _SIGNS:
        if sign in template:
            return named(known.name, template)
    if marked.CALLS in template:
        return _DEEPSEEK if marked.FENCE in template else _DEEPSEEK_31
    if OPEN in template:
        return _QWEN_CODER if "<function=" in template else _HERMES
    if PYTHON_START in template or _PYTHON_CALL.search(template):
        return named("pythonic", template)
    return _LLAMA_3 if PYTHON_TAG in template or _LLAMA_CALL.search(template) else None
