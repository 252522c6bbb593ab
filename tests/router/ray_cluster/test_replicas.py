"""Ray's replicas without Ray: one keeps a worker process alive, the other is a router that follows a list."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import httpx
import pytest
from doubles.router import Script, ScriptedWorker
from space_router.config import ServeConfig
from space_router.engine.workers.supervisor import WorkerDidNotStart
from space_router.ray_cluster.replicas import Present, RouterReplica, WorkerReplica

LIMIT = 60.0
CONFIG = ServeConfig(model="demo", drain_timeout=0.5, worker_start_timeout=LIMIT)


def scripted(config: ServeConfig, address: str) -> Sequence[str]:
    return [sys.executable, "-m", "doubles.router", "--listen", address]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  conditions of every kind, none of which is an event
        await asyncio.sleep(0.01)


async def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def is_healthy(replica: WorkerReplica) -> bool:
    try:
        replica.check_health()
    except WorkerDidNotStart:
        return False
    return True


async def test_a_worker_that_is_killed_listens_again_at_the_same_address_and_none_is_left_behind() -> None:
    replica = WorkerReplica(CONFIG, "127.0.0.1", scripted)
    await replica.start()
    address = replica.meet(7)
    assert replica.record_autoscaling_stats() == {"requests": 7.0}
    assert await listens(address)
    first = replica.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: replica.pid not in (None, first))
    while not await listens(address):  # noqa: ASYNC110  nothing says when
        await asyncio.sleep(0.01)
    assert replica.meet(0) == address
    replica.check_health()
    await replica.stop()
    assert replica.pid is None
    assert not await listens(address)


async def test_a_replica_whose_worker_does_not_start_says_its_last_words() -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(WorkerDidNotStart, match="no such model"):
        await WorkerReplica(CONFIG, "127.0.0.1", lambda config, address: words).start()


async def test_a_replica_whose_worker_does_not_come_back_is_not_healthy() -> None:
    starts: list[str] = []

    def once(config: ServeConfig, address: str) -> Sequence[str]:
        starts.append(address)
        return scripted(config, address) if len(starts) == 1 else [sys.executable, "-c", "raise SystemExit(3)"]

    replica = WorkerReplica(CONFIG, "127.0.0.1", once)
    await replica.start()
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)
    await until(lambda: not is_healthy(replica))
    with pytest.raises(WorkerDidNotStart, match="ended with code 3"):
        replica.check_health()
    await replica.stop()


async def test_the_router_serves_once_a_worker_answers_and_keeps_those_that_missed_one_question() -> None:
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(ScriptedWorker(Script(eos_ids=()))) for _ in range(2)]
        answers = [Present(frozenset(), True)]
        told: list[int] = []

        async def meet(num_requests: int) -> Present:
            told.append(num_requests)
            if not answers:
                raise ConnectionError("the controller is away")
            return answers[-1]

        router = RouterReplica(CONFIG, meet, meet_seconds=0.01)
        application = await router.start()
        stack.push_async_callback(router.stop)
        engine = router.service.engine
        transport = httpx.ASGITransport(application)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://router"))
        assert (await client.get("/health")).status_code == 503
        answers.append(Present(frozenset({one.address, two.address}), True))
        await until(lambda: engine.load().num_workers_up == 2)
        assert (await client.get("/health")).status_code == 200
        for unsure in (Present(frozenset({two.address}), False), None):  # one did not answer; nobody could be asked
            answers[:] = [] if unsure is None else [unsure]
            asked = len(told)
            await until(lambda asked=asked: len(told) > asked + 3)  # type: ignore[misc]
            assert engine.load().num_workers_up == 2
        answers.append(Present(frozenset({two.address}), True))
        await one.drained.wait()
        body = {"prompt": "a", "max_tokens": 5}
        assert (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 5
        assert told[0] == 0
