"""Fields of the OpenAI requests that have no file of their own here."""

import json
from typing import Any

import pytest
from doubles.router import always, listed
from doubles.router.whole_router import USER, Start
from space_router.api.openai.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL


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
    missing = await router.client.get("/v1/models/gpt-9")
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
            assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == num_tokens
            events = await lines(router, "/v1/completions", **asked, include_stop_str_in_output=keep)
            pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in events[:-1]]
            assert "".join(piece["text"] for piece in pieces) == text
            assert [id_ for piece in pieces for id_ in piece["token_ids"]] == choice["token_ids"]
            assert (pieces[-1]["stop_reason"], pieces[-1]["finish_reason"]) == (choice["stop_reason"], "stop")


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
