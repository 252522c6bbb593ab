"""More gRPC calls or connections than a server may have: told so, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router import never
from doubles.router.whole_router import Start
from grpc_health.v1 import health_pb2, health_pb2_grpc
from space_proto import generate_pb2
from space_router.config import ServeConfig
from space_router.grpc_api.interceptors import NUM_GUESTS

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}


async def test_calls_beyond_the_most_are_refused_with_the_bound_and_when_to_come_again(start: Start) -> None:
    async with start(config=ServeConfig(max_connections=3), step_seconds=0.01, accepts=never) as router:
        running = [router.stub.Generate(generate_pb2.GenerateRequest(**LONG)) for _ in range(3)]
        for call in running:
            await call.read()
        refused = await router.refusal(**LONG)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.details() == (
            "There are 3 calls already, the most (`--max-connections`). End some, or come again later."
        )
        assert dict(refused.trailing_metadata())["retry-after"] == "1"
        assert router.value("spaceserve_rejected_total", reason="too_many_connections") == 1
        health = health_pb2_grpc.HealthStub(router.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        running.pop().cancel()
        for call in running:
            num_events = 1
            while await call.read() is not grpc.aio.EOF:
                num_events += 1
            assert num_events > 50, "those before go on"
        assert await router.events(**LONG), "there is room again"


async def test_connections_beyond_the_most_are_closed_and_those_before_go_on(start: Start) -> None:
    async with start(config=ServeConfig(max_connections=2)) as router, AsyncExitStack() as stack:
        opened = stack.enter_context(ExitStack())
        host, _, port = router.server.address.rpartition(":")
        await router.events(**LONG)  # one connection is the test's own
        for _ in range(1 + NUM_GUESTS):
            one = opened.enter_context(socket.socket())
            one.setblocking(False)
            await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
            await asyncio.get_running_loop().sock_sendall(one, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            await asyncio.get_running_loop().sock_recv(one, 1)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(router.server.address, options=options) as channel:
            late: Any = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as closed:
                await late.Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert closed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await router.events(**LONG)
        opened.close()
        async with grpc.aio.insecure_channel(router.server.address, options=options) as channel:
            again: Any = health_pb2_grpc.HealthStub(channel)
            assert await again.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
