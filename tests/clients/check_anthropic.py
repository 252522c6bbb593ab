"""Anthropic's SDK for Python, over /v1/messages."""

import asyncio
import json

import anthropic
from checks import ANSWER, KEY, MODEL, NARROW_URL, QUESTION, URL, check, is_answer, leave, raises, version

version(anthropic.__version__)
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOLS = [{"name": "forecast", "description": "The weather.", "input_schema": ANSWER}]
ASKED = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}

with check("messages: a stream joins to the whole answer, with its usage"):
    whole = client.messages.create(**ASKED, system="Be brief.")
    assert whole.content[0].text
    with client.messages.stream(**ASKED, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == last.content[0].text == whole.content[0].text
    assert (last.usage.output_tokens, last.stop_reason) == (whole.usage.output_tokens, whole.stop_reason)

with check("count_tokens is what usage says, with system and tools"):
    for more in ({}, {"system": "Be brief."}, {"tools": TOOLS}, {"system": [{"type": "text", "text": "Be brief."}]}):
        counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, **more).input_tokens
        usage = client.messages.create(**ASKED, **more).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)

with check("tools: a forced call has arguments of its schema, whole and streamed; its result is taken"):
    forced = {**ASKED, "max_tokens": 96, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "forecast"}}
    called = client.messages.create(**forced)
    (call,) = [part for part in called.content if part.type == "tool_use"]
    assert (call.name, called.stop_reason) == ("forecast", "tool_use")
    assert is_answer(json.dumps(call.input))
    with client.messages.stream(**forced) as stream:
        kinds = [event.type for event in stream]
        joined = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [part.input for part in joined.content if part.type == "tool_use"] == [call.input]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": False}
    turns = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**ASKED, "messages": turns}, tools=TOOLS).usage.output_tokens

with check("stop sequences, prefilled answers and four streams at once"):
    stopped = client.messages.create(**{**ASKED, "max_tokens": 64}, stop_sequences=[whole.content[0].text[3:6]])
    assert stopped.stop_reason == "stop_sequence"
    assert "".join(part.text for part in stopped.content) == whole.content[0].text[:3]
    filled = [*QUESTION, {"role": "assistant", "content": "def"}]
    assert client.messages.create(**{**ASKED, "messages": filled}).usage.output_tokens

    async def several() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as many:

            async def one() -> str:
                async with many.messages.stream(**ASKED) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert len(set(asyncio.run(several()))) == 1

with check("beta.messages with fields of betas; models.list"):
    answer = client.beta.messages.create(
        **ASKED, betas=["context-management-2025-06-27"], context_management={"edits": []}
    )
    assert answer.content[0].text
    assert MODEL in [model.id for model in client.models.list()]

with check("BadRequestError (also for a prompt too long), AuthenticationError, NotFoundError, OverloadedError"):
    raises(anthropic.BadRequestError, lambda: client.messages.create(**{**ASKED, "messages": []}))
    long = [{"role": "user", "content": "word " * 5000}]
    error = raises(anthropic.BadRequestError, lambda: client.messages.create(**{**ASKED, "messages": long}))
    assert "prompt is too long" in str(error)
    wrong = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    raises(anthropic.AuthenticationError, lambda: wrong.messages.create(**ASKED))
    raises(anthropic.NotFoundError, lambda: client.messages.create(**{**ASKED, "model": "gpt-9"}))
    narrow = anthropic.Anthropic(base_url=NARROW_URL, api_key=KEY, max_retries=0)
    with narrow.messages.stream(**{**ASKED, "max_tokens": 900}) as busy:
        next(iter(busy))
        raises(anthropic.OverloadedError, lambda: narrow.messages.create(**ASKED))

leave()
