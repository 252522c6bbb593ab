"""The clock of the machine is set while requests run: no deadline, watchdog or figure notices."""

from __future__ import annotations

import asyncio
import time

import pytest
from doubles.router import Script
from doubles.router.house import answer, in_house, request_of

DAY = 86_400.0


@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["a day ahead", "a day back"])
async def test_requests_with_a_deadline_go_on_when_the_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    async with in_house(Script(num_blocks=256, step_seconds=0.001)) as house:
        request = request_of(6, 200, deadline=20.0)
        text = asyncio.create_task(house.text(request))
        await house.until(lambda: house.engine.load().num_running == 1)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        assert await text == answer(request, house.worker.script)
        assert house.metrics.value("spaceserve_worker_restarts_total") == 0
        assert (house.metrics.value("spaceserve_request_seconds_sum") or 0.0) < 20
