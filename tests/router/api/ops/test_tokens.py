"""Text to tokens and back, for texts and for conversations."""

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from doubles.router.whole_router import Start
from doubles.tokenizers import FIRST_BYTE_ID, byte_level
from space_router.api_keys import ApiKey, KeyLimits
from space_router.config import ServeConfig
from space_router.text.text_pieces import MAX_STRETCH
from space_router.text.tokenizer import Tokenizer

USER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello w"}]


async def test_a_conversation_is_tokenised_as_it_is_answered(router: Any) -> None:
    made = (await router.post("/chat_tokenize", messages=USER)).json()
    text, tokens = made["templated_text"], made["tokenize_response"]
    assert "Be brief." in text
    assert "".join(token["text"] for token in tokens) == text
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in tokens)
    answered = (await router.post("/v1/chat/completions", messages=USER, max_tokens=1)).json()
    assert answered["usage"]["prompt_tokens"] == len(tokens)


async def test_the_fields_of_a_chat_request_are_taken_and_checked(router: Any) -> None:
    whole = (await router.post("/chat_tokenize", model="tiny", messages=USER, max_tokens=5, temperature=0.5)).json()
    cut = (await router.post("/chat_tokenize", messages=USER, truncate_prompt_tokens=3)).json()
    assert cut["tokenize_response"] == whole["tokenize_response"][-3:]
    wrong = await router.post("/chat_tokenize", messages=USER, nonsense=1)
    assert (wrong.status_code, wrong.json()["error_type"]) == (422, "validation")


async def test_a_generate_request_is_tokenised_with_its_parameters(router: Any) -> None:
    whole = (await router.post("/tokenize", inputs="hello world", parameters={"max_new_tokens": 5})).json()
    cut = (await router.post("/tokenize", inputs="hello world", parameters={"truncate": 2})).json()
    assert [token["text"] for token in whole][-2:] == [token["text"] for token in cut]
    assert len(whole) > 2
    for body in ({"inputs": "a", "parameters": {"nonsense": 1}}, {"prompt": "a", "parameters": {"truncate": 1}}):
        wrong = await router.post("/tokenize", **body)
        assert (wrong.status_code, wrong.json()["error_type"]) == (422, "validation"), wrong.text


async def test_a_client_can_leave_tokenising_to_the_server(router: Any) -> None:
    info = (await router.client.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["pad_token"]) == ("<|endoftext|>", None)
    assert "<|im_start|>" in info["chat_template"]


def test_a_beginning_that_only_the_config_adds_is_in_the_spans_too() -> None:
    tokenizer = Tokenizer(byte_level(), {"add_bos_token": True, "bos_token": "<|endoftext|>"})
    spans = tokenizer.encode_spans("hello w")
    assert [id_ for id_, _, _ in spans] == tokenizer.encode("hello w")
    assert spans[0][1:] == (0, 0)
    assert [id_ for id_, _, _ in tokenizer.encode_spans("hello w", add_special_tokens=False)] == tokenizer.encode(
        "hello w", add_special_tokens=False
    )


HALF = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
}


async def test_half_a_character_in_a_call_s_arguments_is_the_client_s_mistake(router: Any) -> None:
    """As JSON the arguments are right; no tokenizer takes what they say."""
    messages = [*USER, HALF, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    for path, status in (("/v1/chat/completions", 400), ("/chat_tokenize", 422)):
        answer = await router.post(path, messages=messages)
        assert answer.status_code == status, answer.text
        assert "half of a surrogate pair" in answer.text


def longest_wait(tokenizer: Tokenizer, text: str) -> float:
    """Of another thread while the places in a text are found: what share of that time."""
    done = threading.Event()

    def find() -> None:
        tokenizer.encode_spans(text)
        done.set()

    longest, last = 0.0, time.perf_counter()
    worker = threading.Thread(target=find)
    worker.start()
    begun = last
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    worker.join()
    return longest / (last - begun)


def test_other_threads_run_while_places_are_found() -> None:
    """A text of megabytes kept every stream waiting for seconds."""
    tokenizer, text = Tokenizer(byte_level(), {}), "".join(chr(97 + n * n % 26) for n in range(MAX_STRETCH))
    shares: list[float] = []
    while len(shares) < 5 and min(shares, default=1.0) >= 0.6:  # the machine itself may stop now and then
        shares.append(longest_wait(tokenizer, text))
    assert min(shares) < 0.6, shares


def peak() -> int:
    """The most memory of this process since `forget_peak`, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> int:
    """Return what is in use now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


async def posted(app: Any, path: str, content: bytes) -> int:
    """Post a body and read the answer without keeping it; return the status."""
    sent, statuses = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        if sent.is_set():
            await asyncio.Event().wait()
        sent.set()
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        await asyncio.sleep(0)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "raw_path": b""}
    await app(scope, receive, send)
    return int(statuses[0])


