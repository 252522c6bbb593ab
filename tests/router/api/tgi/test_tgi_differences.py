"""What TGI gets wrong, one test each: parameters changed or ignored, texts and ids that lie, refusals that look fine.

Seeds that change with load are in tests/e2e/test_clients.py, on a real model.
"""

import json
from typing import Any

import pytest
from doubles.router import always, never
from doubles.router.whole_router import USER, Start
from space_router.engine.request.request import ValidRequest


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
