"""What Open WebUI 0.12 sends, by the HTTP client that it uses: models, chats, titles, native tools, embeddings."""

import asyncio
import importlib.metadata
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from checks import KEY, MODEL, TOOL, URL, check, is_answer, leave, version

version(f"0.12.4's calls, aiohttp {importlib.metadata.version('aiohttp')}")
HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-Chat-Id": "5f0c",
}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "def add(a, b):"}]},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.0,
    "top_p": 0.9,
    "min_p": 0.0,
    "max_tokens": 32,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": 7,
    "stop": ["\n\n\n"],
    "logit_bias": {"5": -100},
}
"""With every parameter that its settings have for such a server."""


async def post(path: str, body: dict[str, Any]) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.post(URL + path, data=json.dumps(body), headers=HEADERS) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def lines(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed chat."""
    ended = False
    async with (
        aiohttp.ClientSession() as session,
        session.post(URL + "/v1/chat/completions", data=json.dumps(body), headers=HEADERS) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert "text/event-stream" in answer.headers["Content-Type"]
        async for line in answer.content:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                ended = True
            elif data and not data.startswith(":"):
                yield json.loads(data)
    assert ended


async def streamed(body: dict[str, Any]) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Return the content, the pieces of calls and the usage of a streamed chat."""
    content, calls, usage = "", [], {}
    async for event in lines(body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls") or []
    return content, calls, usage


async def models() -> list[str]:
    async with aiohttp.ClientSession() as session, session.get(URL + "/v1/models", headers=HEADERS) as answer:
        return [one["id"] for one in (await answer.json())["data"]]


with check("the model is in the list"):
    assert MODEL in asyncio.run(models())

with check("a streamed chat with every parameter, and its usage"):
    text, _, counted = asyncio.run(streamed(CHAT))
    assert text
    assert counted["completion_tokens"] > 0

with check("the same chat without a stream is the same text"):
    whole = asyncio.run(post("/v1/chat/completions", {**CHAT, "stream": False, "stream_options": None}))
    assert whole["choices"][0]["message"]["content"] == text

with check("a title by the task model"):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Title?"}], "stream": False, "max_tokens": 16}
    assert asyncio.run(post("/v1/chat/completions", asked))["choices"][0]["message"]["content"]

with check("native tools: a call in the stream, and an answer to its result"):
    body = {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 96}
    _, pieces, _ = asyncio.run(streamed(body))
    first = [piece["function"] for piece in pieces if piece["index"] == 0]
    arguments = "".join(function.get("arguments") or "" for function in first)
    assert first[0]["name"] == "forecast"
    assert is_answer(arguments)
    call = {"id": pieces[0]["id"], "type": "function", "function": {"name": "forecast", "arguments": arguments}}
    turns = [
        *CHAT["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    answered, _, _ = asyncio.run(streamed({**CHAT, "messages": turns, "tools": [TOOL]}))
    assert answered

with check("embeddings of several texts"):
    found = asyncio.run(post("/v1/embeddings", {"input": ["one", "two", "one"], "model": MODEL}))
    vectors = [one["embedding"] for one in found["data"]]
    assert vectors[0] == vectors[2] != vectors[1]

leave()
