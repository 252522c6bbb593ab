"""A worker that compiles a grammar does not step, and nobody takes it for hung."""

from __future__ import annotations

import asyncio

import pytest
from doubles.router import Script
from doubles.router.house import Lockstep, in_house, request_of
from space_router.engine.request.request import Grammar, SamplingOptions
from space_router.engine.workers import worker_connection as connection
from space_router.engine.workers import worker_link

BOUND = SamplingOptions(seed=1, grammar=Grammar("regex", "a+"))


def compiles() -> Script:
    """Only its heart beats."""
    return Script(stall_after_steps=0, heartbeat_seconds=0.01, eos_ids=())


def test_a_step_is_due_of_those_alone_whose_grammar_is_known() -> None:
    house = Lockstep(Script(num_blocks=200), delay=1)
    house.submit(request_of(9, 4, sampling=BOUND))
    house.step()
    assert (house.scheduler.is_step_due, house.scheduler.awaits_grammar) == (False, True)
    house.step()  # reported: it is compiled
    assert (house.scheduler.is_step_due, house.scheduler.awaits_grammar) == (True, False)


def test_beside_a_grammar_that_is_compiled_steps_and_pages_of_others_are_due() -> None:
    house = Lockstep(Script(num_blocks=200), delay=9)
    house.submit(request_of(9, 4, sampling=BOUND))
    other = house.submit(request_of(8, 4))
    house.step()
    assert house.scheduler.is_step_due
    house.cancel(other)
    assert house.scheduler.is_step_due


async def test_a_worker_that_compiles_for_longer_than_its_timeout_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "MAX_STALL_FACTOR", 1)
    async with in_house(compiles(), worker_timeout=0.2) as house:
        text = asyncio.create_task(house.text(request_of(6, 20, sampling=BOUND)))
        await asyncio.sleep(0.5)
        assert house.metrics.value("spaceserve_worker_up") == 1
        house.worker.script.stall_after_steps = None
        assert len(await text) == 20
        assert house.metrics.value("spaceserve_worker_restarts_total") == 0


async def test_a_worker_that_neither_compiles_nor_gives_up_in_its_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "MAX_STALL_FACTOR", 1)
    monkeypatch.setattr(connection, "GRAMMAR_SECONDS", 0.1)
    async with in_house(compiles(), worker_timeout=0.2) as house:
        text = asyncio.create_task(house.text(request_of(6, 20, sampling=BOUND)))
        await house.until(lambda: (house.metrics.value("spaceserve_worker_up") or 0) == 0)
        house.worker.script.stall_after_steps = None
        assert len(await text) == 20