LONG = ("hellohellohellohello " * 200_000)[: 4 * 1024**2 - 1000]  # about one token for each four bytes


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/tokenize", {"prompt": LONG}, 64),
        pytest.param("/tokenize", {"inputs": LONG}, 6 * 64, marks=pytest.mark.slow),
        pytest.param(
            "/v1/completions",
            {"prompt": LONG, "max_tokens": 2, "truncate_prompt_tokens": 8},
            64,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ids", "places", "truncated"],
)
async def test_six_bodies_of_four_megabytes_take_little_memory_and_hold_nobody_up(
    start: Start, path: str, body: dict[str, Any], most: int
) -> None:
    """`most`: bytes that all six take together for each byte of one body."""
    content = json.dumps(body).encode()
    async with start("yes") as router:
        assert await posted(router.app, path, content) == 200  # what is made once is there
        before = forget_peak()
        waits = []
        tasks = [asyncio.create_task(posted(router.app, path, content)) for _ in range(6)]
        while not all(task.done() for task in tasks):
            begun = time.monotonic()
            await router.complete(prompt="a", max_tokens=4)
            waits.append(time.monotonic() - begun)
            await asyncio.sleep(0.01)
        taken = peak() - before
        assert [task.result() for task in tasks] == [200] * 6
        # A stalled machine stalls single requests; unbounded work stalls every one.
        assert sorted(waits)[len(waits) * 9 // 10] < 1.0, waits
        assert taken < most * len(content), f"{taken} bytes for six bodies of {len(content)}"


async def test_the_limits_of_a_key_hold_for_what_only_tokenises(start: Start) -> None:
    limits = KeyLimits(requests_per_minute=3, tokens_per_minute=1000)
    config = ServeConfig(api_keys=(ApiKey.of("one", "first", limits), ApiKey.of("two", "second", limits)))
    bodies = {
        "/tokenize": {"prompt": "a"},
        "/chat_tokenize": {"messages": USER},
        "/detokenize": {"tokens": [70]},
    }
    async with start("yes", config=config) as router:
        for path, body in bodies.items():
            answer = await router.client.post(path, json=body, headers={"authorization": "Bearer one"})
            assert answer.status_code == 200, answer.text
        for path, body in bodies.items():
            refused = await router.client.post(path, json=body, headers={"authorization": "Bearer one"})
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["retry-after"]) >= 1
        large = {"prompt": "hello w " * 10_000}  # 80,000 bytes are charged as 1,250 tokens
        for status in (200, 429):
            answer = await router.client.post("/tokenize", json=large, headers={"authorization": "Bearer two"})
            assert answer.status_code == status, answer.text[:200]
        assert "1000 tokens a minute" in answer.text


async def test_an_answer_has_a_bounded_number_of_tokens(router: Any) -> None:
    text = "a b " * 300_000
    for field in ("prompt", "inputs"):
        answer = await router.post("/tokenize", **{field: text})
        assert answer.status_code == 422, answer.text[:200]
        assert "more than 1048576 tokens" in answer.text
    cut = await router.post("/tokenize", inputs=text, parameters={"truncate": 5})
    assert [token["stop"] for token in cut.json()] == [1_199_996, 1_199_997, 1_199_998, 1_199_999, 1_200_000]


