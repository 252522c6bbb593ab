"""Whose a request is, as the scheduler knows it, and what is said of a deadline that cannot be met."""

from __future__ import annotations

import logging

import pytest
from doubles.router.whole_router import Start
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig
from space_router.engine.request.request import ValidRequest

SECRET = "sk-a-very-secret-one"
BODIES = (
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
            for path, body in BODIES:
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
        for path, body in BODIES:
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
