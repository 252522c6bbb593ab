"""Unknown fields by flag and by header, request ids, limits and retry advice in headers, comments on silent streams."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from doubles.router import never
from doubles.router.whole_router import USER
from space_router.config import ServeConfig, build
from space_router.errors import ConfigError
from space_router.http_server import responses

REPLY = "Hello. <|endoftext|>"
HEADER = "x-ignore-unknown-fields"
UNKNOWN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{**USER[0], "newer": 1}], "brand_new": {"a": 1}, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "brand_new": 1, "structured_outputs": {"newer": True}, "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "brand_new": 1, "reasoning": {"newer": 1}, "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "brand_new": 1, "max_tokens": 4, "tool_choice": {"type": "none", "newer": 1}},
    "/generate": {"inputs": "Hi", "brand_new": 1, "parameters": {"newer": 1, "max_new_tokens": 4}},
}


async def test_a_request_says_whether_unknown_fields_are_ignored(start: Any) -> None:
    async with start(REPLY) as router:
        for path, body in UNKNOWN.items():
            assert (await router.post(path, **body)).status_code in (400, 422)
            taken = await router.client.post(path, json=body, headers={HEADER: "true"})
            assert taken.status_code == 200, taken.text
            for name in ("brand_new", "newer"):
                assert name in taken.headers["warning"], path
        wrong = {**UNKNOWN["/v1/completions"], "temperature": 9}
        assert (await router.client.post("/v1/completions", json=wrong, headers={HEADER: "true"})).status_code == 400


async def test_the_server_says_whether_unknown_fields_are_ignored(start: Any) -> None:
    for changes in ({"ignore_unknown_fields": "on"}, {"compat": "openai"}):
        async with start(REPLY, config=replace(ServeConfig(), **changes)) as router:
            for path, body in UNKNOWN.items():
                assert (await router.post(path, **body)).status_code == 200
                refused = await router.client.post(path, json=body, headers={HEADER: "false"})
                assert refused.status_code in (400, 422)


HOSTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "web_search_options": {"search_context_size": "low"}},
    "/v1/responses": {"input": "Hi", "tools": [{"type": "web_search"}], "max_tool_calls": 2},
    "/v1/messages": {"messages": USER, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
}


async def test_hosted_tools_are_left_out_and_what_no_model_knows_changes_nothing(start: Any) -> None:
    room = {"window": 4096, "num_blocks": 2048}
    async with start(REPLY, config=replace(ServeConfig(), compat="openai"), **room) as router:
        for path, body in HOSTED.items():
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            taken = await router.post(path, **body, **{limit: 4})
            assert taken.status_code == 200, taken.text
            assert "web_search" in taken.headers["warning"]
            assert taken.json().get("max_tool_calls") == body.get("max_tool_calls")
            quiet = {"verbosity": "low"} if "messages" in body else {"text": {"verbosity": "low"}}
            if path != "/v1/messages":
                taken = await router.post(path, **body, **{limit: 4}, **quiet)
                assert "verbosity` has no effect" in taken.headers["warning"]


async def test_strict_servers_refuse_hosted_tools_and_fields_of_betas(start: Any) -> None:
    room = {"window": 4096, "num_blocks": 2048}
    async with start(REPLY, config=replace(ServeConfig(), compat="strict"), **room) as router:
        await router.refuses("/v1/responses", "tools", "web_search", input="Hi", tools=[{"type": "web_search"}])
        chat = {"messages": USER, "web_search_options": {}}
        await router.refuses("/v1/chat/completions", "web_search_options", "hosted", **chat)
        hosted = [{"type": "web_search_20250305", "name": "web_search"}]
        for body in ({"tools": hosted}, {"brand_new": 1}):
            answer = await router.post("/v1/messages?beta=true", messages=USER, max_tokens=4, **body)
            assert answer.status_code == 400, answer.text
    with pytest.raises(ConfigError, match="--compat strict"):
        build({"compat": "strict", "ignore_unknown_fields": "on"}, {})


async def test_a_clients_request_id_comes_back_and_is_logged(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "Hi", "max_tokens": 4}
    async with start(REPLY, accepts=never) as router:
        for sent in ({}, {"stream": True}, {"nonsense": 1}):
            answer = await router.client.post("/v1/completions", json=body | sent, headers={"x-request-id": "mine-1"})
            assert answer.headers.get_list("x-request-id") == ["mine-1"]
            own = await router.post("/v1/completions", **body | sent)
            assert len(own.headers.get_list("x-request-id")) == 1
        bad = await router.client.post("/v1/completions", json=body, headers={"x-request-id": 'a"b'})
        assert bad.headers["x-request-id"] == bad.json()["id"]
        assert (await router.client.get("/v1/models", headers={"x-request-id": "m"})).headers["x-request-id"] == "m"
        router.service.draining = True
        with caplog.at_level(logging.WARNING):
            await router.client.post("/v1/completions", json=body, headers={"x-request-id": "mine-2"})
        assert "x-request-id mine-2" in caplog.text


async def test_limits_of_a_key_are_in_headers(start: Any) -> None:
    config = replace(ServeConfig(), key_requests_per_minute=2, key_tokens_per_minute=6000)
    async with start(REPLY, config=config) as router:
        made = await router.post("/v1/completions", prompt="Hi", max_tokens=4)
        assert made.headers["x-ratelimit-limit-requests"] == "2"
        assert made.headers["x-ratelimit-remaining-requests"] == "1"
        assert made.headers["x-ratelimit-limit-tokens"] == "6000"
        assert 5900 < int(made.headers["x-ratelimit-remaining-tokens"]) < 6000
        assert 25 < float(made.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        await router.post("/v1/completions", prompt="Hi", max_tokens=4)
        refused = await router.post("/v1/completions", prompt="Hi", max_tokens=4)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-should-retry"] == "true"
        assert 0 < int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"])
    async with start(REPLY) as router:
        made = await router.post("/v1/completions", prompt="Hi", max_tokens=4)
        assert not [name for name in made.headers if name.startswith("x-ratelimit")]
        wrong = await router.post("/v1/completions", prompt="Hi", max_tokens=-4)
        assert wrong.headers["x-should-retry"] == "false"


async def test_a_stream_that_waits_in_the_queue_is_not_silent(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "SILENT_SECONDS", 0.02)
    room = {"max_sequences": 1, "step_seconds": 0.004, "num_blocks": 256, "window": 2048, "accepts": never}
    async with start("word " * 400, **room) as router:
        first = asyncio.create_task(router.post("/v1/completions", prompt="Hi", max_tokens=100))
        await router.until(lambda load: load.num_running == 1)
        second = await router.post("/v1/completions", prompt="Hi", max_tokens=4, stream=True)
        text = second.text
        assert (await first).status_code == 200
        waited, comment, events = text.rpartition(": waiting\n\n")
        assert comment
        assert events.endswith("data: [DONE]\n\n")
        assert "data:" not in waited
