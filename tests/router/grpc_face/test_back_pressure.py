"""A slow reader is felt by its own stream, and by nothing else."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio
import pytest
from space_proto import generate_pb2, generate_pb2_grpc
from space_router.config import ServeConfig
from space_router.engine.engine import MAX_LAG

Start = Callable[..., AbstractAsyncContextManager[Any]]
WINDOW = 64 * 1024
"""Bytes that a connection may have under way; a client's own default grows with the speed of the network."""


async def test_a_reader_that_stops_reading_stops_its_stream_and_nobody_elses(start: Start) -> None:
    async with start(window=4096, block_size=16, num_blocks=512) as router:
        options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW))
        async with grpc.aio.insecure_channel(router.server.address, options=options) as channel:
            stub = generate_pb2_grpc.GenerateStub(channel)  # type: ignore[no-untyped-call]
            request = generate_pb2.GenerateRequest(prompt="x", max_tokens=2000, ignore_eos=True, logprobs=20)
            call = stub.Generate(request)
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
    async with start(config=ServeConfig(slow_reader_timeout=0.2), window=4096, num_blocks=512) as router:
        options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW))
        async with grpc.aio.insecure_channel(router.server.address, options=options) as channel:
            stub = generate_pb2_grpc.GenerateStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(
                generate_pb2.GenerateRequest(prompt="x", max_tokens=2000, ignore_eos=True, logprobs=20)
            )
            await settled(lambda: router.value("spaceserve_slow_readers_cut_total") == 1)
            await settled(lambda: router.service.engine.load().blocks_held == 0)
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                [event async for event in call]
            assert cut.value.code() is grpc.StatusCode.CANCELLED


async def settled(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")
