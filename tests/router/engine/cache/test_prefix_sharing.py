"""What one request has computed, or is computing, no other computes again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from doubles.router import Script
from doubles.router.house import Lockstep, answer, in_house, request_of
from space_router.engine.errors import DeadlineExceeded
from space_router.engine.request.request import SamplingOptions

SYSTEM = tuple(range(10, 50))  # ten whole blocks of four


def prompts(num: int) -> list[tuple[int, ...]]:
    return [(*SYSTEM, 60 + i, 61, 62) for i in range(num)]


def test_the_next_turn_of_a_chat_does_not_prefill_the_last_answer() -> None:
    house = Lockstep(Script(block_size=4))
    first = house.submit(request_of(6, 21))
    house.run()
    computed = house.batch.figures.num_computed_prompt_ids
    turn = (*first.ids, 70, 71, 72)  # 30 ids, 26 of them with keys and values: the last of the answer has none
    house.submit(request_of(turn, 4))
    house.run()
    assert house.batch.figures.num_cached_ids == 24
    assert house.batch.figures.num_computed_prompt_ids - computed == 30 - 24


async def test_a_prefix_that_is_being_computed_is_computed_once() -> None:
    async with in_house(max_prefill_rows=8) as house:
        requests = [request_of(prompt, 8, name=str(i)) for i, prompt in enumerate(prompts(6))]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        figures = house.worker.figures
        assert figures.num_cached_ids == 5 * len(SYSTEM)
        assert figures.num_computed_prompt_ids == len(SYSTEM) + 6 * 3


async def test_followers_wait_for_what_they_share_and_not_for_the_rest() -> None:
    async with in_house(Script(num_blocks=200), max_prefill_rows=8) as house:
        long, short = request_of((*SYSTEM, *range(100, 240)), 4), request_of((*SYSTEM, 7), 4)
        async with house.engine.submit(long) as leader, house.engine.submit(short):
            assert house.engine.load().num_queued == 1
            await house.until(lambda: house.worker.figures.num_admits == 2)
            assert leader.statistics.num_generated == 0  # its own prompt goes on
            assert house.worker.figures.num_cached_ids == len(SYSTEM)


@pytest.mark.parametrize("fields", [{"cache_salt": "mine"}, {"share_prefix": False}, {"num_prompt_logprobs": 0}])
async def test_nobody_waits_for_what_it_must_not_share(fields: dict[str, Any]) -> None:
    async with in_house(max_prefill_rows=128) as house:
        requests = [request_of(SYSTEM, 8), request_of(SYSTEM, 8, **fields)]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert house.worker.figures.num_cached_ids == 0


async def test_salts_share_within_themselves_and_never_with_others() -> None:
    async with in_house(Script(num_blocks=200)) as house:
        for salt, cached in (("a", 0), ("b", 0), ("", 0), ("a", 36), ("b", 72), ("", 108)):
            await house.text(request_of(SYSTEM, 2, cache_salt=salt))
            assert house.worker.figures.num_cached_ids == cached


async def test_choices_share_their_prompt_without_being_told_of_each_other() -> None:
    async with in_house() as house:
        requests = [request_of(SYSTEM, 8, sampling=SamplingOptions(seed=5, choice=i), name=str(i)) for i in range(4)]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert house.worker.figures.num_cached_ids == 3 * 36


async def test_who_waits_for_a_prefix_goes_on_when_the_one_that_computes_it_leaves() -> None:
    async with in_house(max_prefill_rows=4) as house:
        leader = house.engine.submit(request_of((*SYSTEM, 1), 8, name="leader"))
        followers = [asyncio.create_task(house.text(request_of(prompt, 8))) for prompt in prompts(3)]
        await asyncio.sleep(0)
        assert house.engine.load().num_queued == 3
        async with leader:
            pass
        expected = [answer(request_of(prompt, 8), house.worker.script) for prompt in prompts(3)]
        assert await asyncio.gather(*followers) == expected


@pytest.mark.parametrize("num_steps", [1, 3, 6])
async def test_who_waits_for_a_prefix_outlives_the_worker_that_computes_it(num_steps: int) -> None:
    async with in_house(Script(die_after_steps=num_steps), max_prefill_rows=8) as house:
        requests = [request_of(prompt, 8, name=str(i)) for i, prompt in enumerate(prompts(4))]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert house.worker.num_lives == 2


def test_a_short_prompt_is_admitted_beside_a_long_one_and_a_second_long_one_is_not() -> None:
    house = Lockstep(Script(num_blocks=300, window=2000), max_prefill_rows=16)
    house.submit(request_of(tuple(range(4, 204)), 4))
    for i in range(3):
        house.submit(request_of((210 + i, 5, 6, 7), 4))
    house.step()
    assert house.scheduler.num_running == 4  # 16 of the 32 rows in advance for the long one, 12 for the short ones
    house.submit(request_of(tuple(range(5, 205)), 4))
    house.step()
    assert house.scheduler.num_running == 4
    house.run()


def test_many_short_prompts_are_admitted_at_once() -> None:
    house = Lockstep(Script(num_blocks=300), max_prefill_rows=64)
    for i in range(32):
        house.submit(request_of((20 + i, 5, 6, 7), 8))
    house.step()
    assert house.scheduler.num_running == 32


async def test_what_cannot_be_finished_any_more_is_refused_before_it_runs() -> None:
    async with in_house(Script(num_blocks=300)) as house:
        await house.text(request_of(6, 40))  # 1.4 ms per step of up to four tokens, as the script has it
        with pytest.raises(DeadlineExceeded, match="takes at least"):
            house.engine.submit(request_of(6, 400, deadline=0.02))
        assert len(await house.text(request_of(6, 400, deadline=10.0))) == 400
        async with house.engine.submit(request_of(6, 400, deadline=0.02, eos_ids=(2,))) as stream:
            assert house.engine.load().num_running == 1  # it may end by itself at any token
            assert stream.statistics.num_generated == 0
        async with house.engine.submit(request_of(6, 400, deadline=0.02, stops_on_text=True)):
            assert house.engine.load().num_running == 1
