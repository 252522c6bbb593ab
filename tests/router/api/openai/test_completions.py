"""`POST /v1/completions` and the fields that it shares with chat: exact text, exact counts, whole or streamed."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from doubles.router import FixedReply, ScriptedWorker, always, listed
from doubles.router.whole_router import USER, Start
from doubles.tokenizers import EOS_ID, VOCAB_SIZE, byte_level
from space_router.api.openai.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken


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


async def lines(router: Any, path: str, **body: Any) -> list[str]:
    answer = await router.post(path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    return [line for line in answer.text.split("\n\n") if line]


def text_of(events: list[Any]) -> str:
    """How it is cut into events depends on how fast they are read."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})]
)
async def test_obfuscated_events_are_of_one_size_and_say_the_same(start: Start, path: str, asked: Any) -> None:
    body = {**asked, "max_tokens": 30, "seed": 1, "request_id": "one"}
    async with start("a bcd efg\n", accepts=listed([0, 2, 3])) as router:
        plain = await lines(router, path, **body)
        hidden = await lines(router, path, **body, stream_options={"include_obfuscation": True})
        off = await lines(router, path, **body, stream_options={"include_obfuscation": False})
    assert len({len(line) for line in plain[1:-2]}) > 1
    assert {(len(line) + 2) % 128 for line in hidden[:-1]} == {0}
    assert hidden[-1] == "data: [DONE]"
    said, shown = ([json.loads(line.removeprefix("data: ")) for line in one[:-1]] for one in (plain, hidden))
    assert len({event.pop("obfuscation") for event in shown}) > 1
    # How many drafts there was room for depends on when pages were given.
    assert shown[-1]["spaceserve"].keys() == said[-1]["spaceserve"].keys()
    assert shown[-1]["spaceserve"]["seed"] == said[-1]["spaceserve"]["seed"] == 1
    assert shown[-1]["choices"][0]["finish_reason"] == said[-1]["choices"][0]["finish_reason"] == "length"
    assert {tuple(event) for event in shown} == {tuple(event) for event in said}  # the same fields, in one order
    assert text_of(shown) == text_of(said) != ""
    assert not any("obfuscation" in line for line in off)


@pytest.mark.parametrize("seed", [-1, -(2**63), 0, 2**63, 2**64 - 1])
async def test_a_seed_may_be_any_of_64_bits_with_a_sign_or_without(router: Any, seed: int) -> None:
    asked = {"prompt": "x", "max_tokens": 12, "seed": seed}
    first, again = await router.complete(**asked), await router.complete(**asked)
    assert first["spaceserve"]["seed"] == seed
    assert first["choices"] == again["choices"]
    assert (await router.complete(**asked | {"seed": seed % 2**64}))["choices"] == first["choices"]


async def test_minus_one_keeps_of_a_prompt_what_leaves_room_for_the_answer(start: Start) -> None:
    async with start("ab", window=64) as router:
        asked = {"prompt": "x" * 100, "truncate_prompt_tokens": -1}
        answer = await router.complete(**asked, max_tokens=10)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (54, 10)
        short = await router.complete(**asked | {"prompt": "xyz"}, max_tokens=10)
        assert short["usage"]["prompt_tokens"] == 3
        chat = await router.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x" * 100}], truncate_prompt_tokens=-1
        )
        assert chat.json()["usage"]["prompt_tokens"] == 63
        none = await router.post("/v1/completions", **asked, max_tokens=64)
        assert none.json()["error"]["param"] == "truncate_prompt_tokens"
        zero = await router.post("/v1/completions", **asked | {"truncate_prompt_tokens": 0})
        assert "at least 1" in zero.json()["error"]["message"]


