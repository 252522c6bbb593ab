"""What an answer cost stands in its headers, on every route that generates."""

from typing import Any

import pytest
from doubles.router.whole_router import Start

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "ab", "parameters": {"max_new_tokens": 3}}),
    ("/", {"inputs": "ab", "parameters": {"max_new_tokens": 3}}),
    ("/invocations", {"inputs": "ab", "parameters": {"max_new_tokens": 3}}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}),
]
MILLISECONDS = ("total-time", "queue-time", "validation-time", "inference-time", "time-per-token")


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_a_whole_answer_says_what_it_cost(start: Start, path: str, body: dict[str, Any]) -> None:
    async with start("hello world", step_seconds=0.02) as router:
        headers = (await router.post(path, **body)).headers
        times = {name: int(headers[f"x-{name}"]) for name in MILLISECONDS}
        parts = times["validation-time"] + times["queue-time"] + times["inference-time"]
        assert abs(times["total-time"] - parts) <= 3  # each is rounded
        assert times["inference-time"] >= 20
        assert times["time-per-token"] <= times["inference-time"] / 3 + 1
        assert 1000 * float(headers["x-compute-time"]) == pytest.approx(times["total-time"], abs=1)
        assert headers["x-generated-tokens"] == "3"
        assert int(headers["x-compute-characters"]) >= int(headers["x-prompt-tokens"]) >= 2
        assert headers["x-compute-type"] == router.service.engine.facts.device
        assert headers["x-request-id"]


@pytest.mark.parametrize(("path", "body"), [("/generate_stream", ASKED[0][1]), *ASKED[1:]])
async def test_a_stream_says_before_its_first_token_what_is_known_then(
    start: Start, path: str, body: dict[str, Any]
) -> None:
    async with start("hello world") as router:
        asked = body if path == "/generate_stream" else {**body, "stream": True}
        headers = (await router.post(path, **asked)).headers
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-accel-buffering"] == "no"
        assert int(headers["x-prompt-tokens"]) >= 2
        assert headers["x-validation-time"].isdigit()
        assert headers["x-request-id"]
        assert "x-total-time" not in headers


async def test_several_choices_count_all_tokens_and_the_pace_of_one(start: Start) -> None:
    async with start("hello world", step_seconds=0.01) as router:
        headers = (await router.post("/v1/completions", prompt=["ab", "abc"], n=2, max_tokens=5)).headers
        assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("5", "20")
        assert int(headers["x-time-per-token"]) >= 5


async def test_an_echo_alone_generates_nothing(start: Start) -> None:
    async with start("hello") as router:
        headers = (await router.post("/v1/completions", prompt="ab", echo=True, max_tokens=0)).headers
        assert headers["x-generated-tokens"] == "0"
