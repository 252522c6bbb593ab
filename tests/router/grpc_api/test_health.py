"""gRPC's health service says what `/readyz` says, and reflection teaches a client that knows only the address."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router.whole_router import Start
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig

GENERATE = "spaceserve.v1.Generate"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def asked(router: Any) -> Any:
    return health_pb2_grpc.HealthStub(router.channel)


async def status(router: Any, service: str = "") -> Any:
    return (await asked(router).Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", ["", GENERATE])
async def test_it_serves_once_a_worker_is_there_and_no_more_while_draining(start: Start, service: str) -> None:
    async with start(ready=False) as router:
        assert await status(router, service) == NOT_SERVING
        await router.connect()
        assert await status(router, service) == SERVING
        assert (await router.http.get("/readyz")).status_code == 200
        router.service.draining = True
        assert await status(router, service) == NOT_SERVING
        assert (await router.http.get("/readyz")).status_code == 503


async def test_a_watcher_hears_of_every_change_and_is_let_go_at_the_end(start: Start) -> None:
    async with start(ready=False) as router:
        watching = asked(router).Watch(health_pb2.HealthCheckRequest(service=GENERATE))
        assert (await watching.read()).status == NOT_SERVING
        await router.connect()
        assert (await watching.read()).status == SERVING
        router.service.draining = True
        assert (await watching.read()).status == NOT_SERVING
        async with asyncio.timeout(30):
            await router.server.stop(60.0)
        assert await watching.read() is grpc.aio.EOF


@pytest.mark.skipif(not hasattr(health_pb2, "HealthListRequest"), reason="grpcio-health-checking before 1.85")
async def test_all_services_are_listed_with_their_status(router: Any) -> None:
    listed = await asked(router).List(health_pb2.HealthListRequest())
    assert {name: one.status for name, one in listed.statuses.items()} == {"": SERVING, GENERATE: SERVING}


async def test_a_service_that_is_not_there_is_unknown(router: Any) -> None:
    error = await router.error(status(router, "nobody"))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    watching = asked(router).Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


async def test_probes_need_no_key(start: Start) -> None:
    async with start(config=ServeConfig(api_keys=plain_keys("right"))) as router:
        assert await status(router) == SERVING


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
        error = await router.error(reflected(router, list_services=""))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert await reflected(router, metadata=(("authorization", "Bearer right"),), list_services="")
