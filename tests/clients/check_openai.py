"""OpenAI's Python client; the newest one and one of its first line."""

import asyncio
from typing import Annotated, Any, Literal

import openai
import pydantic
from checks import (
    FORMAT,
    KEY,
    MODEL,
    NARROW_URL,
    PROMPT,
    QUESTION,
    TOOL,
    URL,
    check,
    is_answer,
    leave,
    raises,
    until,
    version,
)

version(openai.__version__)
client = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class Trip(pydantic.BaseModel):
    """What ANSWER describes."""

    city: Literal["Oslo", "Paris"]
    days: Annotated[int, pydantic.Field(ge=1, le=9)]


def num_running() -> int:
    return client.get("/../load", cast_to=dict[str, int])["num_running"]


with check("completions: a stream joins to the whole answer, with its usage and reason"):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0.8, "seed": 7}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.to_dict() == whole.usage.to_dict()
    assert whole.usage.completion_tokens <= 40
    assert [chunk for chunk in chunks if chunk.choices][-1].choices[0].finish_reason == whole.choices[0].finish_reason

with check("chat: a stream joins to the whole answer, the role first"):
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 32}
    answered = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert answered.choices[0].message.content
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answered.choices[0].message.content
    assert parts[0].choices[0].delta.role == answered.choices[0].message.role == "assistant"
    assert parts[-1].choices[0].finish_reason == answered.choices[0].finish_reason
    assert {part.id for part in parts} == {parts[0].id}

with check("log-probabilities belong to the tokens, in both shapes"):
    scored = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=12, logprobs=3)
    lists = scored.choices[0].logprobs
    assert "".join(lists.tokens) == scored.choices[0].text
    assert lists.text_offset == [sum(map(len, lists.tokens[:place])) for place in range(len(lists.tokens))]
    for token, value, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True):
        assert value == top[token] == max(top.values()) <= 0
    chat = client.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=12, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == chat.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in content)

with check("token ids, several prompts, n, echo and stop"):
    made = client.completions.create(
        **GREEDY, prompt=[PROMPT, "import os"], max_tokens=8, echo=True, stop=["\n"], extra_body={"ignore_eos": True}
    )
    assert made.choices[0].text.startswith(PROMPT)
    assert made.choices[1].text.startswith("import os")
    assert all("\n" not in choice.text for choice in made.choices)
    two = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, n=2, seed=3)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text != two.choices[1].text
    ids = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=8, extra_body={"return_token_ids": True}
    ).choices[0]
    again = client.completions.create(**GREEDY, prompt=ids.prompt_token_ids, max_tokens=8)
    assert again.choices[0].text == ids.text

with check("speculation changes the speed and not the text; a prediction is counted"):
    plain = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=48, extra_body={"speculation": "off"})
    drafted = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=48, extra_body={"speculation": "auto"})
    assert plain.choices[0].text == drafted.choices[0].text
    assert plain.spaceserve["drafted"] == 0
    reported = client.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=32)
    text = reported.choices[0].message.content
    predicted = client.chat.completions.create(
        **GREEDY, messages=QUESTION, max_tokens=32, prediction={"type": "content", "content": text}
    )
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0

with check("structured outputs: a JSON schema, streamed and whole, and the client's own parse()"):
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 64}
    shaped = client.chat.completions.create(**asked, response_format=FORMAT)
    assert is_answer(shaped.choices[0].message.content)
    shaped_parts = client.chat.completions.create(**asked, response_format=FORMAT, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in shaped_parts)
    assert text == shaped.choices[0].message.content
    parsed = client.chat.completions.parse(**asked, response_format=Trip).choices[0].message.parsed
    assert parsed.city in ("Oslo", "Paris")
    chosen = client.completions.create(
        **GREEDY, prompt=PROMPT, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].text in ("yes", "no")

