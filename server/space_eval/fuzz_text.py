"""Hostile programs: chat templates of checkpoints, grammars of requests."""

from __future__ import annotations

import json
import time
from random import Random
from typing import Any

from space_router.engine.request import Grammar
from space_router.errors import ConfigError, InvalidRequest
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.grammar import MOST_SECONDS, GrammarCheck
from space_router.text.template_budget import MAX_SECONDS

from space_eval.fuzz_target import Finding
from space_eval.fuzz_values import any_json, any_text, changed, spoiled

_EXPRESSIONS = (
    "messages",
    "messages[0]",
    "messages[0].content",
    "messages[-1]['role']",
    "loop.index",
    "x",
    "bos_token",
    "1",
    "'a'",
    "tools",
    "namespace(a=1)",
    "range(9999)",
    "range(10**9)",
    "'a'*9999999",
    "2**99999",
    "9**9**9",
    "[0]*10**9",
    "messages.__class__",
    "''.__class__.__mro__",
    "().__class__.__base__.__subclasses__()",
    "x.__init__.__globals__",
    "cycler.__init__.__globals__.os",
    "lipsum(n=999)",
    "self",
    "caller()",
    "m(m)",
    "messages|map(attribute='content')|list",
    "'%s%s'|format(1)",
    "'%9999999999d' % 1",
    "'{0.__class__}'.format(1)",
    "x|tojson(indent=99999999)",
    "dict(a=1).items()",
    "messages|groupby('role')",
    "'a'|center(99999999)",
    "raise_exception('no')",
    "strftime_now('%Y'*9999)",
    "joiner()",
    "('a'*1000)|replace('a','b'*100000)",
    "messages|sort",
    "messages|sum(attribute='x')",
    "1/0",
    "'a'|int(base=99)",
    "'a'|wordwrap(0)",
    "x.y.z",
    "range(3)|random",
    "'x'|indent(99999999)",
    "messages|batch(0)|list",
    "'x'|truncate(-1)",
)
_STATEMENTS = (
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


def _template(dice: Random, depth: int = 3) -> str:
    if not depth or dice.random() < 0.2:
        return any_text(dice)[:200]
    statement = dice.choice(_STATEMENTS)
    first = statement.format(e=dice.choice(_EXPRESSIONS), b=_template(dice, depth - 1))
    return first + _template(dice, depth - 2 if depth > 1 else 0)


class Templates:
    """Written by random programs, given random conversations: a prompt, or a refusal, soon."""

    name = "templates"

    async def __aenter__(self) -> Templates:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def settle(self) -> None: ...

    async def try_one(self, dice: Random) -> str:
        source = _template(dice)
        if dice.random() < 0.3:
            source = spoiled(dice, dice.choice([source, *BUILT_IN.values()]).encode("utf-8", "replace")).decode(
                "utf-8", "replace"
            )
        messages: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": any_text(dice)}]
        if dice.random() < 0.3:
            messages = [
                one if isinstance(one, dict) else {"role": "user", "content": one} for one in _changed(dice, messages)
            ]
        begun = time.monotonic()
        try:
            ChatTemplate(source, {"bos_token": "<s>"}).render(
                messages, tools=[any_json(dice)] if dice.random() < 0.1 else [], continue_final_message=False
            )
            label = "written"
        except (ConfigError, InvalidRequest) as error:
            label = "refused"
            if len(str(error)) > 4096:
                raise Finding(f"a refusal of {len(str(error))} characters: {source!r}") from None
        if time.monotonic() - begun > 2 * MAX_SECONDS:
            raise Finding(f"{time.monotonic() - begun:.1f} s: {source!r}")
        return label


def _changed(dice: Random, messages: Any) -> Any:
    value = changed(dice, messages)
    return value if isinstance(value, list) else messages


_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}},
    {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"enum": [1, "a", None]}]},
    {"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"},
    {"type": "object", "additionalProperties": {"type": "number", "minimum": 1, "maximum": 9}, "required": ["a"]},
    {"type": "string", "format": "date-time", "minLength": 2, "maxLength": 5},
)
_REGEX = (
    "a",
    "b+",
    "[a-z]",
    "(a|b)",
    "\\d{2,5}",
    ".*",
    "(?i:x)",
    "^",
    "$",
    "(",
    ")",
    "[^\\x00-\\xff]",
    "{1000}",
    "{1,99999}",
    "\\p{L}",
    "(?=a)",
    "(a*)*",
    "\\1",
    "|",
    "é",
    "(?P<n>a)",
    "[[:alpha:]]",
    "\\b",
)
_LARK = (
    "start: a\n",
    'a: "x" a | ""\n',
    "B: /[a-z]+/\n",
    "start: B B\n",
    "%import common.INT\n",
    "start: start start\n",
    "%ignore / /\n",
    'start: "a"~1..99999\n',
    "a[capture]: B\n",
    "start: <[5]>\n",
    "%json {}\n",
    "start: a+ b*\n",
    "start[max_tokens=5]: /.*/\n",
    "C: D\nD: C\n",
    "start: %regex { }\n",
)


class Grammars:
    """Asked of the router's check, and compiled: usable, or a reason, soon."""

    name = "grammars"

    async def __aenter__(self) -> Grammars:
        self._check = GrammarCheck()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._check = GrammarCheck()

    async def settle(self) -> None:
        if await self._check.why_not(Grammar("regex", "a+")) is not None:
            raise Finding("a good grammar is refused")

    async def try_one(self, dice: Random) -> str:
        kind: Any = dice.choice(("json_schema", "json_schema", "regex", "lark", "choice", "json_object", "nonsense"))
        match kind:
            case "json_schema":
                value = dice.choice(_SCHEMAS)
                for _ in range(dice.randint(0, 3)):
                    value = changed(dice, value, ("pattern", "anyOf", "allOf", "not", "$ref", "enum", "const", "items"))
                source = json.dumps(value)
            case "regex":
                source = "".join(dice.choice(_REGEX) for _ in range(dice.randint(0, 12)))
            case "lark":
                source = "".join(dice.choice(_LARK) for _ in range(dice.randint(0, 5)))
            case "choice":
                source = json.dumps(changed(dice, ["a", "ab", "é"]))
            case _:
                source = any_text(dice)
        if dice.random() < 0.15:
            source = spoiled(dice, source.encode("utf-8", "replace")).decode("utf-8", "replace")
        begun = time.monotonic()
        reason = await self._check.why_not(Grammar(kind, source))
        if (seconds := time.monotonic() - begun) > MOST_SECONDS + 5.0:
            raise Finding(f"{seconds:.1f} s: {kind} {source!r}")
        if reason is not None and not 0 < len(reason) <= 1000:
            raise Finding(f"a reason of {len(reason)} characters: {kind} {source!r}")
        return "usable" if reason is None else "refused"
