"""SageMaker's one route answers three kinds of body as their own routes do."""

import json
from typing import Any

import pytest
from doubles.router.whole_router import USER, Start

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/", {"inputs": "ab", "parameters": {"max_new_tokens": 4, "details": True}}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "temperature": 0}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 4, "temperature": 0}),
]


def lasting(body: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one body share: not their ids, times and cached tokens."""
    return {name: body[name] for name in ("object", "model", "choices", "system_fingerprint")}


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_body_is_answered_as_its_own_route_answers_it(start: Start, path: str, body: dict[str, Any]) -> None:
    async with start("hello world") as router:
        own = await router.post(path, **body)
        invoked = await router.post("/invocations", **body)
        assert (own.status_code, invoked.status_code) == (200, 200), invoked.text
        if path == "/":
            assert invoked.json() == own.json()
        else:
            assert lasting(invoked.json()) == lasting(own.json())


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_is_asked_for_in_the_body(start: Start, path: str, body: dict[str, Any]) -> None:
    async with start("hello world") as router:
        answer = await router.post("/invocations", stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data:") for line in answer.text.split("\n\n") if line]
        assert json.loads(events[0])
        assert (events[-1].strip() == "[DONE]") == (path != "/")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "none of them"),
        ({"inputs": None}, "none of them"),
        ({"inputs": "a", "prompt": "a"}, "`inputs` and `prompt`"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "nonsense": 1}, "nonsense"),
    ],
)
async def test_a_wrong_body_is_a_422_in_tgis_shape(router: Any, body: dict[str, Any], words: str) -> None:
    answer = await router.post("/invocations", **body)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert words in answer.json()["error"]


async def test_a_ping_says_whether_it_is_worth_invoking(start: Start) -> None:
    async with start("yes") as router:
        assert (await router.client.get("/ping")).status_code == 200
    async with start("yes", ready=False, refuse="no") as router:
        assert (await router.client.get("/ping")).status_code == 503
        assert (await router.post("/invocations", inputs="x")).status_code == 503
