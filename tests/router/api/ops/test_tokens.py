"""Text to tokens and back, for texts and for conversations."""

import threading
import time
from typing import Any

from doubles.tokenizers import byte_level
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
    tokenizer, text = Tokenizer(byte_level(), {}), "".join(chr(97 + n * n % 26) for n in range(400_000))
    shares: list[float] = []
    while len(shares) < 5 and min(shares, default=1.0) >= 0.6:  # the machine itself may stop now and then
        shares.append(longest_wait(tokenizer, text))
    assert min(shares) < 0.6, shares
