"""`Embed` makes the vectors of `/v1/embeddings`, and refuses what that refuses, in its words."""

from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router.encoder import TEXT, VECTORS
from doubles.router.tabletop import until
from doubles.router.whole_router import Start
from space_proto import generate_pb2
from space_router.config import ServeConfig

INPUT = [{"text": "a cat"}, {"ids": {"ids": [65, 66, 67]}}, {"text": "b"}]
TEXTS = [["a cat"], [[65, 66, 67]], ["b"]]


async def embed(router: Any, **fields: Any) -> generate_pb2.EmbedReply:
    reply: generate_pb2.EmbedReply = await router.stub.Embed(generate_pb2.EmbedRequest(**fields))
    return reply


async def test_vectors_are_those_of_http(router: Any) -> None:
    for options in (
        {},
        {"pooling": "mean", "dimensions": 3},
        {"normalize": False, "request_id": "mine", "priority": 2},
    ):
        reply = await embed(router, input=INPUT, **options)
        twins = [(await router.http.post("/v1/embeddings", json={"input": one, **options})).json() for one in TEXTS]
        wanted = [twin["data"][0]["embedding"] for twin in twins]
        assert [list(one.values) for one in reply.embeddings] == [pytest.approx(one, abs=1e-6) for one in wanted]
        assert reply.prompt_tokens == sum(twin["usage"]["prompt_tokens"] for twin in twins)
        assert reply.model == twins[0]["model"]
        assert reply.request_id == options.get("request_id", reply.request_id)
    assert reply.embeddings[0] != reply.embeddings[1]
    assert router.value("spaceserve_requests_total", outcome="embedded") == 12


@pytest.mark.parametrize("model", ["", "mini", "served"])
async def test_the_encoder_beside_the_model_makes_the_vectors_unless_the_model_is_named(
    start: Start, model: str
) -> None:
    config = ServeConfig(embedding_model="folder/mini")
    async with start(config=config, encoder_text=TEXT, encoder=VECTORS) as router:
        name = router.service.text.name if model == "served" else model
        reply = await embed(router, input=[INPUT[0], INPUT[2]], model=name, dimensions=4)
        asked = {"input": ["a cat", "b"], "dimensions": 4, **({"model": name} if name else {})}
        twin = (await router.http.post("/v1/embeddings", json=asked)).json()
        wanted = [one["embedding"] for one in twin["data"]]
        assert [list(one.values) for one in reply.embeddings] == [pytest.approx(one, abs=1e-6) for one in wanted]
        assert (reply.model, reply.prompt_tokens) == (twin["model"], twin["usage"]["prompt_tokens"])
        assert reply.model == (name or "mini")


async def test_a_client_that_leaves_frees_the_encoder(start: Start) -> None:
    config = ServeConfig(embedding_model="folder/mini")
    async with start(config=config, encoder_text=TEXT, encoder=VECTORS, encoder_texts=0) as router:
        call = router.stub.Embed(generate_pb2.EmbedRequest(input=INPUT[:1]))
        await until(lambda: router.service.engine.load().num_running > 0)
        call.cancel()
        await until(lambda: router.service.engine.load().num_running == 0)


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"input": [{"text": "a"}], "pooling": "cls"}, {"input": ["a"], "pooling": "cls"}),
        ({"input": [{"text": ""}]}, {"input": [""]}),
        ({"input": [{"ids": {"ids": [99999]}}]}, {"input": [[99999]]}),
        ({"input": [{"text": "a"}], "dimensions": 9999}, {"input": ["a"], "dimensions": 9999}),
        ({"input": [{"text": "x" * 600}]}, {"input": ["x" * 600]}),
        ({}, {"input": []}),
    ],
)
async def test_what_is_refused_over_http_is_refused_in_its_words(
    router: Any, fields: dict[str, Any], body: dict[str, Any]
) -> None:
    error = await router.error(router.stub.Embed(generate_pb2.EmbedRequest(**fields)))
    answer = await router.http.post("/v1/embeddings", json=body)
    twin = answer.json()["error"]
    assert (error.code(), answer.status_code) == (grpc.StatusCode.INVALID_ARGUMENT, 400)
    assert error.details() == twin["message"]
    assert dict(error.trailing_metadata())["error-param"] == twin["param"]


async def test_unknown_fields_and_unknown_models_are_refused(router: Any) -> None:
    unknown = generate_pb2.EmbedRequest.FromString(generate_pb2.InfoReply(max_choices=3, synthetic_acceptance=[1.0])
                                                   .SerializeToString())  # fmt: skip
    error = await router.error(router.stub.Embed(unknown))
    assert (error.code(), dict(error.trailing_metadata())["error-code"]) == (
        grpc.StatusCode.INVALID_ARGUMENT, "unknown_parameter",
    )  # fmt: skip
