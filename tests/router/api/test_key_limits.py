"""API keys and their limits, and origins of browsers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from doubles.router.whole_router import Start
from space_router.api_keys import ApiKey, KeyLimits, plain_keys
from space_router.config import ServeConfig
from space_router.engine.request.request import ValidRequest
from space_router.http_server.responses import LIMITED_PATHS

SECRET = "sk-a-very-secret-one"
GUARDED = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
)


async def test_a_request_carries_a_name_of_its_key_and_never_the_key(
    start: Start, seen: list[ValidRequest], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with start("yes", config=ServeConfig(api_keys=plain_keys(SECRET, "other"))) as router:
        for key in (SECRET, "other", SECRET):
            for path, body in GUARDED:
                answer = await router.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == 200, answer.text
    names = [request.key for request in seen]
    assert names[:3] == names[6:] == names[:1] * 3
    assert names[3:6] == names[3:4] * 3
    assert names[0] != names[3]
    assert not any(SECRET in repr(request) for request in seen)
    assert SECRET not in caplog.text


async def test_without_keys_everybody_is_nobody(start: Start, seen: list[ValidRequest]) -> None:
    async with start("yes") as router:
        for path, body in GUARDED:
            await router.client.post(path, json=body, headers={"authorization": "Bearer whatever"})
    assert [request.key for request in seen] == ["", "", ""]


async def test_a_deadline_that_cannot_be_met_is_answered_408_before_any_token(start: Start) -> None:
    async with start("yes") as router:
        await router.complete(prompt="a", max_tokens=60, ignore_eos=True)  # now it knows how long a token takes
        answer = await router.post(
            "/v1/completions", prompt="a", max_tokens=400, ignore_eos=True, timeout=0.001, stream=True
        )
        assert answer.status_code == 408
        assert "takes at least" in answer.json()["error"]["message"]


SHORT = {"prompt": "a", "max_tokens": 2}
BODIES = (
    ("/v1/completions", SHORT),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
    ("/", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
    ("/invocations", SHORT),
)


def keyed(**limits: int) -> ServeConfig:
    own = KeyLimits(**limits)
    return ServeConfig(api_keys=(ApiKey.of("one", "first", own), ApiKey.of("two", "second", own)))


async def ask(router: Any, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    answer: httpx.Response = await router.client.post(
        path, json=body or SHORT, headers={"authorization": f"Bearer {key}"}
    )
    return answer


async def test_every_route_that_generates_counts_and_refuses_in_its_own_shape(start: Start) -> None:
    async with start("yes", config=keyed(requests_per_minute=len(BODIES))) as router:
        for path, body in BODIES:
            assert (await ask(router, "one", path, **body)).status_code == 200
        for path, body in BODIES:
            refused = await ask(router, "one", path, **body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            said = refused.json()["error"]
            assert "allowed 6 requests a minute" in (said if isinstance(said, str) else said["message"])
        assert (await ask(router, "two")).status_code == 200, "another key has its own share"
        for path in sorted(LIMITED_PATHS):  # tokenising, vectors and scores, which are work, too
            assert (await ask(router, "one", path)).status_code == 429, path
        num_refused = len(BODIES) + len(LIMITED_PATHS)
        assert router.value("spaceserve_rejected_total", reason="rate_limited") == num_refused
        assert router.value("spaceserve_key_rejected_total", key="first", limit="requests") == num_refused


UNLIMITED = {
    "/v1/load_lora_adapter",  # these three need an operator's key where there are keys
    "/v1/unload_lora_adapter",
    "/workers/restart",
    "/v1/responses/{response_id}/cancel",  # always refused
}


async def test_every_route_that_takes_a_body_is_limited_or_is_no_work(start: Start) -> None:
    async with start("yes") as router:
        document = (await router.client.get("/openapi.json")).json()
    posted = {path for path, methods in document["paths"].items() if "post" in methods}
    assert posted - LIMITED_PATHS == UNLIMITED
    assert posted >= LIMITED_PATHS


async def test_a_streams_whole_time_counts_as_one_request_at_once(start: Start) -> None:
    async with start(config=keyed(concurrency=1), step_seconds=0.002) as router:
        long = asyncio.create_task(ask(router, "one", prompt="a", max_tokens=200, ignore_eos=True, stream=True))
        await router.until(lambda load: load.num_running)
        assert (await ask(router, "one")).status_code == 429
        assert (await ask(router, "two")).status_code == 200
        assert router.value("spaceserve_key_requests", key="first") == 1
        assert (await long).status_code == 200
        assert (await ask(router, "one")).status_code == 200
        assert router.value("spaceserve_key_requests", key="first") == 0


async def test_tokens_in_and_out_are_charged_once_each(start: Start) -> None:
    async with start(config=keyed(tokens_per_minute=300)) as router:
        usage = (await ask(router, "one", prompt="a b c d", max_tokens=20, n=2, ignore_eos=True)).json()["usage"]
        assert usage["completion_tokens"] == 40
        charged = [
            router.value("spaceserve_key_tokens_total", key="first", kind=kind) for kind in ("prompt", "generated")
        ]
        assert charged == [usage["prompt_tokens"], 40]
        assert (await ask(router, "one", prompt="a", max_tokens=400, ignore_eos=True)).status_code == 200
        refused = await ask(router, "one")
        assert refused.status_code == 429
        assert "300 tokens a minute" in refused.text


async def test_a_full_queue_answers_before_the_body_is_read(start: Start) -> None:
    config = ServeConfig(max_queue=1)
    async with start(config=config, max_sequences=1, step_seconds=0.002) as router:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
        others = [asyncio.create_task(router.post("/v1/completions", **body)) for _ in range(2)]
        await router.until(lambda load: load.num_queued)

        async def never_read() -> Any:
            raise AssertionError("the body is read")
            yield b""

        refused = await router.client.post("/v1/completions", content=never_read())
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert [(await other).status_code for other in others] == [200, 200]


async def test_several_choices_are_taken_where_nobody_may_wait(start: Start) -> None:
    async with start("yes", config=ServeConfig(max_queue=0)) as router:
        answer = await router.complete(prompt="x" * 60, max_tokens=2, n=3)
        assert len(answer["choices"]) == 3


async def test_nesting_is_bounded_by_level_and_width_is_not_depth(start: Start) -> None:
    async with start("yes", config=ServeConfig(max_json_depth=8)) as router:

        async def status(metadata: str) -> int:
            content = f'{{"prompt": "x", "max_tokens": 1, "metadata": {metadata}}}'.encode()
            answer = await router.client.post("/v1/completions", content=content)
            return int(answer.status_code)

        assert await status("[" * 7 + "]" * 7) == 200
        assert await status("[" * 8 + "]" * 8) == 400
        assert await status('{"a":' * 8 + "1" + "}" * 8) == 400
        assert await status('"' + "[" * 500 + '"') == 200, "brackets of a text"
        assert await status("[" + ",".join(["[]"] * 500) + "]") == 200
        assert await status("[" + ",".join(["[]"] * 100_000) + "]") == 400


PAGE = "https://page.example"
ASKS_FIRST = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
BODY = {"prompt": "x", "max_tokens": 1}


async def test_by_default_no_origin_is_allowed(start: Start) -> None:
    async with start("yes") as router:
        answer = await router.client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)
        assert (await router.client.options("/v1/completions", headers=ASKS_FIRST)).status_code == 405


async def test_a_named_origin_may_ask_with_its_key_and_read_headers_and_errors(start: Start) -> None:
    config = ServeConfig(cors_origins=(PAGE, "http://localhost:3000"), api_keys=plain_keys("one"))
    async with start("yes", config=config) as router:
        asked = await router.client.options("/v1/completions", headers=ASKS_FIRST)  # browsers send no key with it
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for key, status in (("one", 200), ("two", 401)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await router.client.post("/v1/completions", json=BODY, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        other = {"origin": "https://other.example", "authorization": "Bearer one"}
        answer = await router.client.post("/v1/completions", json=BODY, headers=other)
        assert "access-control-allow-origin" not in answer.headers
        refused = await router.client.options("/v1/completions", headers={**ASKS_FIRST, **other})
        assert refused.status_code == 400


async def test_a_star_allows_every_origin_streams_too(start: Start) -> None:
    async with start("yes", config=ServeConfig(cors_origins=("*",))) as router:
        answer = await router.client.post("/v1/completions", json={**BODY, "stream": True}, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.text.endswith("data: [DONE]\n\n")