with check("tools: a required call, streamed and whole, and its answer taken"):
    asked = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 96, "tools": [TOOL]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "seed": 1}  # its seed names a call
    called = client.chat.completions.create(**asked).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "forecast"
    assert is_answer(call.function.arguments)
    pieces = [part.choices[0].delta.tool_calls for part in client.chat.completions.create(**asked, stream=True)]
    deltas = [delta for piece in pieces for delta in piece or ()]
    assert (deltas[0].id, deltas[0].function.name) == (call.id, "forecast")
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    reported = [*QUESTION, called.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(**{**asked, "messages": reported, "tool_choice": "none"}).choices[0].message

with check("responses: a stream ends with the whole answer"):
    asked = {**GREEDY, "input": QUESTION[0]["content"], "max_output_tokens": 24}
    whole = client.responses.create(**asked, store=False)
    assert whole.output_text
    assert whole.usage.output_tokens <= 24
    events = list(client.responses.create(**asked, store=False, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text

with check("models are listed and found"):
    (listed,) = client.models.list().data
    assert listed.id == client.models.retrieve(MODEL).id == MODEL

with check("headers tell what it cost"):
    raw = client.completions.with_raw_response.create(**GREEDY, prompt=PROMPT, max_tokens=4)
    assert raw.headers["x-generated-tokens"] == "4"
    assert int(raw.headers["x-total-time"]) >= int(raw.headers["x-inference-time"])
    assert raw.parse().usage.completion_tokens == 4

with check("BadRequestError names the field"):
    for wrong, param in (({"temperature": 3}, "temperature"), ({"max_tokens": -1}, "max_tokens")):
        bad = raises(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="x", **wrong))  # noqa: B023
        assert (bad.param, bad.type) == (param, "invalid_request_error")
    long = raises(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="x " * 5000))
    assert long.code == "context_length_exceeded"
    refused = raises(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, top_p=7),
    )
    assert refused.param == "top_p"

with check("NotFoundError and AuthenticationError"):
    missing = raises(openai.NotFoundError, lambda: client.completions.create(model="gpt-9", prompt="x"))
    assert missing.code == "model_not_found"
    raises(openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list())

with check("RateLimitError says when to come back"):
    narrow = client.with_options(base_url=NARROW_URL + "/v1")
    with narrow.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    ) as busy:
        next(iter(busy))
        full = raises(openai.RateLimitError, lambda: narrow.completions.create(**GREEDY, prompt=PROMPT))
    assert (full.code, full.response.headers["retry-after"].isdigit()) == ("queue_full", True)

with check("APITimeoutError leaves nothing running"):
    raises(
        openai.APITimeoutError,
        lambda: client.with_options(timeout=0.05).completions.create(
            **GREEDY, prompt=PROMPT, max_tokens=900, n=8, extra_body={"ignore_eos": True}
        ),
    )
    until(lambda: num_running() == 0, "a request whose client has left ends")

with check("cancellation: a closed stream ends, a request cancelled by its id raises APIError"):
    endless = {**GREEDY, "prompt": PROMPT, "max_tokens": 900, "stream": True}
    left = client.completions.create(**endless, extra_body={"ignore_eos": True})
    next(iter(left))
    left.close()
    until(lambda: num_running() == 0, "a stream that was closed ends")
    reported = client.completions.create(**endless, extra_body={"ignore_eos": True, "n": 8, "request_id": "mine"})
    events = iter(reported)
    next(events)
    assert client.delete("/requests/mine", cast_to=dict[str, Any])["cancelled"]
    assert raises(openai.APIError, lambda: list(events)).code == "cancelled"
    raises(openai.NotFoundError, lambda: client.delete("/requests/mine", cast_to=dict[str, Any]))


async def many() -> list[str]:
    """Eight streams at once."""
    async with openai.AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0) as several:

        async def one(seed: int) -> str:
            stream = await several.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, seed=seed, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*(one(seed) for seed in range(8)))


with check("eight streams at once give what each gives alone"):
    together = asyncio.run(many())
    for seed, text in enumerate(together):
        alone = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, seed=seed)
        assert alone.choices[0].text == text

client.close()
leave()
