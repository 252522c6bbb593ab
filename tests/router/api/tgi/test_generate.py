"""TGI's routes in TGI's shapes."""

import json
from typing import Any

import pytest
from doubles.router import always, never
from doubles.router.whole_router import USER, Start
from space_router.engine.request.request import Grammar, ValidRequest


async def events(router: Any, inputs: str, **parameters: Any) -> list[Any]:
    answer = await router.post("/generate_stream", inputs=inputs, parameters=parameters)
    assert answer.status_code == 200, answer.text
    lines = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data:{") for line in lines)
    return [json.loads(line.removeprefix("data:")) for line in lines]


async def test_generate_answers_text_details_and_timing_headers(start: Start) -> None:
    async with start("hello world", accepts=always) as router:
        asked = {"max_new_tokens": 3, "details": True, "decoder_input_details": True, "top_n_tokens": 2}
        answer = await router.post("/generate", inputs="ab", parameters=asked)
        body = answer.json()
        assert body["generated_text"] == "hello wor"
        details = body["details"]
        assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 3, None)
        assert [token["text"] for token in details["tokens"]] == ["hello", " wo", "r"]
        assert all(token["logprob"] < 0 and not token["special"] for token in details["tokens"])
        assert [entry["text"] for entry in details["prefill"]] == ["a", "b"]
        assert details["prefill"][0]["logprob"] is None
        assert [len(top) for top in details["top_tokens"]] == [2, 2, 2]


async def test_a_stream_has_one_event_per_token_and_the_end_in_the_last(start: Start) -> None:
    async with start("hello world", accepts=always) as router:
        stream = await events(router, "ab", max_new_tokens=4)
        assert [event["index"] for event in stream] == [1, 2, 3, 4]
        assert [event["token"]["text"] for event in stream] == ["hello", " wo", "r", "l"]
        assert [event["generated_text"] for event in stream] == [None, None, None, "hello worl"]
        assert not any("top_tokens" in event for event in stream)
        assert stream[-1]["details"] == {
            "finish_reason": "length",
            "generated_tokens": 4,
            "seed": None,
            "input_length": 2,
        }


async def test_a_stream_gives_the_most_probable_tokens_with_each_token(start: Start) -> None:
    async with start("hello world") as router:
        stream = await events(router, "ab", max_new_tokens=3, top_n_tokens=2)
        assert [len(event["top_tokens"]) for event in stream] == [2, 2, 2]
        assert all(set(top) == {"id", "text", "logprob", "special"} for event in stream for top in event["top_tokens"])


@pytest.mark.parametrize(("stop", "texts"), [("rl", ["hello", " wo"]), ("wo", ["hello", " "]), ("he", [""])])
async def test_a_stop_string_is_cut_out_and_the_token_texts_join_to_the_text(
    start: Start, stop: str, texts: list[str]
) -> None:
    async with start("hello world", accepts=always) as router:
        stream = await events(router, "ab", max_new_tokens=9, stop=[stop])
        assert [event["token"]["text"] for event in stream] == texts
        assert stream[-1]["generated_text"] == "".join(texts)
        assert stream[-1]["details"]["finish_reason"] == "stop_sequence"


async def test_an_eos_is_the_last_event_and_special(start: Start) -> None:
    async with start("hello<|endoftext|>") as router:
        stream = await events(router, "ab", max_new_tokens=2)
        assert [event["token"]["special"] for event in stream] == [False, True]
        assert stream[-1]["details"]["finish_reason"] == "eos_token"
        assert stream[-1]["generated_text"] == "hello"


async def test_the_compat_route_is_either_and_begins_with_the_prompt_by_default(start: Start) -> None:
    async with start("hello") as router:
        whole = await router.post("/", inputs="ab", parameters={"max_new_tokens": 1})
        assert whole.json() == [{"generated_text": "abhello"}]
        bare = await router.post("/", inputs="ab", parameters={"max_new_tokens": 1, "return_full_text": False})
        assert bare.json() == [{"generated_text": "hello"}]
        stream = await router.post("/", inputs="ab", parameters={"max_new_tokens": 1}, stream=True)
        assert json.loads(stream.text.removeprefix("data:"))["generated_text"] == "abhello"


async def test_sampling_shows_its_seed_and_repeats_with_it(router: Any) -> None:
    asked = {"do_sample": True, "max_new_tokens": 12, "details": True}
    first = (await router.post("/generate", inputs="ab", parameters=asked)).json()
    again = (await router.post("/generate", inputs="ab", parameters={**asked, "seed": first["details"]["seed"]})).json()
    assert first["generated_text"] == again["generated_text"]


