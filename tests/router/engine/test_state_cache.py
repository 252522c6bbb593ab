"""Recurrent states behind prompts: prefixes are shared up to them, and every slot is free, held or cached."""

from __future__ import annotations

import random

import pytest
from doubles.router import Script
from doubles.router.tabletop import Lockstep, answer, request_of
from space_router.engine.state_cache import EVERY_BLOCKS, StateCache


def keys_of(count: int, name: str = "a") -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(count)]


def test_states_are_kept_behind_the_last_full_block_and_in_a_long_prompt_between() -> None:
    cache = StateCache(4)
    keys = keys_of(2 * EVERY_BLOCKS + 5)
    held = cache.hold(keys, begun=0, block_size=16)
    assert [one.position for one in held] == [16 * EVERY_BLOCKS, 32 * EVERY_BLOCKS, 16 * len(keys)]
    assert cache.hold(keys, begun=0, block_size=16) == []  # these are being written
    assert (cache.num_free, cache.num_held, cache.num_cached) == (1, 3, 0)
    assert cache.num_usable(keys) == 0
    cache.written(held[:1])
    cache.give_back(held[1:])
    assert (cache.num_free, cache.num_held, cache.num_cached) == (3, 0, 1)
    assert cache.num_usable(keys) == EVERY_BLOCKS
    assert cache.num_usable(keys[: EVERY_BLOCKS - 1]) == 0
    assert [one.position for one in cache.hold(keys, begun=EVERY_BLOCKS, block_size=16)] == [
        32 * EVERY_BLOCKS, 16 * len(keys)
    ]  # fmt: skip
    cache.check()


def test_the_least_recently_used_state_makes_room_and_held_ones_never() -> None:
    cache = StateCache(2)
    first, second = (cache.hold(keys_of(1, name), begun=0, block_size=4) for name in "xy")
    assert cache.hold(keys_of(1, "z"), begun=0, block_size=4) == []
    cache.written([*first, *second])
    assert cache.use(b"x0") == first[0].slot
    (third,) = cache.hold(keys_of(1, "z"), begun=0, block_size=4)
    assert third.slot == second[0].slot
    assert [cache.num_usable([key]) for key in (b"x0", b"y0", b"z0")] == [1, 0, 0]
    cache.check()


RECURRENT = {"block_size": 4, "state_bytes_per_sequence": 64}


def test_a_second_request_begins_behind_the_last_state_of_the_first() -> None:
    house = Lockstep(Script(**RECURRENT, num_state_slots=4))
    first = house.submit(request_of(11, 20))
    for _ in range(5):
        house.step()
    assert house.scheduler.states.num_cached == 1
    second = house.submit(request_of(11, 4))
    house.step()
    assert house.batch.figures.num_cached_ids == 8
    house.run()
    assert [house.text(live) for live in (first, second)] == [answer(x.request, house.script) for x in (first, second)]
    assert (house.scheduler.states.num_held, house.scheduler.states.num_cached) == (0, 1)


def test_without_a_slot_nothing_is_shared() -> None:
    house = Lockstep(Script(**RECURRENT))
    for _ in range(2):
        house.submit(request_of(11, 4))
        house.run()
    assert house.batch.figures.num_cached_ids == 0
    assert house.scheduler.pool.num_cached == 0


@pytest.mark.parametrize("seed", range(12))
def test_texts_are_right_and_slots_add_up_in_any_company(seed: int) -> None:
    rng = random.Random(seed)
    script = Script(**RECURRENT, num_state_slots=rng.choice([1, 2, 5]), num_blocks=rng.choice([24, 60]))
    house = Lockstep(script)
    lives = []
    for _ in range(14):
        live = house.submit(request_of(rng.choice([3, 5, 9, 17, 18, 33]), rng.choice([2, 9, 20])))
        lives.append(live)
        for _ in range(rng.randrange(4)):
            house.step()
            house.scheduler.check()
    house.run()
    house.scheduler.check()
    assert [house.text(live) for live in lives] == [answer(live.request, script) for live in lives]
    assert house.scheduler.states.num_held == 0
    assert house.batch.figures.num_cached_ids > 0
