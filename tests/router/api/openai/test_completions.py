"""`POST /v1/completions` and `/v1/chat/completions`: exact text, exact counts, whole or streamed."""

import asyncio
from typing import Any

import pytest
from doubles.router import always, listed
from doubles.router.whole_router import Start
from doubles.tokenizers import EOS_ID, byte_level
from space_router.text.tokenizer import Tokenizer


async def test_an_empty_prompt_is_the_beginning_of_a_text(start: Start) -> None:
    async with start("hello") as router:
        asked = {"max_tokens": 1, "return_token_ids": True, "echo": True, "logprobs": 0}
        for prompt in ("", ["", "a"]):
            first = (await router.complete(prompt=prompt, **asked))["choices"][0]
            assert (first["text"], first["prompt_token_ids"]) == ("hello", [EOS_ID])  # which is the test's BOS, too
    without = Tokenizer(byte_level(), {"eos_token": "<|endoftext|>"})
    async with start("hello", tokenizer=without) as router:
        answer = await router.post("/v1/completions", prompt="")
        assert answer.status_code == 400
        assert "no BOS" in answer.json()["error"]["message"]


async def test_a_completion_is_the_workers_text_with_its_counts(start: Start) -> None:
    async with start("hello world, again", accepts=always) as router:
        answer = await router.complete(prompt="Say", max_tokens=8, seed=7)
        choice = answer["choices"][0]
        assert choice["text"] == "hello world, a"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 8,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
        spaceserve = answer["spaceserve"]
        assert spaceserve["seed"] == 7
        assert spaceserve["steps"] >= 2
        assert spaceserve["tokens_per_step"] == pytest.approx(7 / spaceserve["steps"], abs=1e-3)
        assert spaceserve["accepted"] == 7 - spaceserve["steps"]


@pytest.mark.parametrize("max_tokens", range(1, 8))
async def test_max_tokens_is_exact_inside_a_run(start: Start, max_tokens: int) -> None:
    async with start("abcdefghij", accepts=always) as router:
        answer = await router.complete(prompt="x", max_tokens=max_tokens)
        assert answer["choices"][0]["text"] == "abcdefghij"[:max_tokens]
        assert answer["usage"]["completion_tokens"] == max_tokens


