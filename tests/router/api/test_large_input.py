"""Whatever comes in, what goes out is small, an answer or a 400, and the server goes on."""

import json
from typing import Any

import pytest
from space_router.api.openai.fields import ChatBody, CompletionBody
from space_router.api.tgi.generate import GenerateParameters

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
