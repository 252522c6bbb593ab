"""The prompt that a conversation becomes, where its answer ends, and the adapter that drafts it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from doubles.router import Script
from doubles.router.script import listed
from doubles.router.whole_router import USER, Start
from doubles.tokenizers import EOS_ID, VOCAB_SIZE, byte_level
from space_router.config import ServeConfig
from space_router.setting import JSON_OBJECT
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken

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
        assert answer.status_code == 200
        assert "'nonsense' is no variable" in answer.headers["warning"]
        assert "there are: enable_thinking, reasoning_effort" in answer.headers["warning"]
        for name in ("enable_thinking", "reasoning_effort"):
            value = True if name == "enable_thinking" else "low"
            assert "warning" not in (await router.post("/v1/chat/completions", messages=USER, **{name: value})).headers
        assert await prompt(router, enable_thinking=True) == "THINK <user>Hi</><assistant>"
        assert await prompt(router, chat_template_kwargs={"messages": []}) == "<user>Hi</><assistant>"


async def test_the_servers_variables_are_those_that_a_request_does_not_set(start: Any) -> None:
    config = ServeConfig(default_chat_template_kwargs='{"enable_thinking": true, "reasoning_effort": "low", "x": 1}')
    async with start("ok", chat=TEMPLATE, config=config, **ROOM) as router:
        assert await prompt(router) == "THINK EFFORT=low <user>Hi</><assistant>"
        assert await prompt(router, enable_thinking=False) == "EFFORT=low <user>Hi</><assistant>"
        own = {"enable_thinking": False, "reasoning_effort": "high"}
        assert await prompt(router, chat_template_kwargs=own) == "EFFORT=high <user>Hi</><assistant>"
        answer = await router.post("/v1/chat/completions", messages=USER, reasoning_effort="high")
        assert (answer.status_code, "warning" in answer.headers) == (200, False)
    for text in ("no", "[]", "1"):
        with pytest.raises(ValueError, match="must be a JSON object"):
            JSON_OBJECT.parse(text)
    named = TEMPLATE.replace("enable_thinking", "thinking")
    config = ServeConfig(default_chat_template_kwargs='{"enable_thinking": true}')
    async with start("ok", chat=named, config=config, **ROOM) as router:
        assert await prompt(router) == "THINK <user>Hi</><assistant>"
        assert await prompt(router, enable_thinking=False) == "<user>Hi</><assistant>"


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


REPLY = "STOP hello<|im_end|>\nuser"  # `hello` is one token, as `ST`, `OP`; the token that ends the turn is the sixth
IM_END = 2
RUNS = [(0,), (1,), (2,), (3,), (3, 0), (0, 2)]


def fast(accepted: tuple[int, ...]) -> dict[str, Any]:
    return {**ROOM, "accepts": listed(accepted)}


@pytest.mark.parametrize("accepted", RUNS)
async def test_a_turn_end_ends_an_answer_wherever_in_an_accepted_run_it_comes(
    start: Any, accepted: tuple[int, ...]
) -> None:
    body = {"messages": USER, "max_tokens": 24, "logprobs": True, "return_token_ids": True, "temperature": 0}
    async with start(REPLY, **fast(accepted)) as router:
        answer = (await router.post("/v1/chat/completions", **body)).json()
        choice = answer["choices"][0]
        num_tokens = answer["usage"]["completion_tokens"]
        assert choice["message"]["content"] == "STOP hello"
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"][-1] == IM_END
        assert num_tokens == len(choice["token_ids"]) == len(choice["logprobs"]["content"]) + 1
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "STOP hello"

        events = []
        async with router.client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        ) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]) == "STOP hello"
        assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == num_tokens


async def test_a_response_ends_there_too(start: Any) -> None:
    async with start(REPLY, **fast((3,))) as router:
        answer = (await router.post("/v1/responses", input="Hi", max_output_tokens=24)).json()
        assert answer["output"][-1]["content"][0]["text"] == "STOP hello"
        assert answer["status"] == "completed"


async def test_a_completion_goes_on_behind_it_and_so_does_a_chat_that_ignores_eos(start: Any) -> None:
    async with start(REPLY, **fast((3,))) as router:
        whole = await router.complete(prompt="Hi", max_tokens=8)
        assert whole["choices"][0]["text"].startswith("STOP hello\nu")
        generated = (await router.post("/generate", inputs="Hi", parameters={"max_new_tokens": 8})).json()
        assert generated["generated_text"].startswith("STOP hello\nu")
        answer = await router.post("/v1/chat/completions", messages=USER, max_tokens=8, ignore_eos=True)
        choice = answer.json()["choices"][0]
        assert choice["message"]["content"].startswith("STOP hello\nu")
        assert choice["finish_reason"] == "length"


async def test_info_lists_what_ends_a_text_and_what_ends_an_answer(start: Any) -> None:
    async with start("ok", **ROOM) as router:
        info = (await router.client.get("/info")).json()
        assert (info["eos_token_ids"], info["turn_end_token_ids"]) == ([EOS_ID], [IM_END])
    async with start("ok", chat=None, **ROOM) as router:
        assert (await router.client.get("/info")).json()["turn_end_token_ids"] == []


async def test_a_turn_end_without_a_row_in_the_model_ends_nothing_and_is_no_error(start: Any) -> None:
    inner = byte_level()
    inner.add_special_tokens([AddedToken("<|beyond|>", special=True)])
    tokenizer = Tokenizer(inner, {"eos_token": "<|endoftext|>"})
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|beyond|>{% endif %}{% endfor %}"
    async with start("ok", chat=template, tokenizer=tokenizer, **ROOM) as router:
        assert (await router.client.get("/info")).json()["turn_end_token_ids"] == [VOCAB_SIZE]
        answer = await router.post("/v1/chat/completions", messages=USER, max_tokens=4)
        assert answer.status_code == 200, answer.text


BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a <|beyond|> b"}, "prompt"),
    ("/v1/completions", {"prompt": [1, VOCAB_SIZE]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "bad_words": ["<|beyond|>"]}, "bad_words"),
    ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": "<|beyond|>"}}, "prediction"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "</beyond>"}]}, "messages"),
    ("/v1/responses", {"input": "</beyond>"}, "input"),
    ("/generate", {"inputs": "<|beyond|>"}, "inputs"),
]


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
async def test_a_text_whose_token_the_model_has_no_row_for_is_the_request_s_error(
    start: Any, path: str, body: dict[str, Any], param: str
) -> None:
    inner = byte_level()
    inner.add_special_tokens([AddedToken("<|beyond|>", special=True)])
    inner.add_tokens([AddedToken("</beyond>", special=False)])  # in messages, special tokens are text
    tokenizer = Tokenizer(inner, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})
    async with start("ok", tokenizer=tokenizer, **ROOM) as router:
        answer = await router.post(path, **body)
        assert answer.status_code == (422 if path == "/generate" else 400), answer.text
        assert f"ids of this model are 0 to {VOCAB_SIZE - 1}" in answer.text
        assert param in answer.text


def test_the_scripted_worker_says_what_the_tests_count_on() -> None:
    assert Script().draft_length == 3


ADAPTERS = ("code", "prose")


async def test_the_model_field_chooses_the_adapter_and_comes_back(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        texts = set()
        for name in ("tiny", "code", "prose", None):
            answer = await router.complete(prompt="hello", max_tokens=20, seed=1, **({"model": name} if name else {}))
            assert answer["model"] == (name or "tiny")
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 1
        assert router.worker.figures.num_admits_by_adapter == {"": 2, "code": 1, "prose": 1}


async def test_chat_streams_and_several_choices_carry_the_adapter(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        chat = {"messages": [{"role": "user", "content": "hello"}], "model": "prose", "max_tokens": 8}
        answer = (await router.post("/v1/chat/completions", **chat, n=3)).json()
        assert (answer["model"], len(answer["choices"])) == ("prose", 3)
        streamed = await router.post("/v1/chat/completions", **chat, stream=True)
        assert streamed.text.count('"model":"prose"') == streamed.text.count("data: {")
        assert router.worker.figures.num_admits_by_adapter == {"prose": 4}


async def test_tgi_chooses_by_adapter_id(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        for name in ("code", None):
            asked = {"adapter_id": name, "max_new_tokens": 4}
            assert (await router.post("/generate", inputs="hello", parameters=asked)).status_code == 200
        assert router.worker.figures.num_admits_by_adapter == {"code": 1, "": 1}
        wrong = await router.post("/generate", inputs="hello", parameters={"adapter_id": "verse"})
        assert (wrong.status_code, "`tiny`, `code` and `prose` are" in wrong.text) == (404, True)


async def test_an_unknown_name_is_the_model_error_with_the_names_there_are(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        answer = await router.post("/v1/completions", prompt="hello", model="verse")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "The model 'verse' is not served here; `tiny`, `code` and `prose` are."


async def test_adapters_share_the_prefix_cache(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        prompt = "a prompt of several blocks, which is computed once"
        await router.complete(prompt=prompt, max_tokens=4, model="code")
        before = router.worker.figures.num_cached_ids
        await router.complete(prompt=prompt, max_tokens=4, model="prose")
        assert router.worker.figures.num_cached_ids > before


async def test_a_request_goes_on_with_its_adapter_after_a_lost_worker(start: Start) -> None:
    async with start(adapters=ADAPTERS, step_seconds=0.005) as router:
        asked = {"prompt": "hello", "max_tokens": 60, "seed": 1, "ignore_eos": True}
        plain = await router.complete(**asked)
        running = asyncio.create_task(router.complete(**asked, model="code"))
        for _ in range(2000):
            if router.worker.figures.num_admits_by_adapter["code"]:
                break
            await asyncio.sleep(0.005)
        router.worker.kill()
        assert (await running)["choices"][0]["text"] == plain["choices"][0]["text"]
        assert router.worker.figures.num_admits_by_adapter["code"] == 2


async def test_a_worker_that_comes_back_with_other_adapters_is_not_taken(start: Start) -> None:
    async with start(adapters=ADAPTERS) as router:
        router.worker.script.adapters = ("code",)
        router.worker.kill()
        for _ in range(2000):
            if not router.service.engine.ready:
                break
            await asyncio.sleep(0.005)
        answer = await router.post("/v1/completions", prompt="hello", model="prose", max_tokens=2, timeout=0.3)
        assert answer.status_code >= 400
        assert router.worker.figures.num_admits_by_adapter["prose"] == 0
        router.worker.script.adapters = ADAPTERS
        router.worker.kill()
