"""Every wrong request gets a small, exact error in the shape of its API, before any header of a stream."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from doubles.router.whole_router import USER, Start
from doubles.tokenizers import FIRST_BYTE_ID, MASK_ID, VOCAB_SIZE
from space_router.api.request_builder import Parameters, PromptOptions
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig
from space_router.engine.queueing.admission import MIN_STEPS
from space_router.engine.request.request import ValidRequest
from space_router.http_server import body as body_module

State = Callable[[Start], AbstractAsyncContextManager[Any]]

MAX_ERROR = 2000  # Bytes of an error's body, whatever came in


@asynccontextmanager
async def plain(start: Start) -> AsyncIterator[Any]:
    async with start("yes", failing_id=FIRST_BYTE_ID + ord("!")) as router:
        yield router


def configured(**fields: Any) -> State:
    return lambda start: start("yes", config=ServeConfig(**fields))


@asynccontextmanager
async def slow(start: Start) -> AsyncIterator[Any]:
    """Nothing is done in 0.2 s, and the engine knows."""
    async with start("yes", step_seconds=0.05) as router:
        engine = router.service.engine
        for _ in range(MIN_STEPS):
            engine._throughput.tokens.learn(1.0, 1, engine._clock())
        yield router


@asynccontextmanager
async def full(start: Start) -> AsyncIterator[Any]:
    """One request runs, and nobody may wait."""
    async with start("yes", config=ServeConfig(max_queue=0), max_sequences=1, step_seconds=0.01) as router:
        builder = router.service.builder()
        prompt = builder.prompt("x", PromptOptions("prompt", add_special_tokens=True))
        busy = builder.plan([prompt], Parameters(max_tokens=400, ignore_eos=True), prefix="t")
        async with router.service.engine.submit(busy.choices[0].request):
            yield router


@asynccontextmanager
async def broken(start: Start) -> AsyncIterator[Any]:
    """Something nobody expected happens to every request."""
    async with start("yes") as router:
        router.service.engine.submit = lambda *_, **__: {}["secret internals"]
        yield router


@asynccontextmanager
async def draining(start: Start) -> AsyncIterator[Any]:
    async with start("yes") as router:
        router.service.draining = True
        yield router


@asynccontextmanager
async def starting(start: Start) -> AsyncIterator[Any]:
    async with start("yes", ready=False, refuse="no") as router:
        yield router


@dataclass(frozen=True)
class Row:
    """One kind of error. What is asked is right but for `fields` (of OpenAI) and `parameters` (of TGI)."""

    status: int
    kind: str  # OpenAI's `type`
    code: str | None
    tgi_status: int
    tgi_kind: str
    state: State = plain
    fields: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    text: str = "x"  # the prompt
    body: bytes | None = None  # sent instead
    headers: Mapping[str, str] = field(default_factory=dict)
    param: str | None = None
    answer_headers: tuple[str, ...] = ()


HOT = {"temperature": 300.0}
ROWS = {
    "a field out of its bounds": Row(
        400, "invalid_request_error", "invalid_value", 422, "validation",
        fields=HOT, parameters=HOT, param="temperature",
    ),
    "an unknown field": Row(
        400, "invalid_request_error", "unknown_parameter", 422, "validation",
        fields={"nonsense": 1}, parameters={"nonsense": 1}, param="nonsense",
    ),
    "an unsupported field": Row(
        400, "invalid_request_error", "unsupported_parameter", 422, "validation",
        fields={"use_beam_search": True}, parameters={"watermark": True}, param="use_beam_search",
    ),
    "no JSON": Row(400, "invalid_request_error", None, 422, "validation", body=b"{"),
    "a prompt beyond the window": Row(
        400, "invalid_request_error", "context_length_exceeded", 422, "validation", text="x" * 600, param="PROMPT",
    ),
    "no key": Row(
        401, "authentication_error", "invalid_api_key", 401, "authentication",
        state=configured(api_keys=plain_keys("secret")), answer_headers=("www-authenticate",),
    ),
    "a wrong key": Row(
        401, "authentication_error", "invalid_api_key", 401, "authentication",
        state=configured(api_keys=plain_keys("secret")), headers={"authorization": "Bearer wrong"},
    ),
    "an unknown model": Row(
        404, "invalid_request_error", "model_not_found", 404, "not_found",
        fields={"model": "gpt-9"}, parameters={"adapter_id": "gpt-9"}, param="model",
    ),
    "a body too large": Row(
        413, "invalid_request_error", None, 413, "validation", state=configured(max_body=500), text="x" * 900,
    ),
    "another kind of body": Row(
        415, "invalid_request_error", None, 415, "validation", headers={"content-type": "text/plain"},
    ),
    "a compressed body": Row(
        415, "invalid_request_error", None, 415, "validation", headers={"content-encoding": "gzip"},
    ),
    "a full queue": Row(
        429, "rate_limit_error", "queue_full", 429, "overloaded", state=full, answer_headers=("retry-after",),
    ),
    "an accident": Row(500, "server_error", "internal_error", 500, "incomplete_generation", state=broken),
    "a start": Row(
        503, "service_unavailable_error", "not_ready", 503, "unhealthy", state=starting,
        answer_headers=("retry-after",),
    ),
    "a stop": Row(
        503, "service_unavailable_error", "draining", 503, "unhealthy", state=draining,
        answer_headers=("retry-after",),
    ),
}  # fmt: skip


async def send(router: Any, path: str, body: Mapping[str, Any], row: Row) -> httpx.Response:
    content = json.dumps(body).encode() if row.body is None else row.body
    answer: httpx.Response = await router.client.post(
        path, content=content, headers={"content-type": "application/json", **row.headers}
    )
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.content) < MAX_ERROR
    for name in row.answer_headers:
        assert answer.headers[name]
    assert "secret" not in answer.text
    return answer


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
async def test_openai_errors_have_their_status_and_shape(start: Start, row: Row) -> None:
    prompts = {
        "/v1/completions": ("prompt", row.text),
        "/v1/chat/completions": ("messages", [{"role": "user", "content": row.text}]),
    }
    async with row.state(start) as router:
        for path, (name, value) in prompts.items():
            for stream in (False, True):
                answer = await send(router, path, {name: value, "max_tokens": 3, "stream": stream, **row.fields}, row)
                assert answer.status_code == row.status, answer.text
                error = answer.json()["error"]
                details = {"n_prompt_tokens", "n_ctx"} if row.code == "context_length_exceeded" else set()
                assert error.keys() == {"message", "type", "param", "code"} | details
                param = name if row.param == "PROMPT" else row.param
                assert (error["type"], error["code"], error["param"]) == (row.kind, row.code, param), error
                if details:
                    num_prompt = error["n_prompt_tokens"]
                    assert num_prompt == 600 if name == "prompt" else num_prompt > 600
                    assert error["n_ctx"] == 512


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
async def test_tgi_errors_have_their_status_and_shape(start: Start, row: Row) -> None:
    async with row.state(start) as router:
        for path, more in (("/generate", {}), ("/generate_stream", {}), ("/", {}), ("/", {"stream": True})):
            body = {"inputs": row.text, "parameters": {"max_new_tokens": 3, **row.parameters}, **more}
            answer = await send(router, path, body, row)
            assert answer.status_code == row.tgi_status, answer.text
            assert answer.json().keys() == {"error", "error_type"}
            assert answer.json()["error_type"] == row.tgi_kind


async def test_every_choice_counts_for_a_full_queue(start: Start) -> None:
    async with full(start) as router:
        several = await router.post("/v1/completions", prompt="x", n=2, max_tokens=1)
        assert several.status_code == 429
        assert int(several.headers["retry-after"]) >= 1
        assert router.value("spaceserve_rejected_total", reason="queue_full") == 1


async def test_a_turn_that_does_not_come_in_time_is_a_429_also_for_streams_and_then_nothing_is_held(
    start: Start,
) -> None:
    config = ServeConfig(max_queue_seconds=0.1)
    async with start("yes", config=config, max_sequences=1, step_seconds=0.01) as router:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        running = asyncio.create_task(router.post("/v1/completions", **body))
        await router.until(lambda load: load.num_running == 1)
        for path, more in (
            ("/v1/completions", {"prompt": "y"}),
            ("/v1/completions", {"prompt": ["y", "z"], "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "y"}], "stream": True}),
        ):
            late = await router.post(path, max_tokens=2, **more)
            assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_timeout"), late.text
            assert int(late.headers["retry-after"]) >= 1
        late = await router.post("/generate_stream", inputs="y")
        assert (late.status_code, late.json()["error_type"]) == (429, "overloaded")
        late = await router.post("/v1/embeddings", input=["y", "z"])
        assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_timeout"), late.text
        await router.until(lambda load: load.num_running == 1 and not load.num_queued)
        assert router.value("spaceserve_requests_total", outcome="queue_timeout") == 6
        assert router.value("spaceserve_rejected_total", reason="queue_full") == 5
        waits = asyncio.create_task(router.events("/v1/completions", prompt="y", max_tokens=2))
        await router.until(lambda load: load.num_queued == 1)
        running.cancel()
        assert (await waits)[-1]["choices"][0]["finish_reason"], "a stream begins with its turn"


@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [
        ("/v1/completions", {"prompt": "x"}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "max_completion_tokens"),
        ("/v1/responses", {"input": "x"}, "max_output_tokens"),
        ("/generate", {"inputs": "x"}, "max_new_tokens"),
        ("/generate_stream", {"inputs": "x"}, "max_new_tokens"),
    ],
)
async def test_a_limit_beyond_the_window_has_its_own_name(
    start: Start, path: str, prompt: dict[str, Any], limit: str
) -> None:
    async with plain(start) as router:
        for fields, words in (({limit: 5000}, f"and {limit} is 5000"), ({limit: 5, "min_tokens": 6}, f"of `{limit}`")):
            if "generate" not in path or "min_tokens" not in fields:  # TGI has no such field
                body = {"parameters": fields} if "generate" in path else fields
                answer = await router.post(path, **prompt, **body)
                assert answer.status_code in (400, 422)
                assert words in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_cannot_be_met_is_refused_before_anything_is_sent(start: Start, stream: bool) -> None:
    async with slow(start) as router:
        for path, prompt in (("/v1/completions", {"prompt": "x"}),
                             ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):  # fmt: skip
            answer = await router.post(path, **prompt, max_tokens=400, timeout=0.2, stream=stream)
            assert answer.status_code == 408
            error = answer.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("timeout_error", "timeout", "deadline_exceeded")


async def test_a_request_that_fails_alone_is_a_500_and_tgis_424(start: Start) -> None:
    async with plain(start) as router:
        for path, body in (("/v1/completions", {"prompt": "a!"}),
                           ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a!"}]})):  # fmt: skip
            answer = await router.post(path, **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "generation_failed")
            streamed = await router.post(path, **body, stream=True)
            *_, last = [line for line in streamed.text.split("\n\n") if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "generation_failed"
        answer = await router.post("/generate", inputs="a!")
        assert (answer.status_code, answer.json()["error_type"]) == (424, "generation")
        streamed = await router.post("/generate_stream", inputs="a!")
        assert json.loads(streamed.text.strip().removeprefix("data:"))["error_type"] == "generation"
        assert (await router.complete(prompt="x", max_tokens=3))["choices"][0]["text"] == "yes"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/chat/completions", {"POST"}),
        ("HEAD", "/v1/completions", {"POST"}),
        ("POST", "/v1/models", {"GET"}),
        ("GET", "/generate", {"POST"}),
        ("PATCH", "/", {"GET", "POST"}),
        ("DELETE", "/metrics", {"GET"}),
        ("OPTIONS", "/v1/responses/input_tokens", {"POST"}),
        ("OPTIONS", "/v1/responses/resp_1", {"GET", "DELETE"}),
    ],
)
async def test_another_method_is_a_405_that_names_the_right_ones(
    router: Any, method: str, path: str, allowed: set[str]
) -> None:
    answer = await router.client.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == allowed
    if method != "HEAD":
        tgi = path in ("/generate", "/")
        assert answer.json().keys() == ({"error", "error_type"} if tgi else {"error"})


@pytest.mark.parametrize("path", ["/v1/nothing", "/v2/completions", "/generate/", "/v1", "/" + "x" * 5000, "/é%00"])
async def test_an_unknown_route_is_a_small_404(router: Any, path: str) -> None:
    for method in ("GET", "POST"):
        answer = await router.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert len(answer.content) < MAX_ERROR


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": 3}, "prompt", "string"),
    ({"prompt": []}, "prompt", "string"),
    ({"prompt": [True]}, "prompt", "string"),
    ({"prompt": [[1, "x"]]}, "prompt", "mixes"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": "", "add_special_tokens": False}, "prompt", "no tokens"),
    ({"prompt": [VOCAB_SIZE]}, "prompt", f"0 to {VOCAB_SIZE - 1}"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [2**63]}, "prompt", str(2**63)),
    ({"prompt": [MASK_ID]}, "prompt", "mask token"),
    ({"prompt": "<|mask_1|>"}, "prompt", "mask token"),
    ({"prompt": ["x"] * 65}, "prompt", "at most 64"),
    ({"prompt": "x", "n": 65}, "n", "at most 64"),
    ({"prompt": "x", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "integer"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "integer"),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", "integer"),
    ({"prompt": "x", "max_tokens": 2, "min_tokens": 3}, "min_tokens", "above the 2"),
    ({"prompt": "x", "temperature": 2.1}, "temperature", "less than or equal to 2; got 2.1"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "number"),
    ({"prompt": "x", "temperature": True}, "temperature", "number"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "top_p": 1.01}, "top_p", "less than or equal to 1"),
    ({"prompt": "x", "top_k": -2}, "top_k", "-1"),
    ({"prompt": "x", "min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"prompt": "x", "typical_p": 0}, "typical_p", "greater than 0"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty", "-2"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", "100"),
    ({"prompt": "x", "allowed_token_ids": [MASK_ID]}, "allowed_token_ids", "mask tokens only"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    ({"prompt": "x", "bad_words": [""]}, "bad_words", "at least 1"),
    ({"prompt": "x", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", str(VOCAB_SIZE)),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", "17 strings; at most 16"),
    ({"prompt": "x", "stop": [str(i) for i in range(10_000)]}, "stop", "10000 strings"),
    ({"prompt": "x", "stop": ["a", 3]}, "stop", "list of strings"),
    ({"prompt": "x", "stop": ""}, "stop", "1 to 1024"),
    ({"prompt": "x", "seed": -(2**63) - 1}, "seed", "integer"),
    ({"prompt": "x", "seed": 2**64}, "seed", "integer"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "20"),
    ({"prompt": "x", "logprobs": True}, "logprobs", "integer"),
    ({"prompt": "x", "speculation": "on"}, "speculation", "auto"),
    ({"prompt": "x", "speculation": 99}, "speculation", "at most 3 drafts per step"),
    ({"prompt": "x", "speculation": True}, "speculation", "auto"),
    ({"prompt": "x", "timeout": 0}, "timeout", "greater than 0"),
    ({"prompt": "x", "request_id": "a b"}, "request_id", "pattern"),
    ({"prompt": "x", "stream": False, "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"prompt": "x", "stream": True, "stream_options": {"nonsense": 1}}, "stream_options", "not a field"),
    ({"prompt": "x", "stream": True, "best_of": 2}, "best_of", "streamed"),
    ({"prompt": "x", "best_of": 1, "n": 2}, "best_of", "below"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": "x", "response_format": {"type": "prose"}}, "response_format", "json_schema"),
    ({"prompt": "x", "nonsense": 1}, "nonsense", "not a field"),
    ({"prompt": "x", "messages": USER}, "messages", "not a field"),
    ({"prompt": "x" * 200_000, "max_tokens": 1}, "prompt", "maximum context length is 512 tokens"),
    ({"prompt": "x" * 600, "max_tokens": 1}, "prompt", "maximum context length is 512 tokens"),
    ({"prompt": "x" * 500, "max_tokens": 50}, "prompt", "512"),
    ({"prompt": "x", "temperature": [[[[[[1]]]]]]}, "temperature", "number"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_field_is_named_with_its_bound(router: Any, stream: bool) -> None:
    for body, param, words in WRONG:
        await router.refuses("/v1/completions", param, words, **{"stream": stream, **body})
    assert (await router.complete(prompt="x", max_tokens=1))["usage"]["completion_tokens"] == 1


CHAT_WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": USER, "logprobs": 5}, "logprobs"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "modalities": ["audio"]}, "modalities"),
    ({"messages": USER, "prediction": "x"}, "prediction"),
    ({"messages": USER, "prediction": {"type": "text", "content": "x"}}, "prediction"),
    ({"messages": USER, "prediction": {"type": "content", "content": "x" * 600}}, "prediction"),
    ({"messages": USER, "prediction": {"type": "content", "content": "<|mask_1|>"}}, "prediction"),
    ({"messages": USER, "prompt": "x"}, "prompt"),
]


async def test_a_wrong_chat_request_is_named_too(router: Any) -> None:
    for body, param in CHAT_WRONG:
        await router.refuses("/v1/chat/completions", param, "", **body)


TEXT = {"type": "text", "text": "Hi"}
CALLED = {"name": "f", "arguments": "{}"}
NESTED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": [{**TEXT, "cached": {}}]}]},
     "`messages.0.content.0.cached` is not a field of this request."),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "`messages.0.content.0.text` is required."),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "`messages.0.content.0.type` must be 'text' or 'refusal' (no images, documents, audio or video are served); got "
     "'image_url'."),
    ("chat/completions", {"messages": [{"role": "user", "content": [TEXT, {"type": "input_audio"}]}]},
     "`messages.0.content.1.type` must be 'text' or 'refusal' (no images, documents, audio or video are served); got "
     "'input_audio'."),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]},
     "`messages.0.content.0.type` is required."),
    ("chat/completions", {"messages": [{"role": "user", "content": ["Hi"]}]},
     "`messages.0.content.0` must be an object; got 'Hi'."),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]},
     "`messages.0.content` must be a string or a list; got 5."),
    ("chat/completions",
     {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {**CALLED, "foo": 1}}]}]},
     "`messages.0.tool_calls.0.function.foo` is not a field of this request."),
    ("chat/completions", {"messages": USER, "tool_choice": {"type": "function", "function": {"name": "f", "foo": 1}}},
     "`tool_choice.function.foo` is not a field of this request."),
    ("chat/completions", {"messages": USER, "prediction": {"type": "content", "content": [{**TEXT, "foo": 1}]}},
     "`prediction.content.0.foo` is not a field of this request."),
    ("responses", {"input": [*USER, {"role": "user", "content": "Hi", "foo": 1}]},
     "`input.1.foo` is not a field of this request."),
    ("responses", {"input": [{"type": "item_reference"}]},
     "`input.0.type` must be 'message', 'function_call', 'function_call_output', 'custom_tool_call_output', "
     "'custom_tool_call', 'reasoning' or 'that of a hosted tool'; got 'item_reference'."),
    ("responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "text"}]}]},
     "`input.0.output.0.text` is required."),
    ("responses", {"input": "x", "tools": [], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "f"}, {"type": 0, "name": "f"}]}},
     "`tool_choice.tools.1.type` must be a valid string; got 0."),
    ("responses", {"input": 7}, "`input` must be a string or a list; got 7."),
    ("completions", {"prompt": "x", "seed": 2**64},
     "`seed` must be an integer of 64 bits; got 18446744073709551616."),
    ("completions", {"prompt": "x", "stop_token_ids": [1, -(2**70)]},
     "`stop_token_ids.1` must be an integer of 64 bits; got -1180591620717411303424."),
    ("completions", {"prompt": "x", "max_tokens": 2.0}, "`max_tokens` must be a valid integer; got 2.0."),
    ("chat/completions", {"messages": []}, "`messages` must have at least 1 item, not 0; got []."),
    ("completions", {"prompt": "x", "bad_words": ["a"] * 1025}, "`bad_words` must have at most 1024 items, not 1025;"),
    ("responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]},
     "`input.0.output` must be a string or a list; got 5."),
    ("responses", {"input": "x", "text": {"text": 1}}, "`text.text` is not a field of this request."),
]  # fmt: skip


async def test_what_is_wrong_deep_inside_is_named_as_the_client_wrote_it(router: Any) -> None:
    for path, body, words in NESTED:
        answer = await router.post(f"/v1/{path}", **body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["message"].startswith(words), (body, answer.text)
        assert answer.json()["error"]["param"] == words.strip("`").split(".")[0].split("`")[0]


async def test_fields_at_their_neutral_value_and_bookkeeping_are_taken(router: Any) -> None:
    neutral = {"tools": [], "tool_choice": "none", "modalities": ["text"], "response_format": {"type": "text"}}
    notes = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"}
    notes |= {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    nothing = {"temperature": None, "stop": None, "logit_bias": None, "prediction": None, "audio": None, "n": None}
    answer = await router.post("/v1/chat/completions", messages=USER, max_tokens=1, **neutral, **notes, **nothing)
    assert answer.status_code == 200, answer.text


MALFORMED = [
    b"",
    b"{",
    b"[1]",
    b'"x"',
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b"\xff",
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": "\\ud800"}',
]


@pytest.mark.parametrize("body", MALFORMED)
async def test_malformed_json_is_a_400(router: Any, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = await router.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert len(answer.content) < 600
    answer = await router.client.post("/generate", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")


async def test_a_body_that_comes_drop_by_drop_is_408(start: Start) -> None:
    async def drops() -> AsyncIterator[bytes]:
        for letter in '{"prompt": "' + "x" * 20:
            yield letter.encode()
            await asyncio.sleep(0.02)

    async with start("yes", config=ServeConfig(receive_timeout=0.1)) as router:
        answer = await router.client.post("/v1/completions", content=drops())
        assert answer.status_code == 408
        assert "did not come within 0.1 s" in answer.json()["error"]["message"]
        assert router.value("spaceserve_rejected_total", reason="slow_request") == 1


async def test_a_body_in_pieces_is_bounded_too(start: Start) -> None:
    async with start("yes", config=ServeConfig(max_body=1000)) as router:
        json_type = {"content-type": "application/json"}
        answer = await router.client.post("/v1/completions", content=_pieces(), headers=json_type)
        assert answer.status_code == 413


async def _pieces() -> Any:
    for _ in range(20):
        yield b" " * 100


async def test_probes_before_a_worker_is_up_and_while_draining(start: Start) -> None:
    async def statuses(*paths: str) -> list[int]:
        return [(await router.client.get(path)).status_code for path in paths]

    async with start("yes", ready=False, refuse="no") as router:
        assert await statuses("/health", "/livez", "/startupz") == [503, 200, 503]
    async with start("yes") as router:
        assert await statuses("/readyz") == [200]
        router.service.draining = True
        assert await statuses("/readyz") == [503]


async def test_a_deadline_is_a_408_or_the_last_event(start: Start) -> None:
    async with start("yes", step_seconds=0.05) as router:
        body = {"prompt": "x", "max_tokens": 400, "timeout": 0.2}
        answer = await router.post("/v1/completions", **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
        answer = await router.post("/v1/completions", stream=True, **body | {"timeout": 1.5})  # the first token comes
        assert answer.status_code == 200
        last = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "deadline_exceeded"
        assert router.value("spaceserve_requests_total", outcome="deadline") == 2


async def test_without_a_chat_template_the_flag_is_named(start: Start) -> None:
    async with start("yes", chat=None) as router:
        error = (await router.post("/v1/chat/completions", messages=USER)).json()["error"]
        assert "--chat-template" in error["message"]


async def test_an_unforeseen_error_has_an_id_and_no_internals(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: ValidRequest, **others: object) -> None:
        raise ValueError(f"division of {router.service.text.tokenizer.decode(request.prompt_ids)}")

    async with start("yes") as router:
        monkeypatch.setattr(router.service.engine, "submit", broken)
        with caplog.at_level(logging.DEBUG):
            answer = await router.post("/v1/completions", prompt="secret")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "internal_error")
        assert "division" not in answer.text
        assert "secret" not in caplog.text
        assert "ValueError" in caplog.text
        assert "in broken" in caplog.text


async def test_keys_protect_work_and_not_probes(start: Start) -> None:
    async with start("yes", config=ServeConfig(api_keys=plain_keys("one", "two"))) as router:
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            for path in ("/v1/models", "/info"):
                answer = await router.client.get(path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            answer = await router.client.post("/generate", json={"inputs": "x"}, headers=headers)
            assert answer.json()["error_type"] == "authentication"
        for key in ("one", "two"):
            answer = await router.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        for path in ("/health", "/livez", "/readyz", "/metrics", "/ping", "/version"):
            assert (await router.client.get(path)).status_code == 200


FLOODS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [""] * 50_000}, "allowed_token_ids"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [""] * 50_000}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "x", "bad_words": [1] * 50_000}, "bad_words"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): "a" for i in range(50_000)}}, "logit_bias"),
    ("/v1/completions", {"prompt": "x", **{f"x{i}": 1 for i in range(50_000)}}, "50000 others"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 50_000}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", **{f"x{i}": 1 for i in range(50_000)}}]}, "messages"),
    ("/v1/chat/completions", {"messages": [1] * 50_000}, "messages"),
    ("/detokenize", {"tokens": [""] * 50_000}, "tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT] * 9000}]}, "at most 8192 parts"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT] * 3}] * 4000}, "has 12000"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALLED] * 100}] * 90}, "has 9000"),
    ("/v1/chat/completions", {"messages": USER, "prediction": {"type": "content", "content": [TEXT] * 5000}}, "4096"),
    ("/v1/responses", {"input": [{"type": "function_call_output", "output": [TEXT] * 9000}]}, "at most 8192 parts"),
]


@pytest.mark.parametrize(("path", "body", "words"), FLOODS)
async def test_a_flood_of_mistakes_makes_few_complaints(
    router: Any, path: str, body: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    explain = body_module._invalid

    def counted(error: Any, value: Any) -> Any:
        counts.append(error.error_count())
        return explain(error, value)

    monkeypatch.setattr(body_module, "_invalid", counted)
    answer = await router.post(path, **body)
    assert (answer.status_code, words in answer.text) == (400, True), answer.text
    assert len(answer.content) < 600
    assert max(counts) <= 20


async def test_a_key_may_have_letters_of_every_alphabet(start: Start) -> None:
    async with start("yes", config=ServeConfig(api_keys=plain_keys("schlüssel"))) as router:
        for key, status in (("schlüssel", 200), ("schlussel", 401)):
            answer = await router.client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert answer.status_code == status


async def test_a_request_whose_own_prompts_fill_the_queue_is_told_how_many_fit(start: Start) -> None:
    async with start("yes", config=ServeConfig(max_queue=2), max_sequences=1, step_seconds=0.01) as router:
        answer = await router.post("/v1/completions", prompt=["a", "b", "c", "d", "e"], max_tokens=50)
        assert answer.status_code == 429
        assert "the 5 prompts of this request: 3 would find a place now" in answer.json()["error"]["message"]


async def test_a_prompt_longer_than_the_servers_own_limit_is_refused_on_every_route(start: Start) -> None:
    async with start(config=ServeConfig(max_prompt_tokens=8)) as router:
        short = await router.post("/v1/completions", prompt="x" * 8, max_tokens=2)
        assert short.status_code == 200, short.text
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 9}),
            ("/v1/chat/completions", {"messages": USER}),
            ("/generate", {"inputs": "x" * 9}),
        ):
            answer = await router.post(path, **body)
            assert answer.status_code in (400, 422), answer.text
            assert "maximum context length is 8 tokens for a prompt (--max-prompt-tokens)" in answer.text
        answer = await router.post("/v1/messages", messages=USER, max_tokens=2, model="tiny")
        assert "tokens > 8 maximum" in answer.json()["error"]["message"]
        info = await router.client.get("/info")
        assert info.json()["max_input_tokens"] == 8


@pytest.mark.parametrize("number", ["1e400", "-1e999"])
async def test_a_number_beyond_a_double_is_named_as_such(start: Start, number: str) -> None:
    async with start() as router:
        body = f'{{"prompt": "a", "temperature": {number}}}'.encode()
        answer = await send(router, "/v1/completions", {}, Row(400, "", None, 0, "", body=body))
        assert answer.status_code == 400
        assert "too large for a double" in answer.text
        assert "not valid JSON" not in answer.text
