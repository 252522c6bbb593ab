"""LangChain's OpenAI package: chat models, plain models, tools."""

import asyncio
import importlib.metadata
import json

import openai
from checks import ANSWER, KEY, MODEL, NARROW_URL, PROMPT, QUESTION, TOOL, URL, check, is_answer, leave, raises, version
from langchain_openai import ChatOpenAI, OpenAI

version(importlib.metadata.version("langchain-openai"))
HUMAN = [("human", QUESTION[0]["content"])]


def chat(url: str = URL, **options: object) -> ChatOpenAI:
    settings = {"api_key": KEY, "model": MODEL, "temperature": 0, "max_tokens": 24, "max_retries": 0, **options}
    return ChatOpenAI(base_url=url + "/v1", **settings)


with check("invoke and stream give the same text, with usage"):
    whole = chat().invoke(HUMAN)
    assert whole.content
    pieces = list(chat(stream_usage=True).stream(HUMAN))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    joined = pieces[0]
    for piece in pieces[1:]:
        joined = joined + piece
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert whole.response_metadata["finish_reason"] == joined.response_metadata["finish_reason"]

with check("astream and batch"):

    async def streamed() -> str:
        return "".join([str(piece.content) async for piece in chat().astream(HUMAN)])

    assert asyncio.run(streamed()) == whole.content
    assert [answer.content for answer in chat().batch([HUMAN, HUMAN])] == [whole.content] * 2

with check("log-probabilities, seeds and stop"):
    scored = chat(logprobs=True, top_logprobs=2).invoke(HUMAN)
    content = scored.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == scored.content
    first, again = (chat(temperature=0.9, seed=3).invoke(HUMAN).content for _ in range(2))
    assert first == again
    assert "\n" not in chat(max_tokens=40, stop=["\n"]).invoke([("human", "import os")]).content

with check("tools: a bound tool is called; streamed calls join"):
    bound = chat(max_tokens=96).bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(HUMAN).tool_calls
    assert call["name"] == "forecast"
    assert is_answer(json.dumps(call["args"]))
    joined = None
    for piece in bound.stream(HUMAN):
        joined = piece if joined is None else joined + piece
    assert [(one["name"], one["args"]) for one in joined.tool_calls] == [("forecast", call["args"])]

with check("with_structured_output: by schema and by function"):
    for method in ("json_schema", "function_calling"):
        shaped = chat(max_tokens=96).with_structured_output({"title": "trip", **ANSWER}, method=method)
        assert is_answer(json.dumps(shaped.invoke(HUMAN)))

with check("the plain model: invoke and stream give the same text"):
    plain = OpenAI(base_url=URL + "/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=24, max_retries=0)
    text = plain.invoke(PROMPT)
    assert text
    assert "".join(plain.stream(PROMPT)) == text

with check("BadRequestError, AuthenticationError, RateLimitError"):
    assert raises(openai.BadRequestError, lambda: chat(temperature=9).invoke(HUMAN)).param == "temperature"
    raises(openai.AuthenticationError, lambda: chat(api_key="wrong").invoke(HUMAN))
    busy = chat(NARROW_URL, max_tokens=900, extra_body={"ignore_eos": True}).stream(HUMAN)
    next(busy)
    raises(openai.RateLimitError, lambda: chat(NARROW_URL).invoke(HUMAN))
    busy.close()

leave()
