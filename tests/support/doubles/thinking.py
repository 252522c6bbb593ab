"""A chat template whose model thinks, and what a parser reads in a text's pieces."""

from __future__ import annotations

from collections.abc import Sequence

from space_router.text.tool_calls import ToolCallReader

THINKS = """\
{%- for message in messages -%}<{{ message.role }}>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}</>
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}
{%- endif -%}"""

Calls = list[tuple[str, str]]
"""Name and arguments of each."""


def read_pieces(reader: ToolCallReader, pieces: Sequence[str]) -> tuple[str, str, Calls]:
    """Reasoning, content and calls of a text. A call begins with its name, and no piece of it comes before that or goes
    to another."""
    reasoning, content = "", ""
    calls: Calls = []
    for place, piece in enumerate([*pieces, ""]):
        parsed = reader.push(piece, ended=place == len(pieces))
        reasoning, content = reasoning + parsed.reasoning, content + parsed.content
        for part in parsed.calls:
            assert (part.name is not None) == (part.index == len(calls))
            if part.name is not None:
                calls.append((part.name, ""))
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
        assert reader.output.num_calls == len(calls)
    return reasoning, content, calls