async def test_an_adapter_is_asked_for_by_its_name_alone_or_behind_the_models(start: Start) -> None:
    async with start("yes", adapters=("law",)) as router:
        for name in ("law", "tiny:law"):
            assert (await router.complete(prompt="x", model=name, max_tokens=1))["model"] == "law"
            assert (await router.client.get(f"/v1/models/{name}")).json()["id"] == "law"
        for name in ("tiny:", "tiny:tiny", "law:tiny", "other:law"):
            answer = await router.post("/v1/completions", prompt="x", model=name)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_models_are_listed_as_clients_expect(router: Any) -> None:
    listed = (await router.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card | {"created": 0, "root": ""} == {
        "id": "tiny",
        "object": "model",
        "created": 0,
        "owned_by": "spaceserve",
        "root": "",
        "parent": None,
        "max_model_len": 512,
    }
    assert (await router.client.get("/v1/models/tiny")).json() == card
    for name in ("gpt-9", "other/one"):
        missing = await router.client.get(f"/v1/models/{name}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "asked", "neutral"),
    [
        ("/v1/completions", {"prompt": "x"}, COMPLETION_NEUTRAL),
        ("/v1/chat/completions", {"messages": USER}, CHAT_NEUTRAL),
    ],
)
async def test_what_is_not_supported_is_taken_where_it_changes_nothing_and_refused_by_name_elsewhere(
    router: Any, path: str, asked: Any, neutral: dict[str, tuple[Any, ...]]
) -> None:
    for name, values in neutral.items():
        for value in (None, *values):
            answer = await router.post(path, **asked, max_tokens=1, **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)
        for value in ("surely not", 17, [[1]]):
            answer = await router.post(path, **asked, max_tokens=1, **{name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")


async def test_no_alternatives_are_no_log_probabilities(router: Any) -> None:
    for fields in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}):
        answer = await router.post("/v1/chat/completions", messages=USER, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["logprobs"] is None


async def test_the_clients_own_notes_may_be_anything(router: Any) -> None:
    notes = {"user": 5, "metadata": {"a": [None]}, "store": True, "service_tier": "flex", "safety_identifier": "x"}
    answer = await router.complete(prompt="x", max_tokens=1, **notes, prompt_cache_key="k")
    assert answer["usage"]["completion_tokens"] == 1


async def test_every_field_may_be_null(router: Any) -> None:
    from space_router.api.openai.fields import ChatBody, CompletionBody

    for path, asked, body in (
        ("/v1/completions", {"prompt": "x"}, CompletionBody),
        ("/v1/chat/completions", {"messages": USER}, ChatBody),
    ):
        nulls = dict.fromkeys(body.model_fields.keys() - asked.keys())
        answer = await router.post(path, **asked, **nulls | {"max_tokens": 1})
        assert answer.status_code == 200, answer.text


async def test_null_means_absent_inside_of_fields_too(router: Any) -> None:
    call = {"id": "1", "type": None, "function": {"name": "f", "arguments": "{}", "parsed_arguments": None}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None},
    ]
    more = {"stream_options": {"include_usage": True, "foo": None}, "stream": True, "max_tokens": 1}
    answer = await router.post("/v1/chat/completions", messages=messages, **more)
    assert answer.status_code == 200, answer.text
    missing = await router.post("/v1/chat/completions", messages=[{"role": None, "content": "Hi"}])
    assert missing.json()["error"]["message"] == "`messages.0.role` is required."
    regex = await router.post("/v1/completions", prompt="x", response_format={"type": "regex", "value": None})
    assert "`response_format.value` must be a regular expression" in regex.json()["error"]["message"]


@pytest.mark.parametrize("stop", [{"stop": "c"}, {"stop_token_ids": [70]}])
async def test_ids_logprobs_and_usage_end_where_the_text_does(start: Start, stop: Any) -> None:
    async with start("abBcd", accepts=always, block_size=64) as router:  # B is the id 70
        asked = {"prompt": "x", "max_tokens": 20, "logprobs": 1, "return_token_ids": True, **stop}
        for keep in (False, True):
            choice = (answer := await router.complete(**asked, include_stop_str_in_output=keep))["choices"][0]
            by_text = "stop" in stop
            text = ("abBc" if keep else "abB") if by_text else ("abB" if keep else "ab")
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")
            assert choice["stop_reason"] == ("c" if by_text else 70)
            num_tokens = len(text) if by_text else 3  # a stop token is counted, as EOS is; a stop string is cut off
            assert answer["usage"]["completion_tokens"] == num_tokens
            assert len(choice["token_ids"]) == num_tokens
            assert "".join(choice["logprobs"]["tokens"]) == text  # the token that ended it has no text, and no entry
            events = await lines(router, "/v1/completions", **asked, include_stop_str_in_output=keep)
            pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in events[:-1]]
            assert "".join(piece["text"] for piece in pieces) == text
            assert [id_ for piece in pieces for id_ in piece["token_ids"]] == choice["token_ids"]
            assert [one for piece in pieces for one in piece["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
            assert (pieces[-1]["stop_reason"], pieces[-1]["finish_reason"]) == (choice["stop_reason"], "stop")


@pytest.mark.parametrize(("reply", "stop"), [("ab<|endoftext|>x", {}), ("abBx", {"stop_token_ids": [70]})])
async def test_a_final_eos_or_stop_token_is_counted_and_has_no_logprobs_entry(
    start: Start, reply: str, stop: Any
) -> None:
    async with start(reply, accepts=always, block_size=64) as router:
        text, chat = {"prompt": "x", "logprobs": 0}, {"messages": USER, "logprobs": True}
        for path, source in (("/v1/completions", text), ("/v1/chat/completions", chat)):
            asked = {"max_tokens": 20, "return_token_ids": True, **source, **stop}
            answer = (await router.post(path, **asked)).json()
            written = (await lines(router, path, **asked))[:-1]
            events = [json.loads(line.removeprefix("data: ")) for line in written]
            assert answer["usage"]["completion_tokens"] == 3
            for choices in ([answer["choices"][0]], [event["choices"][0] for event in events]):
                assert len([id_ for choice in choices for id_ in choice.get("token_ids") or []]) == 3
                found = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
                if path == "/v1/completions":
                    assert [token for one in found for token in one["tokens"]] == ["a", "b"]
                else:
                    assert [entry["token"] for one in found for entry in one["content"]] == ["a", "b"]
                assert choices[-1]["finish_reason"] == "stop"


async def test_the_request_id_is_the_clients_and_the_headers(start: Start) -> None:
    async with start("yes") as router:
        answer = await router.post("/v1/completions", prompt="x", max_tokens=1, request_id="mine:1")
        assert (answer.json()["id"], answer.headers["x-request-id"]) == ("mine:1", "mine:1")
        answer = await router.post("/v1/chat/completions", messages=USER, max_tokens=1)
        assert answer.json()["id"] == answer.headers["x-request-id"]
        assert answer.json()["id"].startswith("chatcmpl-")


async def test_zero_tokens_of_an_answer_are_refused_by_the_name_they_were_asked_by(router: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await router.post("/v1/chat/completions", messages=USER, **{name: 0})
        assert answer.json()["error"]["param"] == name


NAMES = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")
PREFIX, SUFFIX, MIDDLE, END = range(VOCAB_SIZE, VOCAB_SIZE + 4)


def tokenizer() -> Tokenizer:
    inner = byte_level()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    return Tokenizer(inner, {"bos_token": "<|endoftext|>", "add_bos_token": True})


TOKENIZER = tokenizer()


def filling(start: Start, reply: str = "mid") -> AbstractAsyncContextManager[Any]:
    """A router in front of a worker whose checkpoint fills in the middle."""
    return start(language=FixedReply(ids(reply)), tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE + 4)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def test_prefix_and_suffix_become_one_prompt_behind_the_first_token(start: Start) -> None:
    async with filling(start) as router:
        asked = {"prompt": "def f(", "suffix": "):\n", "max_tokens": 3, "return_token_ids": True}
        answer = await router.complete(**asked)
        expected = [TOKENIZER.bos_id, PREFIX, *ids("def f("), SUFFIX, *ids("):\n"), MIDDLE]
        assert answer["choices"][0]["prompt_token_ids"] == expected
        assert answer["choices"][0]["text"] == "mid"
        assert answer["usage"]["prompt_tokens"] == len(expected)


async def test_prompts_may_be_several_ids_or_empty_and_are_echoed_alone(start: Start) -> None:
    async with filling(start) as router:
        asked = {"suffix": "z", "max_tokens": 1, "return_token_ids": True, "add_special_tokens": False, "echo": True}
        answer = await router.complete(prompt=["ab", "c", ""], **asked)
        shown = [(choice["prompt_token_ids"], choice["text"]) for choice in answer["choices"]]
        assert shown == [
            ([PREFIX, *ids("ab"), SUFFIX, *ids("z"), MIDDLE], "abm"),
            ([PREFIX, *ids("c"), SUFFIX, *ids("z"), MIDDLE], "cm"),
            ([PREFIX, SUFFIX, *ids("z"), MIDDLE], "m"),
        ]
        answer = await router.complete(prompt=[TOKENIZER.bos_id, 70], **asked)
        assert answer["choices"][0]["prompt_token_ids"] == [TOKENIZER.bos_id, PREFIX, 70, SUFFIX, *ids("z"), MIDDLE]


async def test_what_the_family_writes_behind_the_middle_is_an_eos(start: Start) -> None:
    async with filling(start, "mid<file_sep>more") as router:
        choice = (await router.complete(prompt="a", suffix="b", max_tokens=9))["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("mid", "stop", None)
        plain = (await router.complete(prompt="a", max_tokens=5))["choices"][0]
        assert (plain["text"], plain["finish_reason"]) == ("midm", "length")  # it is skipped, and ends nothing
        going = await router.complete(prompt="a", suffix="b", max_tokens=5, ignore_eos=True)
        assert going["choices"][0]["text"] == "midm"


async def test_truncation_takes_from_the_front_of_the_prefix(start: Start) -> None:
    async with filling(start) as router:
        asked = {"prompt": "abcdef", "suffix": "xy", "max_tokens": 1, "return_token_ids": True}
        answer = await router.complete(**asked, truncate_prompt_tokens=7)
        assert answer["choices"][0]["prompt_token_ids"] == [PREFIX, *ids("ef"), SUFFIX, *ids("xy"), MIDDLE]
        refused = await router.post("/v1/completions", **asked, truncate_prompt_tokens=4)
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("suffix", [None, ""])
async def test_an_empty_suffix_is_none(start: Start, suffix: str | None) -> None:
    for router_of in (filling(start), start("mid")):
        async with router_of as router:
            answer = await router.complete(prompt="ab", suffix=suffix, max_tokens=1, return_token_ids=True)
            assert PREFIX not in answer["choices"][0]["prompt_token_ids"]


async def test_where_the_tokenizer_has_no_words_for_it_it_is_refused_by_name(router: Any) -> None:
    error = (await router.post("/v1/completions", prompt="a", suffix="b")).json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "fill-in-the-middle" in error["message"]
    assert isinstance(router.worker, ScriptedWorker)
    assert router.worker.figures.num_steps == 0


async def test_logprobs_of_a_prompt_in_another_order_are_not_echoed(start: Start) -> None:
    async with filling(start) as router:
        asked = {"prompt": "a", "suffix": "b", "echo": True, "logprobs": 0}
        assert (await router.post("/v1/completions", **asked)).json()["error"]["param"] == "echo"
        mask = await router.post("/v1/completions", prompt="a", suffix="<|mask_1|>")
        assert mask.json()["error"]["param"] == "suffix"


async def test_what_speculation_takes_is_said_in_one_sentence(start: Start) -> None:
    async with start("hello") as router:
        for value in (-1, True, "3", 1.5, "on", [1]):
            await router.refuses(
                "/v1/completions", "speculation", '"auto", "off", or a number of drafts', prompt="x", speculation=value
            )
