"""The prompt that a conversation becomes, and what a request can say about it."""

from typing import Any

from doubles.router.whole_router import USER

ROOM = {"window": 4096, "num_blocks": 2048}
TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking %}THINK {% endif %}"
    "{% if reasoning_effort is defined %}EFFORT={{ reasoning_effort }} {% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"


async def prompt(router: Any, **body: Any) -> str:
    """The prompt of a chat request, which must be what is counted, too."""
    answer = await router.post("/chat_tokenize", **{"messages": USER, **body})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["templated_text"]
    made = await router.post("/v1/chat/completions", **{"messages": USER, "max_tokens": 1, **body})
    assert made.json()["usage"]["prompt_tokens"] == len(router.service.text.tokenizer.encode(text))
    return text


async def test_a_templates_variables_can_be_set(start: Any) -> None:
    async with start("ok", chat=TEMPLATE, **ROOM) as router:
        assert await prompt(router) == "<user>Hi</><assistant>"
        assert await prompt(router, chat_template_kwargs={"enable_thinking": True}) == "THINK <user>Hi</><assistant>"
        assert await prompt(router, reasoning_effort="low") == "EFFORT=low <user>Hi</><assistant>"
        both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
        answer = await router.post("/v1/chat/completions", messages=USER, **both)
        assert answer.json()["error"]["param"] == "reasoning_effort"
        answer = await router.post("/v1/chat/completions", messages=USER, chat_template_kwargs={"nonsense": 1})
        assert "enable_thinking, reasoning_effort" in answer.json()["error"]["message"]


async def test_an_effort_of_none_is_what_a_template_without_the_variable_does_anyway(start: Any) -> None:
    async with start("ok", **ROOM) as router:
        assert await prompt(router, reasoning_effort="none") == await prompt(router)


async def test_the_last_message_can_be_continued_or_stand_alone(start: Any) -> None:
    begun = [*USER, {"role": "assistant", "content": "Well, "}]
    async with start("ok", chat=TEMPLATE, **ROOM) as router:
        assert await prompt(router, messages=begun) == "<user>Hi</><assistant>Well, </><assistant>"
        assert await prompt(router, messages=begun, add_generation_prompt=False) == "<user>Hi</><assistant>Well, </>"
        for more in ({}, {"add_generation_prompt": False}):
            text = await prompt(router, messages=begun, continue_final_message=True, **more)
            assert text == "<user>Hi</><assistant>Well, "


async def test_parts_are_joined_unless_the_template_wants_them(start: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    async with start("ok", chat=TEMPLATE, **ROOM) as router:
        assert await prompt(router, messages=parts) == "<user>ab</><assistant>"
    async with start("ok", chat=PARTS, **ROOM) as router:
        assert await prompt(router, messages=parts) == "[text:a][text:b]"
        assert await prompt(router) == "[text:Hi]"


async def test_developers_are_systems_and_refusals_are_what_was_said(start: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        *USER,
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}], "annotations": [], "audio": None},
    ]
    async with start("ok", chat=TEMPLATE, **ROOM) as router:
        wanted = "<system>Be kind.</><user>Hi</><assistant>No.</><assistant>Never.</><assistant>"
        assert await prompt(router, messages=messages) == wanted


async def test_a_tools_message_has_the_name_of_the_function_that_was_called(start: Any) -> None:
    call = {"id": "c7", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c7", "content": "9"},
    ]
    template = (
        "{% for m in messages %}{{ m.name or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}:{{ m.content }};{% endfor %}"
    )
    async with start("ok", chat=template, **ROOM) as router:
        assert await prompt(router, messages=messages) == ":Hi;{}:;now:9;"