async def test_a_control_token_in_a_message_is_text_on_every_route_and_a_token_in_a_raw_prompt(router: Any) -> None:
    spelled = [{"role": "user", "content": "a<|im_end|>b<|mask_1|>"}]
    made = (await router.post("/chat_tokenize", messages=spelled)).json()["tokenize_response"]
    ids = [token["id"] for token in made]
    start, end = router.service.text.tokenizer.token_to_id("<|im_start|>"), 2
    assert [id_ for id_ in ids if id_ < FIRST_BYTE_ID] == [start, end, start]
    answer = (await router.post("/v1/chat/completions", messages=spelled, max_tokens=1, return_token_ids=True)).json()
    assert answer["choices"][0]["prompt_token_ids"] == ids
    asked = {"input": spelled[0]["content"], "max_output_tokens": 1}
    assert (await router.post("/v1/responses", **asked)).json()["usage"]["input_tokens"] == len(ids)
    assert (await router.post("/tokenize", prompt="<|im_end|>")).json()["tokens"] == [end]
    refused = await router.post("/v1/completions", prompt="<|mask_1|>")
    assert (refused.status_code, "mask token" in refused.text) == (400, True)


async def test_tokenize_takes_a_conversation_and_gives_the_ids_of_a_chat(router: Any) -> None:
    name = router.service.text.name
    weather = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for more in ({}, {"tools": [weather]}, {"add_generation_prompt": False}, {"model": name}):
        asked = {"messages": [{"role": "user", "content": "Hi <|im_end|>"}], **more}
        answer = (await router.post("/v1/chat/completions", **asked, max_tokens=1, return_token_ids=True)).json()
        made = (await router.post("/tokenize", **asked)).json()
        assert made["tokens"] == answer["choices"][0]["prompt_token_ids"]
        assert made["count"] == answer["usage"]["prompt_tokens"] == len(made["tokens"])
        assert made["max_model_len"] == router.service.engine.facts.window


async def test_tokenize_gives_tokens_as_the_vocabulary_writes_them(router: Any) -> None:
    text = "Grüße, world!\n" * 400  # more than one piece
    plain = (await router.post("/tokenize", prompt=text)).json()
    made = (await router.post("/tokenize", prompt=text, return_token_strs=True)).json()
    to_id = router.service.text.tokenizer.token_to_id
    assert [to_id(one) for one in made.pop("token_strs")] == plain["tokens"]
    assert made == plain
    assert (await router.post("/tokenize", prompt="", return_token_strs=True)).json()["token_strs"] == []
    asked = {"messages": USER, "return_token_strs": True}
    made = (await router.post("/tokenize", **asked)).json()
    assert [to_id(one) for one in made["token_strs"]] == made["tokens"]
    assert "token_strs" not in (await router.post("/tokenize", messages=USER, return_token_strs=False)).json()
    assert (await router.post("/tokenize", inputs="a", return_token_strs=True)).status_code == 422


async def test_tokenize_and_detokenize_check_the_model_and_the_messages(router: Any) -> None:
    name = router.service.text.name
    assert (await router.post("/tokenize", model=name, prompt="a")).json()["count"] == 1
    assert (await router.post("/detokenize", model=name, tokens=[70])).json()["prompt"]
    bodies = {"/tokenize": [{"prompt": "a"}, {"inputs": "a"}, {"messages": USER}], "/detokenize": [{"tokens": [70]}]}
    for path, asked in bodies.items():
        for body in asked:
            answer = await router.post(path, model="other", **body)
            assert (answer.status_code, "not served here" in answer.text) == (404, True)
    for body in ({"messages": []}, {"messages": [{"role": "nobody"}]}, {"messages": USER, "prompt": "a"},
                 {"prompt": "a", "add_generation_prompt": True}):  # fmt: skip
        assert (await router.post("/tokenize", **body)).status_code == 422
