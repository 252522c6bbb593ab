"""An answer in a conversation ends where the template ends a turn; other texts do not."""

import json
from typing import Any

import pytest
from doubles.router import Script
from doubles.router.script import listed
from doubles.router.whole_router import USER
from doubles.tokenizers import EOS_ID, VOCAB_SIZE, byte_level
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken

REPLY = "STOP hello<|im_end|>\nuser"
"""`hello` is one token, as `ST`, `OP`; the token that ends the turn is the sixth."""
ROOM = {"window": 512, "num_blocks": 256}
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
        assert num_tokens == len(choice["token_ids"]) == len(choice["logprobs"]["content"])

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
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<|beyond|>"}]}, "messages"),
    ("/v1/responses", {"input": "<|beyond|>"}, "input"),
    ("/generate", {"inputs": "<|beyond|>"}, "inputs"),
]


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
async def test_a_text_whose_token_the_model_has_no_row_for_is_the_request_s_error(
    start: Any, path: str, body: dict[str, Any], param: str
) -> None:
    inner = byte_level()
    inner.add_special_tokens([AddedToken("<|beyond|>", special=True)])
    tokenizer = Tokenizer(inner, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})
    async with start("ok", tokenizer=tokenizer, **ROOM) as router:
        answer = await router.post(path, **body)
        assert answer.status_code == (422 if path == "/generate" else 400), answer.text
        assert f"ids of this model are 0 to {VOCAB_SIZE - 1}" in answer.text
        assert param in answer.text


def test_the_scripted_worker_says_what_the_tests_count_on() -> None:
    assert Script().draft_length == 3
