"""LiteLLM, as a library, for a server that speaks OpenAI's language."""

import asyncio
import importlib.metadata
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch its price list otherwise

import litellm
from checks import FORMAT, KEY, MODEL, NARROW_URL, PROMPT, QUESTION, TOOL, URL, check, is_answer, leave, raises, version

version(importlib.metadata.version("litellm"))
litellm.telemetry = False
litellm.suppress_debug_info = True
THERE: dict[str, Any] = {"api_base": URL + "/v1", "api_key": KEY, "num_retries": 0}
CHAT, TEXT = f"openai/{MODEL}", f"text-completion-openai/{MODEL}"

with check("completion: a stream joins to the whole answer, with its usage"):
    asked: dict[str, Any] = {"model": CHAT, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **THERE}
    whole = litellm.completion(**asked)
    parts = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content != ""
    usages = [part.usage for part in parts if getattr(part, "usage", None) is not None]
    assert usages[-1].completion_tokens == whole.usage.completion_tokens

with check("text_completion: a stream joins to the whole answer"):
    asked = {"model": TEXT, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, **THERE}
    whole = litellm.text_completion(**asked)
    parts = list(litellm.text_completion(**asked, stream=True))
    assert "".join(part.choices[0].text or "" for part in parts) == whole.choices[0].text != ""

with check("acompletion: four streams at once"):

    async def several() -> list[str]:
        async def one() -> str:
            stream = await litellm.acompletion(
                model=CHAT, messages=QUESTION, temperature=0, max_tokens=16, stream=True, **THERE
            )
            return "".join([part.choices[0].delta.content or "" async for part in stream])

        return await asyncio.gather(*(one() for _ in range(4)))

    texts = asyncio.run(several())
    assert len(set(texts)) == 1
    assert texts[0]

with check("log-probabilities and seeds"):
    asked = {"model": CHAT, "messages": QUESTION, "max_tokens": 8, "seed": 4, "logprobs": True, **THERE}
    first, again = litellm.completion(**asked), litellm.completion(**asked)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert len(first.choices[0].logprobs.content) == first.usage.completion_tokens

with check("structured outputs and tools"):
    asked = {"model": CHAT, "messages": QUESTION, "temperature": 0, "max_tokens": 96, **THERE}
    assert is_answer(litellm.completion(**asked, response_format=FORMAT).choices[0].message.content)
    called = litellm.completion(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = called.message.tool_calls
    assert (call.function.name, called.finish_reason) == ("forecast", "tool_calls")
    assert is_answer(call.function.arguments)

with check("BadRequestError (also for a prompt too long), AuthenticationError, NotFoundError, RateLimitError"):
    raises(litellm.BadRequestError, lambda: litellm.completion(model=CHAT, messages=QUESTION, temperature=9, **THERE))
    long = [{"role": "user", "content": "x " * 5000}]
    raises(litellm.BadRequestError, lambda: litellm.completion(model=CHAT, messages=long, **THERE))
    raises(
        litellm.AuthenticationError,
        lambda: litellm.completion(model=CHAT, messages=QUESTION, **{**THERE, "api_key": "wrong"}),
    )
    raises(litellm.NotFoundError, lambda: litellm.completion(model="openai/gpt-9", messages=QUESTION, **THERE))
    narrow = {**THERE, "api_base": NARROW_URL + "/v1"}
    busy = litellm.text_completion(model=TEXT, prompt=PROMPT, max_tokens=900, stream=True, temperature=0, **narrow)
    next(iter(busy))
    raises(litellm.RateLimitError, lambda: litellm.completion(model=CHAT, messages=QUESTION, **narrow))

leave()
