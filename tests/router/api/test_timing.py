"""What an answer costs, how long input is taken, and how an event is written."""

import json
from typing import Any

import orjson
import pytest
from doubles.router.whole_router import Start
from space_router.api.openai.fields import ChatBody, CompletionBody
from space_router.api.tgi.generate import GenerateParameters
from space_router.http_server.responses import event_json

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


MAX_ERROR = 2000

SIZE = 20_000


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


VALUES = {  # as JSON
    "a long text": json.dumps("é" * SIZE),
    "many numbers": json.dumps([3.5] * SIZE),
    "many texts": json.dumps(["a"] * SIZE),
    "many names": json.dumps({f"k{i}": i for i in range(SIZE // 10)}),
    "a huge whole number": "9" * 1000,
    "a huge number": "1e308",
    "a number that is none": "NaN",
    "depth": nested(900),
    "yes": "true",
    "objects": json.dumps([{"role": "user", "content": "x", "type": "function"}] * 5000),
    "half a surrogate pair": '"\\ud83d"',
    "control characters": '"\\u0000\\u001b[31m"',
}
ROUTES = {
    "/v1/completions": ('"prompt": "x"', sorted(CompletionBody.model_fields)),
    "/v1/chat/completions": ('"messages": [{"role": "user", "content": "x"}]', sorted(ChatBody.model_fields)),
    "/generate": ('"inputs": "x"', sorted(GenerateParameters.model_fields)),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("path", ROUTES)
async def test_a_field_with_any_value_is_answered_shortly(router: Any, path: str, kind: str) -> None:
    base, names = ROUTES[path]
    for name in [*names, "user", "nonsense", "\u0000" * 100]:
        field = f"{json.dumps(name)}: {VALUES[kind]}"
        content = f'{{{base}, "parameters": {{{field}}}}}' if path == "/generate" else f"{{{base}, {field}}}"
        if '"max' not in field and "seed" not in field and path != "/generate":
            content = content[:-1] + ', "max_tokens": 1}'
        answer = await router.client.post(path, content=content.encode(), headers={"content-type": "application/json"})
        refused = 422 if path == "/generate" else 400
        assert answer.status_code in (200, refused, 404), (name, answer.status_code, answer.text[:300])
        if answer.status_code != 200:
            assert len(answer.content) < MAX_ERROR, (name, len(answer.content))
            assert "Traceback" not in answer.text
    assert router.service.engine.load().num_running == 0


@pytest.mark.parametrize("name", ["prompt", "model", "stop", "user", "request_id", "temperature", "suffix", "nonsense"])
async def test_three_megabytes_in_one_field_are_answered_shortly(router: Any, name: str) -> None:
    answer = await router.post("/v1/completions", **{"prompt": "x", "max_tokens": 1, name: "x" * 3_000_000})
    assert answer.status_code == (200 if name == "user" else 400)
    assert len(answer.content) < MAX_ERROR


async def test_a_name_that_comes_twice_counts_once(router: Any) -> None:
    content = b'{"prompt": "x", "max_tokens": 900, "max_tokens": 2, "ignore_eos": true}'
    answer = await router.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 2


async def test_a_body_without_a_content_type_is_json(router: Any) -> None:
    answer = await router.client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}')
    assert answer.status_code == 200


@pytest.mark.parametrize("media", ["application/json; charset=utf-8", "application/vnd.api+json", "Application/JSON"])
async def test_kinds_of_json_are_taken(router: Any, media: str) -> None:
    answer = await router.client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": media})
    assert answer.status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
async def test_text_in_another_encoding_is_a_400(router: Any, encoding: str) -> None:
    content = '{"prompt": "é"}'.encode(encoding)
    answer = await router.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert len(answer.content) < MAX_ERROR


ENDS = "a\u2028b\u2029c\x85d"
USER = [{"role": "user", "content": "Say"}]


@pytest.mark.parametrize("value", [ENDS, [ENDS], {ENDS: 1}, "é😀", "\\u2028", "\r\n\v\f\x1c", ""])
def test_a_value_is_one_line_and_what_it_was(value: Any) -> None:
    written = event_json(value)
    assert len(written.decode().splitlines()) == 1
    assert orjson.loads(written) == value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "echo": True}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "x"}),
        ("/generate_stream", {"inputs": "x"}),
    ],
)
async def test_line_ends_of_unicode_end_no_line_of_a_stream(start: Start, path: str, body: dict[str, Any]) -> None:
    """Hugging Face's client splits at them."""
    async with start(ENDS) as router:
        more = {} if path == "/generate_stream" else {"stream": True}
        answer = await router.post(path, **body, **more)
        assert answer.status_code == 200
        lines = answer.text.splitlines()
        assert all(line.partition(":")[0] in ("", "data", "event") for line in lines)
        for end in "\u2028\u2029\x85":
            assert end not in answer.text
            assert f"\\u{ord(end):04x}" in answer.text
