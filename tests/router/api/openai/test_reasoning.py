"""Reasoning over HTTP: apart from the answer, whole and streamed, with calls, grammars, stop strings and limits."""

from itertools import pairwise
from typing import Any

import pytest
from doubles.router import listed
from doubles.router.whole_router import TOKENIZER
from doubles.thinking import THINKS
from doubles.tokenizers import byte_level, tiny_tokenizer
from space_router.api.openai.chat import plan, tools_of
from space_router.api.openai.fields import CHAT_NEUTRAL, ChatBody
from space_router.config import ServeConfig
from space_router.http_server.body import validate
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken

USER = [{"role": "user", "content": "Hi"}]
ROOM = {"window": 4096, "num_blocks": 2048}
END = "<|endoftext|>"
REPLY = "One STOP.\nTwo.\n</think>\n\nThe answer: 42 STOP."
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def chat(router: Any, **body: Any) -> dict[str, Any]:
    answer = await router.post("/v1/chat/completions", **{"messages": USER, **body})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "calls": []}
    for choice in (event["choices"][0] for event in events if event["choices"]):
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                assert name == "content" or message["content"] is None, "reasoning comes first"
                message[name] = (message[name] or "") + delta[name]
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(message["calls"]):
                message["calls"].append(["", ""])
            message["calls"][-1][0] += piece["function"].get("name", "")
            message["calls"][-1][1] += piece["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("lengths", [[0], [1], [3, 0, 2], [9]])
async def test_reasoning_is_apart_from_the_answer_whole_and_streamed(start: Any, lengths: list[int]) -> None:
    async with start(REPLY + END, chat=THINKS, accepts=listed(lengths), **ROOM) as router:
        whole = await chat(router)
        message = whole["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] == "One STOP.\nTwo."
        assert message["content"] == "The answer: 42 STOP."
        thought = REPLY[: REPLY.index("</think>") + len("</think>")]
        num_reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert num_reasoning == len(TOKENIZER.encode(thought, add_special_tokens=False))
        events = await router.events("/v1/chat/completions", messages=USER, stream_options={"include_usage": True})
        streamed = joined(events)
        assert streamed["reasoning_content"] == message["reasoning_content"]
        assert streamed["content"] == message["content"]
        assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning


async def test_stop_strings_do_not_act_in_reasoning(start: Any) -> None:
    async with start(REPLY + END, chat=THINKS, **ROOM) as router:
        choice = (await chat(router, stop="STOP"))["choices"][0]
        assert choice["message"]["reasoning"] == "One STOP.\nTwo."
        assert (choice["message"]["content"], choice["stop_reason"]) == ("The answer: 42 ", "STOP")
        streamed = joined(await router.events("/v1/chat/completions", messages=USER, stop="STOP"))
        assert streamed["content"] == "The answer: 42 "


async def test_an_answer_that_is_cut_in_its_reasoning_has_no_content(start: Any) -> None:
    async with start(REPLY + END, chat=THINKS, **ROOM) as router:
        for num_tokens in (1, 5, 12):
            whole = await chat(router, max_tokens=num_tokens)
            choice = whole["choices"][0]
            assert choice["message"]["content"] is None
            assert choice["message"]["reasoning"]
            assert choice["finish_reason"] == "length"
            assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens
            streamed = joined(await router.events("/v1/chat/completions", messages=USER, max_tokens=num_tokens))
            assert (streamed["content"], streamed["finish_reason"]) == (None, "length")
            forced = await chat(router, max_tokens=num_tokens, tools=[F], tool_choice="required")
            assert forced["choices"][0]["message"].get("tool_calls") is None
            assert forced["choices"][0]["finish_reason"] == "length"


async def test_a_call_behind_reasoning_is_a_call_and_one_inside_is_not(start: Any) -> None:
    async with start(f"Not {CALL}.</think>\n{CALL}" + END, chat=THINKS, **ROOM) as router:
        choice = (await chat(router, tools=[F]))["choices"][0]
        assert choice["message"]["reasoning"] == f"Not {CALL}."
        assert choice["finish_reason"] == "tool_calls"
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
        streamed = joined(await router.events("/v1/chat/completions", messages=USER, tools=[F]))
        assert streamed["calls"] == [["f", '{"a": 1}']]
        assert streamed["reasoning_content"] == f"Not {CALL}."


async def test_switches_reach_the_template_and_turn_reasoning_off(start: Any) -> None:
    async with start("No thought.</think>" + END, chat=THINKS, **ROOM) as router:
        for asked in (
            {"enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
        ):
            message = (await chat(router, **asked))["choices"][0]["message"]
            assert message["content"] == "No thought.</think>"
            assert "reasoning" not in message
        assert (await chat(router, reasoning_effort="high"))["choices"][0]["message"]["reasoning"] == "No thought."


async def test_the_flag_leaves_reasoning_in_the_text_or_names_the_format(start: Any) -> None:
    config = ServeConfig(reasoning_parser="off")
    async with start(REPLY + END, chat=THINKS, config=config, **ROOM) as router:
        assert (await chat(router))["choices"][0]["message"]["content"] == REPLY
    config = ServeConfig(reasoning_parser="seed_oss")
    async with start("<seed:think>a</seed:think>b" + END, config=config, **ROOM) as router:
        message = (await chat(router))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("a", "b")


async def test_earlier_reasoning_goes_to_the_template_by_the_name_that_it_reads(start: Any) -> None:
    async with start("ok" + END, chat=THINKS, **ROOM) as router:
        for name in ("reasoning_content", "reasoning"):
            said = {"role": "assistant", "content": "b", name: "a"}
            answer = await router.post("/chat_tokenize", messages=[*USER, said, *USER])
            assert "<assistant><think>a</think>b</>" in answer.json()["templated_text"]
    for field, template in {
        "thinking": "{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}",
        "part": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for block in m.content %}{{ block.thinking if block.type == 'thinking' else block.text }};"
        "{% endfor %}{% endif %}{% endfor %}",
    }.items():
        async with start("ok" + END, chat=template, **ROOM) as router:
            said = {"role": "assistant", "content": "b", "reasoning": "a"}
            text = (await router.post("/chat_tokenize", messages=[*USER, said])).json()["templated_text"]
            assert text.endswith("ba" if field == "thinking" else "a;b;")


async def test_responses_have_reasoning_items_and_take_them_back(start: Any) -> None:
    async with start(REPLY + END, chat=THINKS, **ROOM) as router:
        asked = {"input": "Hi", "include": ["message.output_text.logprobs"]}
        whole = (await router.post("/v1/responses", **asked)).json()
        thought, said = whole["output"]
        assert thought["type"] == "reasoning"
        assert thought["content"] == [{"type": "reasoning_text", "text": "One STOP.\nTwo."}]
        assert said["content"][0]["text"] == "The answer: 42 STOP."
        scored = "".join(entry["token"] for entry in said["content"][0]["logprobs"])
        assert scored.strip() == "The answer: 42 STOP."
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 10
        lines = (await router.post("/v1/responses", **asked, stream=True)).text.split("\n")
        kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        changes = [kinds[0], *(after for before, after in pairwise(kinds) if after != before)]
        part = ["response.output_item.added", "response.content_part.added"]
        done = ["response.content_part.done", "response.output_item.done"]
        assert changes == [
            "response.created", "response.in_progress",
            *part, "response.reasoning_text.delta", "response.reasoning_text.done", *done,
            *part, "response.output_text.delta", "response.output_text.done", *done,
            "response.completed",
        ]  # fmt: skip
        again = [{"role": "user", "content": "Hi"}, thought, said, {"role": "user", "content": "So"}]
        answer = (await router.post("/v1/responses", input=again)).json()
        prompt = (
            "<user>Hi</><assistant><think>One STOP.\nTwo.</think>The answer: 42 STOP.</><user>So</><assistant><think>\n"
        )
        assert answer["usage"]["input_tokens"] == len(TOKENIZER.encode(prompt, add_special_tokens=False))


def marked_tokenizer() -> Tokenizer:
    """The tiny tokenizer with both markers as tokens."""
    inner = byte_level()
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return Tokenizer(inner, {"bos_token": END, "eos_token": END})


def grammar(router: Any, **body: Any) -> str | None:
    checked = validate(ChatBody, {"messages": USER, **body}, CHAT_NEUTRAL)
    builder = router.service.builder()
    made = plan(builder, checked, tools_of(builder, checked)).choices[0].request.sampling.grammar
    assert made is None or made.kind == "lark"
    return None if made is None else str(made.source)


async def test_a_grammar_and_a_budget_become_one_grammar_around_the_reasoning(start: Any) -> None:
    tokenizer = marked_tokenizer()
    end_id = tokenizer.token_to_id("</think>")
    async with start("x" + END, chat=THINKS, tokenizer=tokenizer, vocab_size=end_id + 1, **ROOM) as router:
        assert grammar(router) is None
        form = grammar(router, response_format={"type": "json_object"})
        assert form is not None
        assert f"end: <[{end_id}]> GAP" in form
        assert "start: thought end answer" in form
        limited = grammar(router, thinking_token_budget=7)
        assert limited is not None
        assert "thought: token{0,7}" in limited
        off = grammar(router, thinking_token_budget=7, enable_thinking=False)
        assert off is None
        answer = await router.post(
            "/v1/chat/completions", messages=USER, thinking_token_budget=7, enable_thinking=False
        )
        assert "thinking_token_budget" in answer.headers["warning"]
    async with start("x" + END, chat=THINKS, **ROOM) as router:
        await router.refuses(
            "/v1/chat/completions", "thinking_token_budget", "one token", messages=USER, thinking_token_budget=7
        )
    assert tiny_tokenizer().token_to_id("</think>") is None
