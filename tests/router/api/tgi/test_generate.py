"""TGI's routes in TGI's shapes."""

import json
from typing import Any

import pytest
from doubles.router import always
from doubles.router.whole_router import Start
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
        {"stop": ["a"] * 9},
        {"max_new_tokens": 5000},
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
        "watermark": False,
        "grammar": None,
        "adapter_id": None,
        "top_p": 1.0,
        "seed": None,
        "stop": [],
    }
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
