"""Every bad request gets its error, in its API's shape, and harms nobody."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

TEXT = {"prompt": "x"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
BOUNDS = {  # field -> values outside of it
    "max_tokens": [-1, 1.5, "12", True, [], 2**40], "min_tokens": [-1, "1", 0.5],
    "temperature": [-0.1, 2.1, "hot", True, []], "top_p": [0, 1.1, -1, "x"], "top_k": [-2, 1.5, "x"],
    "min_p": [-0.1, 1.1], "typical_p": [0, 2], "presence_penalty": [-2.1, 2.1], "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, "x"],
    "logit_bias": [{"a": 1}, {"1": 101}, {"1": "x"}, {"999999999": 1}, {"-1": 1}, [1]], "bad_words": [[""], "x", [1]],
    "allowed_token_ids": [[], [-1], [10**8], ["a"]],
    "stop": [[""], "", 5, [5], ["a"] * 17, ["a"] * 10_000, ["x" * 5000]], "stop_token_ids": [[-1], [10**8], "a"],
    "n": [0, -1, 1.5, 10**6], "seed": [-(2**64), 2**64, 1.5, "x"], "stream": ["yes", 1],
    "stream_options": [[], {"include": True}], "speculation": ["fast", -1, 1.5, 99], "prompt_logprobs": [-1, 21],
    "priority": [2**31, "high"], "timeout": [0, -1, "soon"], "request_id": ["", "a b", "x" * 200],
    "truncate_prompt_tokens": [0, -2], "no_such_field": [1], "response_format": [{"type": "xml"}, "json"],
    "structured_outputs": [{"regex": "a("}, {"regex": "a", "choice": ["b"]}, {"json": {"type": "nothing"}}],
    "tools": [[{"type": "function"}]],
}  # fmt: skip
ONLY_TEXT = {
    "prompt": [5, [], [[]], [-1], [10**8], [1, "a"], {}, ["a"] * 100], "logprobs": [-1, 21, True],
    "best_of": [0, "x"], "echo": ["yes"], "suffix": ["x"],
}  # fmt: skip
ONLY_CHAT = {
    "messages": [[], "x", [{"role": "nobody", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]],
    "logprobs": [3],
    "top_logprobs": [5, 21],
    "max_completion_tokens": [0, -1, "x"],
}  # fmt: skip
TGI = {
    "max_new_tokens": [0, -1, "x"], "temperature": [-1, "x"], "top_p": [0, 1.5], "top_k": [-5, "x"],
    "typical_p": [0, 2], "repetition_penalty": [0, -1], "best_of": [0], "seed": [-1], "stop": [5, [""]],
    "top_n_tokens": [-1, 1000], "truncate": [0], "no_such_field": [1],
}  # fmt: skip
MALFORMED = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "x"', b'{"prompt": "x",}', b"[" * 100_000]
NOT_FINITE = ["NaN", "Infinity", "-Infinity", "1e999"]


@pytest.fixture(scope="module")
def disturbed(live: Any) -> Iterator[Any]:
    """The shared server, with a stream running all the while: it must end as it does when nobody disturbs it."""
    body = {"max_tokens": 400, "temperature": 0.8, "seed": 9}
    alone = live.complete("undisturbed", **body)["choices"][0]["text"]
    stopping = False

    def stream() -> list[str]:
        texts = []
        while not (stopping and texts):
            texts.append("".join(event["choices"][0]["text"] for event in live.stream("undisturbed", **body)))
        return texts

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        yield live
        stopping = True
        assert set(running.result()) == {alone}
    live.wait_idle()


def refused(live: Any, path: str, content: bytes, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused, small and in OpenAI's shape."""
    answer = live.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, f"{content[:200]!r}: {answer.status_code} {answer.text[:300]}"
    assert len(answer.content) < 1000
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "base", "more"),
    [("/v1/completions", TEXT, ONLY_TEXT), ("/v1/chat/completions", CHAT, ONLY_CHAT)],
    ids=["completions", "chat"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_field_outside_its_bounds_is_refused_by_name(
    disturbed: Any, path: str, base: dict[str, Any], more: dict[str, Any], stream: bool
) -> None:
    for field, values in {**BOUNDS, **more}.items():
        for value in values:
            body = {**base, "max_tokens": 4, "stream": stream, field: value}
            if field == "max_completion_tokens":
                del body["max_tokens"]
            error = refused(disturbed, path, json.dumps(body).encode())
            assert error["type"] == "invalid_request_error"
            assert error["param"] == field, f"{field}={value!r}: {error}"
            assert re.search(rf"\b{field}\b", error["message"]), error["message"]


def test_numbers_that_are_not_finite_and_json_that_is_none_are_refused(disturbed: Any) -> None:
    for field in ("temperature", "top_p", "min_p", "presence_penalty", "timeout"):
        for number in NOT_FINITE:
            error = refused(disturbed, "/v1/completions", f'{{"prompt": "x", "{field}": {number}}}'.encode())
            assert field in error["message"] or "JSON" in error["message"]
    for content in MALFORMED:
        refused(disturbed, "/v1/completions", content)
        refused(disturbed, "/v1/chat/completions", content)


def test_another_model_is_not_found(disturbed: Any) -> None:
    for path, base in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        error = refused(disturbed, path, json.dumps({**base, "model": "gpt-x"}).encode(), status=404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_window_is_refused_with_both_lengths(disturbed: Any, stream: bool) -> None:
    window = disturbed.get("/info")["max_total_tokens"]
    ids = disturbed.http.post("/tokenize", json={"prompt": "a"}).json()["tokens"][-1:]
    for prompt in (ids * window, ids * (window - 1) * 3, "a b" * 300 * window):
        error = refused(disturbed, "/v1/completions", json.dumps({"prompt": prompt, "stream": stream}).encode())
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert error["n_ctx"] == window
        assert error["n_prompt_tokens"] >= window
    error = refused(disturbed, "/v1/completions", json.dumps({"prompt": ids * 8, "max_tokens": window - 7}).encode())
    assert str(window) in error["message"]


def test_mask_tokens_are_refused_in_prompts(disturbed: Any) -> None:
    text = {"prompt": "<|mask_1|>", "max_tokens": 1}
    ids = disturbed.http.post("/tokenize", json={"prompt": "<|mask_1|>"}).json()["tokens"]
    if len(ids) == 1:  # the checkpoint spells it so
        assert "mask" in refused(disturbed, "/v1/completions", json.dumps(text).encode())["message"]
        assert refused(disturbed, "/v1/completions", json.dumps({"prompt": ids}).encode())["param"] == "prompt"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_tgi_requests_are_refused_with_422_in_tgis_shape(disturbed: Any, path: str) -> None:
    bodies = [{"inputs": "x", "parameters": {name: value}} for name, values in TGI.items() for value in values]
    for body in [*bodies, {}, {"inputs": 5}, {"inputs": ""}, {"inputs": "x", "parameters": 5}, {"inputs": "x", "y": 1}]:
        answer = disturbed.http.post(path, json=body)
        assert answer.status_code == 422, f"{body}: {answer.status_code} {answer.text[:200]}"
        assert answer.json().keys() == {"error", "error_type"}
        assert answer.json()["error_type"] == "validation"
        assert len(answer.content) < 1000


def test_bodies_too_large_or_of_another_kind_and_unknown_routes_have_their_own_status(disturbed: Any) -> None:
    refused(disturbed, "/v1/completions", b'{"prompt": "' + b"x" * 5 * 1024**2 + b'"}', status=413)
    kinds = disturbed.http.post("/v1/completions", content=b"prompt=x", headers={"content-type": "text/plain"})
    assert kinds.status_code == 415
    assert disturbed.http.get("/v1/completions").status_code == 405
    assert disturbed.http.post("/v1/nothing", json={}).status_code == 404
