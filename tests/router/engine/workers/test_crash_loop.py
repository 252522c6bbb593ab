"""A worker that crashes again and again is not called ready, and is started less and less often."""

from __future__ import annotations

import asyncio

import pytest
from doubles.router import Script
from doubles.router.house import House, in_house, request_of
from space_router.engine.workers import worker_connection as connection


async def crash(house: House) -> None:
    num_lives = house.engine.connections[0].num_incarnations
    house.worker.kill()
    await house.until(lambda: house.engine.connections[0].num_incarnations > num_lives)


async def test_readiness_is_off_after_three_crashes_until_a_worker_has_been_up_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with in_house(Script(heartbeat_seconds=0.02)) as house:
        for _ in range(2):
            await crash(house)
            assert house.engine.ready
        await crash(house)
        assert house.engine.load().num_workers_up == 1
        assert not house.engine.ready
        monkeypatch.setattr(connection, "STEADY_SECONDS", 0.05)
        await house.until(lambda: house.engine.ready)
        await crash(house)
        assert house.engine.ready, "a worker that was up for a while begins a new row"


async def test_each_crash_of_a_row_makes_the_next_start_wait_longer() -> None:
    async with in_house() as house:
        clock, waits = asyncio.get_running_loop().time, []
        for _ in range(4):
            begun = clock()
            await crash(house)
            waits.append(clock() - begun)
        assert waits[1] >= 0.1
        assert waits[2] >= 0.2
        assert waits[3] >= 0.4


async def test_a_request_is_served_by_a_worker_that_is_not_called_ready() -> None:
    async with in_house() as house:
        for _ in range(3):
            await crash(house)
        assert not house.engine.ready
        assert len(await house.text(request_of(6, 10))) == 10
