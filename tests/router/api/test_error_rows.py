"""Every error row of every API, whole and streamed: status and body come instead of a stream's headers."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from doubles.router.whole_router import Start
from doubles.tokenizers import FIRST_BYTE_ID
from space_router.api.request_builder import Parameters
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig
from space_router.engine.queueing.admission import MIN_STEPS

State = Callable[[Start], AbstractAsyncContextManager[Any]]

MAX_ERROR = 2000
"""Bytes of an error's body, whatever came in."""


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
        prompt = builder.prompt("x", add_special_tokens=True, truncate=None, param="prompt")
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


async def test_a_request_that_is_cancelled_by_its_id_is_a_499(start: Start) -> None:
    async with start("yes", step_seconds=0.01) as router:
        asking = asyncio.create_task(router.post("/v1/completions", prompt="x", max_tokens=400, request_id="mine"))
        async with asyncio.timeout(30):
            while not router.service.engine.load().num_running:  # noqa: ASYNC110
                await asyncio.sleep(0)
        cancelled = await router.client.delete("/v1/requests/mine")
        assert cancelled.json() == {"id": "mine", "object": "request", "cancelled": True}
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        gone = await router.client.delete("/v1/requests/mine")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_client_that_goes_away_is_a_499_in_the_log_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 400}).encode()
    async with start("yes", step_seconds=0.01) as router:
        messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def sending(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "root_path": "",
                 "scheme": "http", "query_string": b"", "headers": [], "server": ("x", 1)}  # fmt: skip
        with caplog.at_level(logging.INFO):
            await router.app(scope, receive, sending)
        assert [record.getMessage() for record in caplog.records if "499" in record.getMessage()]
        assert sent[0]["status"] == 499
        assert not router.service.engine.load().num_running


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
