"""What cannot be done ends with its status, its field and HTTP's own words, before any event."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router.whole_router import Start
from space_proto import generate_pb2
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig
from space_router.grpc_api import server as grpc_server

MESSAGE = {"role": "user", "content": "x"}
VALUES: dict[str, list[Any]] = {
    "temperature": [3.0, -0.5], "top_p": [0.0], "top_k": [-2], "min_p": [1.5], "typical_p": [2.0],
    "presence_penalty": [2.5], "frequency_penalty": [-2.5], "repetition_penalty": [0.0],
    "logit_bias": [{70: 101.0}, {99999: 1.0}], "bad_words": [[""]], "allowed_token_ids": [[99999], [2**32 - 1]],
    "stop": [[""], list("abcdefghijklmnopq")], "stop_token_ids": [[99999]], "n": [0, 1000], "max_tokens": [0, 2**31],
    "min_tokens": [20], "logprobs": [21], "prompt_logprobs": [21], "speculation": [9], "timeout": [-1.0],
    "request_id": ["a b"], "cache_salt": ["x" * 257], "truncate_prompt_tokens": [0], "suffix": ["y"],
    "structured_outputs": [{"regex": "a("}, {"json": "{"}],
}  # fmt: skip
"""Values of one field that are refused."""

SAME: list[tuple[str, dict[str, Any]]] = [  # the field at fault; the call, which is its HTTP twin's body
    *((field, {"prompt": "x", field: value}) for field, values in VALUES.items() for value in values),
    ("best_of", {"prompt": "x", "n": 3, "best_of": 2}),
    ("prompt", {"prompt": "x" * 600}),
    ("prompt", {"prompt": "<|mask_1|>"}),
    ("messages", {"messages": [{"role": "nobody"}]}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("echo", {"messages": [MESSAGE], "echo": True}),
    ("best_of", {"messages": [MESSAGE], "best_of": 2}),
]
TOOL = {"type": "function", "function": {"name": "a b"}}
INVALID: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((field, call, call) for field, call in SAME),
    ("prompt", {"prompt_token_ids": [99999]}, {"prompt": [99999]}),
    ("tools", {"messages": [MESSAGE], "tools": [{"name": "a b"}]}, {"messages": [MESSAGE], "tools": [TOOL]}),
    ("tool_choice", {"messages": [MESSAGE], "tool_choice": {"mode": "TOOL_MODE_REQUIRED"}},
     {"messages": [MESSAGE], "tool_choice": "required"}),
]  # fmt: skip


def trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return dict(error.trailing_metadata())


async def test_a_wrong_field_is_named_as_over_http_and_in_the_same_words(router: Any) -> None:
    for field, call, body in INVALID:
        error = await router.refusal(**call)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await router.http.post(path, json=body)
        twin = answer.json()["error"]
        assert answer.status_code == 400, body
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, call
        assert error.details() == twin["message"]
        assert trailing(error)["error-param"] == twin["param"] == field
        assert trailing(error)["error-type"] == "invalid_request_error"
        assert trailing(error).get("error-code") == twin["code"]
    assert (router.value("spaceserve_rejected_total", reason="invalid") or 0) >= len(INVALID)


async def test_numbers_that_are_not_finite_are_refused(router: Any) -> None:
    for field in ("temperature", "top_p", "presence_penalty", "timeout"):
        for number in (float("nan"), float("inf"), -float("inf")):
            asked = {"prompt": "x", field: number, "deadline": 60 if field == "timeout" else None}
            error = await router.refusal(**asked)
            assert (error.code(), trailing(error)["error-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("fields", "words", "fault"),
    [
        (
            {"messages": [MESSAGE], "logprobs": 21},
            "`logprobs` must be less than or equal to 20; got 21",
            {"error-param": "logprobs"},
        ),
        (
            {"prompt_token_ids": [70] * 600},
            "600",
            {"error-code": "context_length_exceeded", "n_prompt_tokens": "600", "n_ctx": "512"},
        ),
        ({"messages": [MESSAGE], "tool_choice": {"mode": 9}}, "TOOL_MODE_AUTO", {"error-param": "tool_choice"}),
    ],
    ids=["log-probabilities of a conversation", "a prompt that is too long", "a tool mode of a later protocol"],
)
async def test_a_refusal_says_what_is_wrong_and_where(
    router: Any, fields: dict[str, Any], words: str, fault: dict[str, str]
) -> None:
    error = await router.refusal(**fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
    assert trailing(error).items() >= fault.items()


@pytest.mark.parametrize(
    "given", [{}, {"prompt": "a", "prompt_token_ids": [70]}, {"prompt": "", "messages": [MESSAGE]}]
)
async def test_exactly_one_kind_of_prompt_is_taken(router: Any, given: dict[str, Any]) -> None:
    error = await router.refusal(**given)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(
        "Give exactly one of `prompt`, `prompt_token_ids`, `prompts` and `messages`; got "
    )
    assert all(f"`{name}`" in error.details().partition("got ")[2] for name in given)


async def test_a_field_of_a_later_protocol_is_refused_wherever_it_stands(router: Any) -> None:
    later = bytes([0xF8, 0x7F, 1])  # field 2047, a varint
    request = generate_pb2.GenerateRequest(prompt="x")
    message = generate_pb2.ChatMessage(**MESSAGE)
    request.MergeFromString(later)
    message.MergeFromString(later)
    for call, place in (
        (router.stub.Generate(request), "GenerateRequest"),
        (router.stub.Generate(generate_pb2.GenerateRequest(messages=[message])), "ChatMessage.messages.0"),
    ):
        error = await router.error(call.read())
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(f"{place} has a field numbered 2047")


async def test_a_request_beyond_max_body_is_refused_and_the_next_one_taken(start: Start) -> None:
    async with start(config=ServeConfig(max_body=1000)) as router:
        error = await router.refusal(prompt="x" * 2000)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "vs. 1000" in error.details()
        assert await router.events(prompt="x")


async def test_a_model_that_is_not_served_is_not_found(router: Any) -> None:
    error = await router.refusal(prompt="x", model="gpt-x")
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert (trailing(error)["error-param"], trailing(error)["error-code"]) == ("model", "model_not_found")


async def test_a_conversation_without_a_template_is_refused(start: Start) -> None:
    async with start(chat=None) as router:
        error = await router.refusal(messages=[MESSAGE])
        assert (error.code(), trailing(error)["error-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "no_chat_template")


async def test_a_server_that_starts_or_stops_is_unavailable(start: Start) -> None:
    async with start(ready=False) as router:
        error = await router.refusal(prompt="x")
        assert (error.code(), trailing(error)["error-code"]) == (grpc.StatusCode.UNAVAILABLE, "not_ready")
        assert trailing(error)["retry-after"] == "1"
    async with start() as router:
        router.service.draining = True
        error = await router.refusal(prompt="x")
        assert (error.code(), trailing(error)["error-code"]) == (grpc.StatusCode.UNAVAILABLE, "draining")
        assert router.value("spaceserve_rejected_total", reason="draining") == 1


async def test_a_full_queue_says_when_to_try_again(start: Start) -> None:
    async with start(config=ServeConfig(max_queue=0), max_sequences=1, step_seconds=0.01) as router:
        running = router.stub.Generate(generate_pb2.GenerateRequest(prompt="x", max_tokens=400, ignore_eos=True))
        await running.read()
        error = await router.refusal(prompt="y")
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(trailing(error)["retry-after"]) >= 1
        assert trailing(error)["error-code"] == "queue_full"
        assert router.value("spaceserve_rejected_total", reason="queue_full") == 1
        running.cancel()


async def test_a_turn_that_does_not_come_in_time_says_when_to_try_again(start: Start) -> None:
    async with start(config=ServeConfig(max_queue_seconds=0.1), max_sequences=1, step_seconds=0.01) as router:
        running = router.stub.Generate(generate_pb2.GenerateRequest(prompt="x", max_tokens=400, ignore_eos=True))
        await running.read()
        error = await router.refusal(prompt="y")
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(trailing(error)["retry-after"]) >= 1
        assert trailing(error)["error-code"] == "queue_timeout"
        assert router.value("spaceserve_requests_total", outcome="queue_timeout") == 1
        running.cancel()


async def test_without_a_known_key_nothing_is_said_but_health(start: Start) -> None:
    async with start(config=ServeConfig(api_keys=plain_keys("right", "also"))) as router:
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "right"),)):
            for call in (
                router.stub.Info(generate_pb2.InfoRequest(), metadata=metadata),
                router.stub.Generate(generate_pb2.GenerateRequest(prompt="x"), metadata=metadata).read(),
                router.stub.Tokenize(generate_pb2.TokenizeRequest(text="x"), metadata=metadata),
            ):
                error = await router.error(call)
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
                assert trailing(error)["error-code"] == "invalid_api_key"
        assert router.value("spaceserve_rejected_total", reason="unauthorized") == 9
        metadata = (("authorization", "Bearer also"),)
        request = generate_pb2.GenerateRequest(prompt="x", max_tokens=2)
        assert [event async for event in router.stub.Generate(request, metadata=metadata)]


async def test_the_deadline_of_the_call_is_the_requests(start: Start) -> None:
    async with start(step_seconds=0.02) as router:
        await router.stub.Info(generate_pb2.InfoRequest())  # the call need not wait for its connection
        error = await router.error(router.events(prompt="x", max_tokens=400, ignore_eos=True, deadline=1.0))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await idle(router)
        assert router.value("spaceserve_requests_total", outcome="deadline") == 1
        assert router.value("spaceserve_requests_total", outcome="cancelled") == 0


async def test_the_earlier_of_timeout_and_deadline_wins(start: Start) -> None:
    async with start(step_seconds=0.02) as router:
        events = router.events(prompt="x", max_tokens=400, ignore_eos=True, timeout=0.2, deadline=60)
        error = await router.error(events)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "within its 0.2 s" in error.details()
        assert trailing(error)["error-param"] == "timeout"


async def test_a_deadline_that_cannot_be_met_is_refused_before_any_event(start: Start) -> None:
    async with start() as router:
        await router.events(prompt="a", max_tokens=60, ignore_eos=True)  # now it knows how long a token takes
        error = await router.refusal(prompt="a", max_tokens=400, ignore_eos=True, timeout=0.001)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "takes at least" in error.details()


async def test_a_cancelled_call_gives_its_pages_back_at_once(start: Start) -> None:
    async with start(step_seconds=0.01) as router:
        call = router.stub.Generate(generate_pb2.GenerateRequest(prompt="x", max_tokens=400, n=3, ignore_eos=True))
        await call.read()
        assert router.service.engine.load().blocks_held > 0
        call.cancel()
        await idle(router)
        assert router.value("spaceserve_requests_total", outcome="cancelled") == 3
        assert router.service.engine.load().num_running == 0


async def test_a_request_that_is_cancelled_by_its_name_ends_with_cancelled(start: Start) -> None:
    async with start(step_seconds=0.01) as router:
        request = generate_pb2.GenerateRequest(prompt="x", max_tokens=400, ignore_eos=True, request_id="it")
        call = router.stub.Generate(request)
        await call.read()
        assert (await router.http.delete("/v1/requests/it")).status_code == 200
        assert await call.code() == grpc.StatusCode.CANCELLED
        assert "it was cancelled" in await call.details()


async def test_a_request_that_fails_alone_ends_with_internal_behind_its_events(start: Start) -> None:
    async with start(failing_id=99) as router:
        error = await router.refusal(prompt_token_ids=[70, 99])
        assert (error.code(), trailing(error)["error-code"]) == (grpc.StatusCode.INTERNAL, "generation_failed")
        assert await router.events(prompt="x")


async def test_the_unforeseen_is_internal_with_an_id_and_nothing_else(
    router: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(grpc_server, "read", broken)
    error = await router.refusal(prompt="x")
    assert error.code() == grpc.StatusCode.INTERNAL
    error_id = error.details().split()[2].rstrip(".")
    assert error.details() == f"Internal error {error_id}. The server's log has it under this id."
    assert "secret" not in str(error.trailing_metadata())
    assert error_id in caplog.text


async def test_bad_requests_beside_generating_are_refused_too(router: Any) -> None:
    for call in (
        router.stub.Tokenize(generate_pb2.TokenizeRequest()),
        router.stub.Tokenize(generate_pb2.TokenizeRequest(text="x", messages=[MESSAGE])),
        router.stub.Detokenize(generate_pb2.DetokenizeRequest(ids=[99999])),
    ):
        error = await router.error(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def idle(router: Any) -> None:
    """Until nothing runs; at once means within a few steps."""
    for _ in range(1000):
        load = router.service.engine.load()
        if not (load.num_running or load.blocks_held):
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"still busy: {load}")


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(router: Any, method: str) -> None:
    make = router.channel.unary_stream if method == "Generate" else router.channel.unary_unary
    call = make(f"/spaceserve.v1.Generate/{method}")(b"\xff\xff not a message")
    error = await router.error(call.read() if method == "Generate" else call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read" in (error.details() or "")
    assert router.value("spaceserve_rejected_total", reason="invalid") == 1