async def test_full_text_truncation_and_best_of(router: Any) -> None:
    asked = {"return_full_text": True, "truncate": 2, "max_new_tokens": 3, "best_of": 2, "do_sample": True}
    body = (await router.post("/generate", inputs="abcdef", parameters={**asked, "details": True})).json()
    assert body["generated_text"].startswith("ef")
    (other,) = body["details"]["best_of_sequences"]
    assert other["generated_text"].startswith("ef")
    assert set(other) == {"generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0},
        {"top_p": 1.5},
        {"max_new_tokens": 0},
        {"best_of": 2},
        {"grammar": {"type": "regex", "value": "(a"}},
        {"grammar": {"type": "json", "value": 3}},
        {"grammar": {"type": "wizardry", "value": "a"}},
        {"watermark": True},
        {"nonsense": 1},
        {"stop": ["a"] * 17},
        {"max_new_tokens": 5000},
        {"top_k": 0},
    ],
)
async def test_a_wrong_parameter_is_a_422_also_for_streams(router: Any, parameters: dict[str, Any]) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        answer = await router.post(path, inputs="x", parameters=parameters)
        assert answer.status_code == 422, answer.text
        assert set(answer.json()) == {"error", "error_type"}
        assert answer.json()["error_type"] == "validation"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "kind", "source"),
    [
        ({"type": "regex", "value": "a+"}, "regex", "a+"),
        ({"type": "json", "value": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ({"type": "json_object", "value": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ],
)
async def test_a_grammar_reaches_the_worker_from_every_field_it_can_come_in(
    router: Any, given: dict[str, Any], kind: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ValidRequest] = []
    submit = router.service.engine.submit
    monkeypatch.setattr(
        router.service.engine, "submit", lambda request, **rest: seen.append(request) or submit(request, **rest)
    )
    asked = {"max_new_tokens": 1, "grammar": given}
    messages = [{"role": "user", "content": "Hi"}]
    answers = [
        await router.post("/generate", inputs="x", parameters=asked),
        await router.post("/generate_stream", inputs="x", parameters=asked),
        # Hugging Face's client sends a chat's schema in TGI's form, too.
        await router.post("/v1/chat/completions", messages=messages, max_tokens=1, response_format=given),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200], [answer.text for answer in answers]
    assert [request.sampling.grammar for request in seen] == [Grammar(kind, source)] * 3  # type: ignore[arg-type]


async def test_neutral_parameters_and_top_p_1_are_taken(router: Any) -> None:
    neutral: dict[str, Any] = {
        "watermark": False, "grammar": None, "adapter_id": None, "top_p": 1.0, "seed": None, "stop": [],
    }  # fmt: skip
    answer = await router.post("/generate", inputs="x", parameters={**neutral, "max_new_tokens": 1})
    assert answer.status_code == 200, answer.text


async def test_asking_for_a_part_of_the_details_is_asking_for_them(start: Start) -> None:
    async with start("hello") as router:
        ranked = await router.post("/generate", inputs="ab", parameters={"max_new_tokens": 1, "top_n_tokens": 3})
        assert [len(top) for top in ranked.json()["details"]["top_tokens"]] == [3]
        plain = await router.post("/generate", inputs="ab", parameters={"max_new_tokens": 1})
        assert plain.json() == {"generated_text": "hello"}
        asked = {"max_new_tokens": 1, "decoder_input_details": True}
        body = (await router.post("/generate", inputs="ab", parameters=asked)).json()
        assert [entry["text"] for entry in body["details"]["prefill"]] == ["a", "b"]


async def test_a_limit_nobody_asked_for_is_cut_to_what_fits(router: Any) -> None:
    asked = {"details": True, "stop": []}
    body = (await router.post("/generate", inputs="x" * 509, parameters=asked)).json()
    assert body["details"]["generated_tokens"] <= 3
    completion = await router.complete(prompt="x" * 509, ignore_eos=True)
    assert (completion["usage"]["completion_tokens"], completion["choices"][0]["finish_reason"]) == (3, "length")
    answer = await router.post("/v1/completions", prompt="x" * 512)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def streamed(router: Any, path: str, **body: Any) -> list[Any]:
    answer = await router.post(path, **body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data:").strip() for line in answer.text.split("\n\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


async def test_a_top_p_of_1_is_taken_and_cuts_nothing(router: Any, seen: list[ValidRequest]) -> None:
    asked = {"do_sample": True, "seed": 5, "max_new_tokens": 8}
    plain = await router.post("/generate", inputs="ab", parameters=asked)
    whole = await router.post("/generate", inputs="ab", parameters={**asked, "top_p": 1.0, "typical_p": 1})
    assert whole.json() == plain.json()
    assert seen[0].sampling == seen[1].sampling


async def test_a_presence_penalty_stays_one(router: Any, seen: list[ValidRequest]) -> None:
    await router.post("/v1/chat/completions", messages=USER, max_tokens=1, presence_penalty=0.5)
    assert (seen[0].sampling.presence_penalty, seen[0].sampling.repetition_penalty) == (0.5, 1.0)


async def test_n_and_logit_bias_do_what_they_say(router: Any, seen: list[ValidRequest]) -> None:
    answer = await router.post("/v1/chat/completions", messages=USER, max_tokens=1, n=2, logit_bias={"70": 3})
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    assert dict(seen[0].sampling.logit_bias) == {70: 3.0}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_answer_has_an_id_and_every_event_the_same(router: Any, path: str) -> None:
    asked = {"messages": USER} if "chat" in path else {"prompt": "ab"}
    first, second = [(await router.post(path, max_tokens=1, **asked)).json()["id"] for _ in range(2)]
    assert first
    assert first != second
    names = {event["id"] for event in await streamed(router, path, max_tokens=5, stream=True, **asked)}
    assert len(names) == 1
    assert names != {""}


async def test_no_part_of_a_stop_string_is_in_any_answer(start: Start) -> None:
    async with start("hello world", accepts=always) as router:
        generated = await router.post("/generate", inputs="ab", parameters={"stop": ["o w"], "details": True})
        assert generated.json()["generated_text"] == "hell"
        assert "".join(token["text"] for token in generated.json()["details"]["tokens"]) == "hell"
        for path, asked in (("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", {"messages": USER})):
            body = (await router.post(path, stop=["o w"], temperature=0, **asked)).json()["choices"][0]
            assert (body.get("text") or body["message"]["content"]) == "hell"


async def test_log_probabilities_are_numbers(router: Any) -> None:
    body = (await router.post("/v1/chat/completions", messages=USER, max_tokens=4, logprobs=True)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(entry["logprob"] < 0 for entry in content)
    events = await streamed(router, "/generate_stream", inputs="ab", parameters={"max_new_tokens": 4})
    assert all(event["token"]["logprob"] < 0 for event in events)


@pytest.mark.parametrize(
    "parameters",
    [{"max_new_tokens": 0}, {"best_of": 2, "do_sample": True}, {"decoder_input_details": True}, {"top_p": 2}],
)
async def test_a_refused_stream_is_no_200(router: Any, parameters: dict[str, Any]) -> None:
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        answer = await router.post(path, inputs="x", parameters=parameters, **more)
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/json"), answer.text


async def test_a_stop_string_is_seen_inside_a_token(start: Start) -> None:
    async with start("hello world", accepts=never) as router:
        events = await streamed(router, "/generate_stream", inputs="ab", parameters={"stop": ["ell"]})
        assert events[-1]["generated_text"] == "h"
        assert events[-1]["details"]["finish_reason"] == "stop_sequence"


async def test_an_eos_on_the_last_allowed_token_is_an_eos(start: Start) -> None:
    async with start("hello<|endoftext|>") as router:
        asked = {"max_new_tokens": 2, "details": True}
        details = (await router.post("/generate", inputs="ab", parameters=asked)).json()["details"]
        assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", 2)
        assert details["tokens"][-1]["special"]
        completion = await router.complete(prompt="ab", max_tokens=2)
        assert completion["choices"][0]["finish_reason"] == "stop"


async def test_a_long_answer_has_exactly_as_many_tokens_as_were_asked_for(start: Start) -> None:
    async with start("ab", accepts=always, window=4096, num_blocks=1100) as router:
        for num_prompt, num_tokens in ((1, 2500), (1500, 2596)):
            asked = {"max_new_tokens": num_tokens, "details": True}
            answer = await router.post("/generate", inputs="x" * num_prompt, parameters=asked)
            assert answer.status_code == 200, answer.text
            details = answer.json()["details"]
            assert (details["generated_tokens"], details["finish_reason"]) == (num_tokens, "length")
            assert len(details["tokens"]) == num_tokens
        beyond = await router.post("/generate", inputs="x" * 1500, parameters={"max_new_tokens": 2597})
        assert beyond.status_code == 422


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/", {"inputs": "ab", "parameters": {"max_new_tokens": 4, "details": True}}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "temperature": 0}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 4, "temperature": 0}),
]


def lasting(body: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one body share: not their ids, times and cached tokens."""
    return {name: body[name] for name in ("object", "model", "choices", "system_fingerprint")}


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_body_is_answered_as_its_own_route_answers_it(start: Start, path: str, body: dict[str, Any]) -> None:
    async with start("hello world") as router:
        own = await router.post(path, **body)
        invoked = await router.post("/invocations", **body)
        assert (own.status_code, invoked.status_code) == (200, 200), invoked.text
        if path == "/":
            assert invoked.json() == own.json()
        else:
            assert lasting(invoked.json()) == lasting(own.json())


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_is_asked_for_in_the_body(start: Start, path: str, body: dict[str, Any]) -> None:
    async with start("hello world") as router:
        answer = await router.post("/invocations", stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data:") for line in answer.text.split("\n\n") if line]
        assert json.loads(events[0])
        assert (events[-1].strip() == "[DONE]") == (path != "/")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "none of them"),
        ({"inputs": None}, "none of them"),
        ({"inputs": "a", "prompt": "a"}, "`inputs` and `prompt`"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "nonsense": 1}, "nonsense"),
    ],
)
async def test_a_wrong_body_is_a_422_in_tgis_shape(router: Any, body: dict[str, Any], words: str) -> None:
    answer = await router.post("/invocations", **body)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert words in answer.json()["error"]


async def test_a_ping_says_whether_it_is_worth_invoking(start: Start) -> None:
    async with start("yes") as router:
        assert (await router.client.get("/ping")).status_code == 200
    async with start("yes", ready=False, refuse="no") as router:
        assert (await router.client.get("/ping")).status_code == 503
        assert (await router.post("/invocations", inputs="x")).status_code == 503
