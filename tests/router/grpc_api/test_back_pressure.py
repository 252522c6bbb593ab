"""Slow readers and calls or connections beyond the most: each is felt by itself alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router import never
from doubles.router.whole_router import Start
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from space_proto import generate_pb2, generate_pb2_grpc
from space_router.config import ServeConfig
from space_router.engine.engine import MAX_LAG
from space_router.grpc_api.interceptors import NUM_GUESTS

WINDOW = 64 * 1024
"""Bytes that a connection may have under way; a client's own default grows with the speed of the network."""


@asynccontextmanager
async def long_call(address: str, window: int = WINDOW) -> AsyncIterator[Any]:
    """A call for 2,000 tokens, on a connection of its own with such a window."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = generate_pb2_grpc.GenerateStub(channel)  # type: ignore[no-untyped-call]
        yield stub.Generate(generate_pb2.GenerateRequest(prompt="x", max_tokens=2000, ignore_eos=True, logprobs=20))


async def test_a_reader_that_stops_reading_stops_its_stream_and_nobody_elses(start: Start) -> None:
    big = {"window": 4096, "block_size": 16, "num_blocks": 512}
    async with start(**big) as router, long_call(router.server.address) as call:
        await call.read()
        (live,) = router.service.engine._open
        await settled(lambda: live.lagging)
        assert len(await router.events(prompt="y", max_tokens=400, ignore_eos=True)) > 50, "others go on"
        num_made, size = live.statistics.num_generated, 0
        assert num_made < 1500, "it has been stopped long before its end"
        assert live.num_unread <= 2 * MAX_LAG
        assert len(await router.events(prompt="z", max_tokens=400, ignore_eos=True)) > 50
        assert live.statistics.num_generated == num_made
        ids = 1
        while (event := await call.read()) is not grpc.aio.EOF:
            ids += len(event.token_ids)
            size = max(size, event.ByteSize())
        assert ids == 2000
        assert size < WINDOW


async def test_a_reader_that_never_reads_on_is_cut_counted_and_holds_nothing(start: Start) -> None:
    config = ServeConfig(slow_reader_timeout=0.2)
    async with (
        start(config=config, window=4096, num_blocks=512) as router,
        long_call(router.server.address) as call,
    ):
        await settled(lambda: router.value("spaceserve_slow_readers_cut_total") == 1)
        await settled(lambda: router.service.engine.load().blocks_held == 0)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            [event async for event in call]
        assert cut.value.code() is grpc.StatusCode.CANCELLED


async def test_what_the_system_holds_for_a_connection_that_takes_nothing_is_bounded_and_it_is_cut(start: Start) -> None:
    """Nothing is taken off the wire, by however large a window the client has announced."""
    buffer = 16 * 1024
    config = ServeConfig(slow_reader_timeout=0.5, client_buffer=buffer)
    async with (
        start(config=config, window=4096, num_blocks=2048) as router,
        dammed(router.server.address) as dam,
        long_call(dam.address, 64 * 1024**2) as call,
    ):
        await call.read()
        dam.closed = True
        (live,) = router.service.engine._open
        await settled(lambda: router.value("spaceserve_slow_readers_cut_total") == 1)
        event_bytes = 800  # at least, with twenty alternatives
        assert live.statistics.num_generated * event_bytes < 20 * buffer, "it was stopped long before its end"
        await settled(lambda: router.service.engine.load().blocks_held == 0)
        await settled(lambda: dam.is_cut)
        call.cancel()


class Dam:
    """Lets a server's words through to its client until it is closed."""

    def __init__(self) -> None:
        self.address = ""
        self.closed = False
        self.is_cut = False  # the server has ended the connection


@asynccontextmanager
async def dammed(server: str) -> AsyncIterator[Dam]:
    dam, loop = Dam(), asyncio.get_running_loop()
    host, _, port = server.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        dam.address = f"127.0.0.1:{listening.getsockname()[1]}"

        async def run() -> None:
            client, _ = await loop.sock_accept(listening)
            with client, socket.socket() as onward:
                onward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                onward.setblocking(False)
                await loop.sock_connect(onward, (host, int(port)))

                async def up() -> None:
                    while data := await loop.sock_recv(client, 65536):
                        await loop.sock_sendall(onward, data)

                sending = asyncio.create_task(up())
                while not dam.closed:
                    await loop.sock_sendall(client, await loop.sock_recv(onward, 512))
                while is_held(onward.getsockname()[1]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                dam.is_cut = True
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

        running = asyncio.create_task(run())
        try:
            yield dam
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def is_held(port: int) -> bool:
    """This process still has the other end of the connection at `port`, which may never hear of its being closed."""
    for file in list(Path("/dev/fd").iterdir()):
        with suppress(OSError):
            one = socket.socket(fileno=int(file.name))
            try:
                if one.family != socket.AF_UNIX and one.getpeername()[1] == port:
                    return True
            finally:
                one.detach()
    return False


async def settled(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")


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


async def test_watches_of_the_status_are_bounded_and_looked_after_together(start: Start) -> None:
    """They need no key."""
    async with start(config=ServeConfig(max_connections=40)) as router:
        health: Any = health_pb2_grpc.HealthStub(router.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(40)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        refused = await router.error(health.Watch(health_pb2.HealthCheckRequest()).read())
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.details() == (
            "There are 40 watches of the status already, the most (`--max-connections`). Use Check, or come again "
            "later."
        )
        assert router.value("spaceserve_rejected_total", reason="too_many_connections") == 1
        assert sum(task.get_name() == "health" for task in asyncio.all_tasks()) == 1, "one looks for all of them"
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert await router.events(prompt="x", max_tokens=2), "calls that work are counted apart"
        router.service.draining = True
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watches.pop().cancel()
        await settled(lambda: len(router.server.health.watches) == 39)
        last = health.Watch(health_pb2.HealthCheckRequest())
        assert (await last.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING, "there is room again"


async def test_streams_of_questions_are_calls_and_counted_as_such(start: Start) -> None:
    async with start(config=ServeConfig(max_connections=2)) as router:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(router.channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        calls = [stub.ServerReflectionInfo() for _ in range(2)]
        for call in calls:
            for _ in range(2):
                await call.write(question)
                assert (await call.read()).list_services_response.service
        refused = await router.refusal(**LONG)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        for call in calls:
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        assert await router.events(**LONG)


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
            closed = await router.error(late.Check(health_pb2.HealthCheckRequest(), timeout=20))
            assert closed.code() is grpc.StatusCode.UNAVAILABLE
        assert await router.events(**LONG)
        opened.close()
        async with grpc.aio.insecure_channel(router.server.address, options=options) as channel:
            again: Any = health_pb2_grpc.HealthStub(channel)
            assert await again.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
