"""Hostile programs: chat templates of checkpoints, grammars of requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from space_router.api.grammar_fields import MOST_SECONDS, GrammarCheck
from space_router.engine.request.request import Grammar
from space_router.errors import ConfigError, InvalidRequest
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.template_process import QUICK_PATIENCE, SLOW_PATIENCE

from fuzz.harness import Fuzzer, json_values, mutated, often, rarely, spoiled_text, texts

Draw = Callable[[SearchStrategy[Any]], Any]

EXPRESSIONS = (
    "messages", "messages[0]", "messages[0].content", "messages[-1]['role']", "loop.index", "x", "bos_token", "1",
    "'a'", "tools", "namespace(a=1)", "range(9999)", "range(10**9)", "'a'*9999999", "2**99999", "9**9**9", "[0]*10**9",
    "messages.__class__", "''.__class__.__mro__", "().__class__.__base__.__subclasses__()", "x.__init__.__globals__",
    "cycler.__init__.__globals__.os", "lipsum(n=999)", "self", "caller()", "m(m)",
    "messages|map(attribute='content')|list", "'%s%s'|format(1)", "'%9999999999d' % 1", "'{0.__class__}'.format(1)",
    "x|tojson(indent=99999999)", "dict(a=1).items()", "messages|groupby('role')", "'a'|center(99999999)",
    "raise_exception('no')", "strftime_now('%Y'*9999)", "joiner()", "('a'*1000)|replace('a','b'*100000)",
    "messages|sort", "messages|sum(attribute='x')", "1/0", "'a'|int(base=99)", "'a'|wordwrap(0)", "x.y.z",
    "range(3)|random", "'x'|indent(99999999)", "messages|batch(0)|list", "'x'|truncate(-1)",
)  # fmt: skip
STATEMENTS = (
    "{{% for x in {e} %}}{b}{{% endfor %}}",
    "{{% if {e} %}}{b}{{% else %}}{b}{{% endif %}}",
    "{{{{ {e} }}}}",
    "{{% set x = {e} %}}{b}",
    "{{% macro m(a) %}}{b}{{{{ a }}}}{{% endmacro %}}{{{{ m({e}) }}}}",
    "{{{{ {e} ~ {e} }}}}",
    "{{% set n = namespace(a=1) %}}{{% for i in range(50) %}}{{% set n.a = n.a + n.a %}}{{% endfor %}}{{{{ n.a }}}}",
    "{{% include {e} %}}",
    "{{% import {e} as y %}}",
    "{{% generation %}}{b}{{% endgeneration %}}",
    "{{% call m({e}) %}}{b}{{% endcall %}}",
    "{{% for x in {e} recursive %}}{{{{ loop({e}) }}}}{{% endfor %}}",
    "{{% filter upper %}}{b}{{% endfilter %}}",
    "{{% break %}}",
    "{{% raw %}}{b}{{% endraw %}}",
    "{{# {e} #}}",
)


@st.composite
def _templates(draw: Draw, depth: int = 3) -> str:
    if not depth or draw(st.integers(0, 4)) == 4:
        return str(draw(texts))[:200]
    body = draw(_templates(depth - 1))
    first = draw(st.sampled_from(STATEMENTS)).format(e=draw(st.sampled_from(EXPRESSIONS)), b=body)
    return str(first + draw(_templates(max(0, depth - 2))))


_MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_SOURCES = rarely(
    st.sampled_from(list(BUILT_IN.values())).flatmap(spoiled_text), often(_templates(), spoiled_text, 6), 7
)
_TALKS = mutated(_MESSAGES).map(
    lambda value: (
        [one if isinstance(one, dict) else {"role": "user", "content": one} for one in value]
        if isinstance(value, list)
        else _MESSAGES
    )
)


def test_a_hostile_template_writes_a_prompt_or_is_refused_soon(fuzzer: Fuzzer) -> None:
    def attempt(given: tuple[str, list[Any], list[Any]]) -> str:
        source, messages, tools = given
        begun, reason = time.monotonic(), ""
        try:
            template = ChatTemplate(source, {"bos_token": "<s>"})
            template.render(messages, tools=tools, continue_final_message=False)
        except (ConfigError, InvalidRequest) as error:
            reason = str(error)
        assert time.monotonic() - begun <= 2 * (QUICK_PATIENCE + SLOW_PATIENCE)
        assert len(reason) <= 4096
        return "refused" if reason else "written"

    tools = rarely(json_values.map(lambda value: [value]), st.just([]), 10)
    fuzzer.run(st.tuples(_SOURCES, _TALKS, tools), attempt, few=100)


SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}},
    {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"enum": [1, "a", None]}]},
    {"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"},
    {"type": "object", "additionalProperties": {"type": "number", "minimum": 1, "maximum": 9}, "required": ["a"]},
    {"type": "string", "format": "date-time", "minLength": 2, "maxLength": 5},
)
KEYWORDS = ("pattern", "anyOf", "allOf", "not", "$ref", "enum", "const", "items")
REGEX = (
    "a", "b+", "[a-z]", "(a|b)", "\\d{2,5}", ".*", "(?i:x)", "^", "$", "(", ")", "[^\\x00-\\xff]", "{1000}",
    "{1,99999}", "\\p{L}", "(?=a)", "(a*)*", "\\1", "|", "é", "(?P<n>a)", "[[:alpha:]]", "\\b",
)  # fmt: skip
LARK = (
    "start: a\n", 'a: "x" a | ""\n', "B: /[a-z]+/\n", "start: B B\n", "%import common.INT\n", "start: start start\n",
    "%ignore / /\n", 'start: "a"~1..99999\n', "a[capture]: B\n", "start: <[5]>\n", "%json {}\n", "start: a+ b*\n",
    "start[max_tokens=5]: /.*/\n", "C: D\nD: C\n", "start: %regex { }\n",
)  # fmt: skip
_SCHEMA_TEXTS = st.sampled_from(SCHEMAS).flatmap(lambda one: mutated(one, KEYWORDS, most=3)).map(json.dumps)
GRAMMARS: dict[str, SearchStrategy[str]] = {
    "json_schema": _SCHEMA_TEXTS, "regex": st.lists(st.sampled_from(REGEX), max_size=12).map("".join),
    "lark": st.lists(st.sampled_from(LARK), max_size=5).map("".join),
    "choice": mutated(["a", "ab", "é"]).map(json.dumps), "json_object": texts, "nonsense": texts,
}  # fmt: skip


def test_a_hostile_grammar_is_usable_or_refused_with_a_reason_soon(fuzzer: Fuzzer) -> None:
    check = GrammarCheck()

    def attempt(given: tuple[Any, str]) -> str:
        kind, source = given
        begun = time.monotonic()
        reason = fuzzer.wait(check.why_not(Grammar(kind, source)))
        assert time.monotonic() - begun <= MOST_SECONDS + 5.0
        assert reason is None or 0 < len(reason) <= 1000
        return "usable" if reason is None else "refused"

    def settle() -> None:
        assert fuzzer.wait(check.why_not(Grammar("regex", "a+"))) is None

    kinds = st.sampled_from(["json_schema", *GRAMMARS])
    grammars = kinds.flatmap(lambda kind: st.tuples(st.just(kind), often(GRAMMARS[kind], spoiled_text, 7)))
    fuzzer.run(grammars, attempt, few=100, settle=settle)
