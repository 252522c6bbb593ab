"""A router whose workers come and go by a list follows it, and no stream is lost by that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from doubles.router import Script, ScriptedWorker
from doubles.router.house import answer, request_of, text_of, until
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.workers import worker_connection as connection
from space_router.engine.workers.supervisor import RemoteWorker
from space_router.engine.workers.worker_link import LinkLost
from space_router.metrics import Metrics

SCRIPT = Script(eos_ids=(), step_seconds=0.005)


@asynccontextmanager
async def following() -> AsyncIterator[Engine]:
    async with Engine(ServeConfig(), Metrics(), sources=()) as engine:
        yield engine


def up(engine: Engine) -> int:
    return engine.load().num_workers_up


async def test_workers_are_met_as_they_are_listed_and_their_seats_taken_once_they_are_not_and_away() -> None:
    async with following() as engine, ScriptedWorker(SCRIPT) as two, AsyncExitStack() as stack:
        one = await stack.enter_async_context(ScriptedWorker(SCRIPT))
        engine.worker_pool.follow([one.address], finish_seconds=0.0)
        await engine.wait_ready()
        engine.worker_pool.follow([one.address, two.address], finish_seconds=0.0)
        await until(lambda: up(engine) == 2)
        requests = [request_of(5 + i, 200, name=str(i)) for i in range(6)]
        streams = [asyncio.create_task(text_of(engine, request)) for request in requests]
        await until(lambda: all(s.scheduler and s.scheduler.num_running for s in engine.connections))
        while not one.drained.is_set():  # each list finds whoever came back meanwhile, as after a lost link
            engine.worker_pool.follow([two.address], finish_seconds=0.0)
            await asyncio.sleep(0.005)  # and what it ran has been handed over
        await stack.aclose()
        await until(lambda: up(engine) == 1)
        engine.worker_pool.follow([two.address], finish_seconds=0.0)
        assert [connection.number for connection in engine.connections] == [1]
        assert await asyncio.gather(*streams) == [answer(request, SCRIPT) for request in requests]
        engine.worker_pool.follow([one.address, two.address], finish_seconds=0.0)
        assert sorted(connection.number for connection in engine.connections) == [0, 1]  # numbers are used again


async def test_an_engine_ends_though_a_connection_hides_that_it_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    num_starts = 0

    async def start(worker: RemoteWorker) -> str:
        nonlocal num_starts
        num_starts += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if num_starts == 1:
                raise LinkLost(f"{worker.name} is gone") from None  # as grpc.aio does where the call fails meanwhile
            raise
        return ""

    monkeypatch.setattr(RemoteWorker, "start", start)
    async with following() as engine:
        engine.worker_pool.follow(["127.0.0.1:1"], finish_seconds=0.0)
        await until(lambda: num_starts == 1)
    assert num_starts == 1


async def test_requests_wait_while_the_list_is_empty() -> None:
    async with following() as engine:
        async with ScriptedWorker(SCRIPT) as first:
            engine.worker_pool.follow([first.address], finish_seconds=0.0)
            await engine.wait_ready()
        await until(lambda: up(engine) == 0)
        engine.worker_pool.follow([], finish_seconds=0.0)
        assert engine.connections == []
        request = request_of(5, 10)
        waiting = asyncio.create_task(text_of(engine, request))
        async with ScriptedWorker(SCRIPT) as second:
            engine.worker_pool.follow([second.address], finish_seconds=0.0)
            assert await waiting == answer(request, SCRIPT)


@pytest.mark.parametrize("listed", [True, False])
async def test_a_worker_of_another_model_is_left_out_until_it_is_set_right(
    listed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_FAILED_STARTS", 1)

    async with ScriptedWorker(SCRIPT) as one, ScriptedWorker(replace(SCRIPT)) as other:
        addresses = (one.address, other.address)
        config = ServeConfig(worker_address=() if listed else addresses)
        async with Engine(config, Metrics(), sources=() if listed else None) as engine:
            if listed:
                engine.worker_pool.follow(addresses, finish_seconds=0.0)
            await until(lambda: up(engine) == 2)
            other.script.model_hash = "another"
            other.kill()
            await until(lambda: caplog.text.count("It is asked again, in case it is set right.") >= 2)
            assert up(engine) == 1
            (stranger,) = [empty for empty in engine.connections if empty.scheduler is None]
            assert "Give all the same model" in stranger.trouble
            requests = [request_of(5 + i, 40, name=str(i)) for i in range(6)]
            assert [await text_of(engine, request) for request in requests] == [answer(r, SCRIPT) for r in requests]
            other.script.model_hash = SCRIPT.model_hash
            await until(lambda: up(engine) == 2)
            streams = [asyncio.create_task(text_of(engine, request)) for request in requests]
            await until(lambda: stranger.scheduler is not None and stranger.scheduler.num_running > 0)
            assert await asyncio.gather(*streams) == [answer(request, SCRIPT) for request in requests]
            assert not stranger.is_given_up


async def test_an_engine_with_workers_of_its_own_follows_nobody() -> None:
    config = ServeConfig(worker_address=("localhost:1",))
    async with Engine(config, Metrics()) as engine:
        with pytest.raises(ValueError, match="These workers are fixed"):
            engine.worker_pool.follow([], finish_seconds=0.0)
