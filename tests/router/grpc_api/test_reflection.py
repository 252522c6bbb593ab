"""A client that knows nothing but the address learns the contract by reflection, and calls it."""

from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router.whole_router import Start
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig

GENERATE = "spaceserve.v1.Generate"


async def reflected(router: Any, metadata: Any = (), **question: str) -> Any:
    """The answer to one question."""
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    request = reflection_pb2.ServerReflectionRequest(**question)
    return await stub.ServerReflectionInfo(iter([request]), metadata=metadata).read()


async def test_the_services_for_clients_are_listed_and_the_workers_is_not(router: Any) -> None:
    listed = (await reflected(router, list_services="")).list_services_response.service
    assert {one.name for one in listed} == {
        GENERATE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_messages_built_from_reflection_alone_stream_an_answer(router: Any) -> None:
    pool = descriptor_pool.DescriptorPool()
    found = await reflected(router, file_containing_symbol=GENERATE)
    for file in found.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    method = pool.FindServiceByName(GENERATE).methods_by_name["Generate"]
    request = message_factory.GetMessageClass(method.input_type)(prompt="hello", max_tokens=9, n=2, seed=3)
    event = message_factory.GetMessageClass(method.output_type)
    assert method.server_streaming
    call = router.channel.unary_stream(
        f"/{GENERATE}/Generate",
        request_serializer=type(request).SerializeToString,
        response_deserializer=event.FromString,
    )
    texts = ["", ""]
    async for one in call(request):
        texts[one.index] += one.text
    answer = await router.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 9, "n": 2, "seed": 3})
    assert texts == [choice["text"] for choice in answer.json()["choices"]]


async def test_the_contract_is_told_to_those_with_a_key(start: Start) -> None:
    async with start(config=ServeConfig(api_keys=plain_keys("right"))) as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected(router, list_services="")
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert await reflected(router, metadata=(("authorization", "Bearer right"),), list_services="")