async def test_a_stream_has_one_event_per_step_and_the_same_text(router: Any) -> None:
    asked = {"prompt": "once upon", "max_tokens": 40, "seed": 3}
    whole = await router.complete(**asked)
    stream = await router.events("/v1/completions", **asked, stream_options={"include_usage": True})
    *steps, tail = stream
    assert "".join(event["choices"][0]["text"] for event in steps) == whole["choices"][0]["text"]
    assert len(steps) == tail["spaceserve"]["steps"] + 1  # the prefill gives the first token
    assert [event["choices"][0]["finish_reason"] for event in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert all(event["usage"] is None for event in steps)
    assert (tail["choices"], tail["usage"]["completion_tokens"]) == ([], whole["usage"]["completion_tokens"])
    assert tail["spaceserve"]["seed"] == 3


async def test_continuous_usage_counts_up(start: Start) -> None:
    async with start("abcdef", accepts=listed([1]), block_size=64) as router:
        options = {"continuous_usage_stats": True}
        stream = await router.events("/v1/completions", prompt="x", max_tokens=5, stream_options=options)
        assert [event["usage"]["completion_tokens"] for event in stream] == [1, 3, 5]


async def test_a_stop_string_across_tokens_and_steps_is_cut_at_the_character(start: Start) -> None:
    async with start("hello STOP more", accepts=always) as router:
        asked = {"prompt": "x", "max_tokens": 30, "stop": ["o ST", "zzz"]}
        answer = await router.complete(**asked, logprobs=0, return_token_ids=True)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hell", "stop", "o ST")
        # `hello` is one token; four of its characters stay, so it stays.
        assert choice["logprobs"]["tokens"] == ["hello"]
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 1
        stream = await router.events("/v1/completions", **asked)
        assert "".join(event["choices"][0]["text"] for event in stream) == "hell"
        kept = await router.complete(**asked, include_stop_str_in_output=True)
        assert kept["choices"][0]["text"] == "hello ST"
        assert router.value("spaceserve_requests_total", outcome="stop") == 3


async def test_a_character_is_never_split_between_events(start: Start) -> None:
    async with start("é😀", accepts=listed([0])) as router:
        stream = await router.events("/v1/completions", prompt="x", max_tokens=12)
        assert [event["choices"][0]["text"] for event in stream] == ["é", "😀", "é", "😀"]


async def test_choices_differ_by_index_and_share_the_seed(router: Any) -> None:
    asked = {"prompt": ["one", "two"], "max_tokens": 12, "seed": 5, "ignore_eos": True}
    answer = await router.complete(**asked, n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 48
    alone = await router.complete(**asked | {"prompt": "two"})
    assert alone["choices"][0]["text"] == texts[2]
    stream = await router.events("/v1/completions", **asked, n=2)
    for index in range(4):
        pieces = [e["choices"][0]["text"] for e in stream if e["choices"][0]["index"] == index]
        assert "".join(pieces) == texts[index]


async def test_a_fresh_seed_is_given_back_and_gives_the_same_text(router: Any) -> None:
    first = await router.complete(prompt="x", max_tokens=20)
    again = await router.complete(prompt="x", max_tokens=20, seed=first["spaceserve"]["seed"])
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert (await router.complete(prompt="x", max_tokens=20))["spaceserve"]["seed"] != first["spaceserve"]["seed"]


async def test_speculation_changes_the_steps_and_not_the_text(start: Start) -> None:
    async with start("abcdefghijklmnop", accepts=always, block_size=64) as router:
        fast = await router.complete(prompt="x", max_tokens=13, speculation="auto")
        slow = await router.complete(prompt="x", max_tokens=13, speculation="off")
        bound = await router.complete(prompt="x", max_tokens=13, speculation=1)
        assert fast["choices"][0]["text"] == slow["choices"][0]["text"] == bound["choices"][0]["text"]
        assert slow["spaceserve"] | {"seed": 0} == {
            "seed": 0,
            "steps": 12,
            "drafted": 0,
            "accepted": 0,
            "tokens_per_step": 1.0,
        }
        assert bound["spaceserve"]["steps"] == 6
        assert fast["spaceserve"]["steps"] == 3


async def test_echo_repeats_the_prompt_with_its_logprobs(start: Start) -> None:
    async with start("yes") as router:
        answer = await router.complete(prompt="hello w", max_tokens=0, echo=True, logprobs=2)
        choice = answer["choices"][0]
        assert choice["text"] == "hello w"
        assert choice["logprobs"]["tokens"] == ["hello", " w"]
        assert choice["logprobs"]["text_offset"] == [0, 5]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1] < 0
        assert len(choice["logprobs"]["top_logprobs"][1]) in (2, 3)
        assert answer["usage"]["completion_tokens"] == 0
        both = await router.complete(prompt="hello w", max_tokens=2, echo=True, logprobs=0)
        assert both["choices"][0]["text"] == "hello wye"
        assert both["choices"][0]["logprobs"]["text_offset"] == [0, 5, 7, 8]


async def test_prompt_logprobs_are_given_per_id(start: Start) -> None:
    async with start("yes") as router:
        answer = await router.complete(prompt="ab", max_tokens=1, prompt_logprobs=1)
        first, second = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert all(entry["logprob"] < 0 for entry in second.values())


async def test_best_of_answers_the_most_probable(router: Any) -> None:
    answer = await router.complete(prompt="x", max_tokens=5, best_of=3, n=1, seed=1, logprobs=0, ignore_eos=True)
    every = await router.complete(prompt="x", max_tokens=5, n=3, seed=1, logprobs=0, ignore_eos=True)
    mean = [sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]]
    assert answer["choices"][0]["text"] == every["choices"][mean.index(max(mean))]["text"]
    assert answer["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize("prompt", ["hello", [263, 60], ["hello", "ab"], [[60, 61], [70]]])
async def test_prompts_come_as_text_or_ids(router: Any, prompt: Any) -> None:
    answer = await router.complete(prompt=prompt, max_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2 * len(answer["choices"])


async def test_a_truncated_prompt_keeps_its_end(start: Start) -> None:
    async with start("yes") as router:
        answer = await router.complete(prompt="abcdef", max_tokens=1, truncate_prompt_tokens=2, echo=True)
        assert answer["choices"][0]["text"] == "efy"
        assert answer["usage"]["prompt_tokens"] == 2


async def test_a_chat_answer_goes_through_the_template(start: Start) -> None:
    async with start("hello there", accepts=always) as router:
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ]
        asked = {"messages": messages, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 1}
        answer = await router.post("/v1/chat/completions", **asked)
        body = answer.json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello t", "refusal": None}
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["hello", " ", "t"]
        assert content[0]["bytes"] == list(b"hello")
        assert len(content[0]["top_logprobs"]) == 1
        prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        counted = await router.post("/tokenize", prompt=prompt)
        assert body["usage"]["prompt_tokens"] == counted.json()["count"]
        stream = await router.events("/v1/chat/completions", **asked)
        assert stream[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in stream) == "hello t"
        assert stream[-1]["choices"][0]["finish_reason"] == "length"


async def test_chat_goes_up_to_the_window_by_default(start: Start) -> None:
    async with start("ab", window=64) as router:
        answer = await router.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        usage = answer.json()["usage"]
        assert usage["total_tokens"] == 64
        assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_an_eos_ends_the_text_and_is_counted(start: Start) -> None:
    async with start("hello<|endoftext|>x") as router:
        answer = await router.complete(prompt="x", max_tokens=9)
        assert answer["choices"][0]["text"] == "hello"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 2
        going = await router.complete(prompt="x", max_tokens=5, ignore_eos=True)
        assert going["choices"][0]["text"] == "helloxhello"


async def test_many_requests_at_once_equal_their_solo_runs(router: Any) -> None:
    asked = [{"prompt": f"request {i}", "max_tokens": 5 + i, "seed": i} for i in range(16)]
    solo = [(await router.complete(**one))["choices"][0]["text"] for one in asked]
    together = await asyncio.gather(*(router.complete(**one) for one in asked))
    assert [answer["choices"][0]["text"] for answer in together] == solo


async def test_offsets_count_special_tokens_that_the_prompt_spells_out(start: Start) -> None:
    async with start("yes") as router:
        text = "<|im_start|>ab<|im_end|>"
        answer = await router.complete(prompt=text, max_tokens=1, echo=True, logprobs=0)
        choice = answer["choices"][0]
        assert choice["text"] == text + "y"
        for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
            assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize("reply", ["yes", "<|endoftext|>"])
async def test_a_limit_of_0_is_a_length_whatever_would_have_come(start: Start, reply: str) -> None:
    async with start(reply) as router:
        answer = await router.complete(prompt="ab", max_tokens=0, echo=True)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "length")
