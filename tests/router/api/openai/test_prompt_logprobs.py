"""Log-probabilities of prompts: the same whole and streamed, for every choice, whatever the prefix cache holds."""

from typing import Any

import pytest
from doubles.router.whole_router import Start
from space_router.config import ServeConfig

LONG = "hello world, this prompt is long enough for several blocks and several steps of prefill. " * 2
SMALL_STEPS = ServeConfig(max_prefill_rows=12)  # the prompt comes in many pieces
CHAT = [{"role": "user", "content": LONG}]


def joined(stream: list[Any], index: int) -> dict[str, Any]:
    """All pieces of one choice as one: texts and lists one after the other, the last reasons."""
    whole: dict[str, Any] = {}
    for choice in (event["choices"][0] for event in stream if event["choices"]):
        if choice["index"] != index:
            continue
        for key, value in choice.items():
            if key in ("text", "prompt_logprobs", "token_ids"):
                whole[key] = whole.get(key, type(value)()) + value
            elif key == "logprobs" and value is not None:
                old = whole.get(key) or {name: [] for name in value}
                whole[key] = {name: old[name] + value[name] for name in value}
            else:
                whole[key] = value
    return whole


@pytest.mark.parametrize("config", [None, SMALL_STEPS], ids=["one step", "many steps"])
@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt_logprobs": 2},
        {"echo": True, "prompt_logprobs": 1},
        {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "return_token_ids": True},
        {"echo": True, "logprobs": 1, "n": 3},
        {"prompt_logprobs": 1, "n": 2, "prompt": [LONG, "é<|im_start|>b", "a"]},
        {"echo": True, "logprobs": 1, "prompt": ["a", LONG, "é😀"], "n": 2},
    ],
)
async def test_a_stream_has_what_the_whole_answer_has(
    start: Start, config: ServeConfig | None, fields: dict[str, Any]
) -> None:
    async with start(config=config) as router:
        asked = {"prompt": LONG, "max_tokens": 6, "seed": 1, "ignore_eos": True, **fields}
        whole = await router.complete(**asked)
        stream = await router.events("/v1/completions", **asked)
        assert len(whole["choices"]) == len({event["choices"][0]["index"] for event in stream})
        for choice in whole["choices"]:
            assert joined(stream, choice["index"]) == choice
        assert [event for event in stream if "spaceserve" in event] == stream[-1:]


@pytest.mark.parametrize("config", [None, SMALL_STEPS], ids=["one step", "many steps"])
async def test_a_prompt_may_fill_the_window_where_no_answer_is_wanted(start: Start, config: Any) -> None:
    prompt = "abcdefg" * 9 + "é"  # two bytes, two tokens: the last is half a character
    async with start(config=config, window=65) as filled, start(config=config, window=99) as roomy:
        for fields in ({"logprobs": 2}, {"logprobs": 2, "n": 2, "prompt_logprobs": 1, "best_of": 2}, {}, {"stop": "x"}):
            asked = {"prompt": prompt, "max_tokens": 0, "echo": True, "seed": 1, "return_token_ids": True, **fields}
            whole = await filled.complete(**asked)
            wanted = await roomy.complete(**asked)
            assert whole["choices"] == wanted["choices"]
            same = {"prompt_tokens": 65, "completion_tokens": 0}
            assert whole["usage"] | same == whole["usage"]
            stream = await filled.events("/v1/completions", **asked)
            for choice in whole["choices"]:
                assert joined(stream, choice["index"]) == choice
        for fields in ({"max_tokens": 1}, {"max_tokens": 0, "prompt": prompt + "!"}):
            beyond = await filled.post("/v1/completions", **{"prompt": prompt, "echo": True, **fields})
            assert beyond.json()["error"]["code"] == "context_length_exceeded"


async def test_tokens_of_an_echoed_prompt_come_with_their_text_as_it_is_computed(start: Start) -> None:
    async with start("yes", config=SMALL_STEPS) as router:
        stream = await router.events("/v1/completions", prompt=LONG, max_tokens=2, echo=True, logprobs=0)
        assert len(stream) > 10
        length = 0
        for choice in (event["choices"][0] for event in stream):
            offsets = choice["logprobs"]["text_offset"]
            assert all(length <= offset < length + len(choice["text"]) for offset in offsets)
            length += len(choice["text"])
        assert length == len(LONG) + 2


async def test_chat_streams_them_too(start: Start) -> None:
    async with start("yes", config=SMALL_STEPS) as router:
        asked = {"messages": CHAT, "max_tokens": 3, "prompt_logprobs": 1, "n": 2, "seed": 1}
        whole = (await router.post("/v1/chat/completions", **asked)).json()
        stream = await router.events("/v1/chat/completions", **asked)
        for choice in whole["choices"]:
            assert len(choice["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
            assert choice["prompt_logprobs"][0] is None
            assert joined(stream, choice["index"])["prompt_logprobs"] == choice["prompt_logprobs"]
        first = [event["choices"][0]["delta"].get("role") for event in stream]
        assert first.count("assistant") == 2


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
async def test_they_do_not_read_the_prefix_cache_and_others_read_what_they_computed(
    start: Start, fields: dict[str, Any]
) -> None:
    async with start() as router:
        asked = {"prompt": LONG, "max_tokens": 4, "seed": 2, "ignore_eos": True}

        async def cached(**fields: Any) -> tuple[int, Any]:
            answer = await router.complete(**asked, **fields)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"]

        first = await cached(**fields)  # into an empty cache
        assert first[0] == 0
        num_cached, plain = await cached()  # what it computed can be shared
        assert num_cached > 100
        assert plain[0]["text"] == first[1][0]["text"].removeprefix(LONG)
        assert await cached(**fields) == first  # with everything in the cache
        assert await cached() == (num_cached, plain)


async def test_other_choices_share_the_blocks_of_the_one_that_computes_them(start: Start) -> None:
    async with start() as router:
        await router.complete(prompt=LONG, max_tokens=2, prompt_logprobs=0, n=4)
        hits = router.value("spaceserve_prefix_cache_hit_tokens_total")
        assert hits >= 3 * 100


@pytest.mark.parametrize("stream", [False, True])
async def test_best_of_has_the_prompts_of_the_choice_that_computed_them(start: Start, stream: bool) -> None:
    async with start() as router:
        asked = {"prompt": LONG, "max_tokens": 4, "best_of": 3, "seed": 1, "echo": True, "logprobs": 1}
        answer = await router.post("/v1/completions", **asked, stream=stream)
        if stream:  # the best is known at the end
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
            return
        alone = await router.complete(**asked | {"best_of": 1})
        num_prompt = alone["usage"]["prompt_tokens"]
        found, expected = (one["choices"][0]["logprobs"] for one in (answer.json(), alone))
        for name in found:
            assert found[name][:num_prompt] == expected[name][:num_prompt]
