"""gRPC's own health service says what `/readyz` says, to anybody, as it changes."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router.whole_router import Start
from grpc_health.v1 import health_pb2, health_pb2_grpc
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
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await status(router, "nobody")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watching = asked(router).Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


async def test_probes_need_no_key(start: Start) -> None:
    async with start(config=ServeConfig(api_keys=plain_keys("right"))) as router:
        assert await status(router) == SERVING
