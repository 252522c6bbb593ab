"""What is evicted from the KV cache is kept in host memory and comes back, against a worker that checks every slot."""

from __future__ import annotations

from typing import Any

import pytest
from doubles.router import Script
from doubles.router.tabletop import Lockstep, answer, request_of
from space_router.engine.kv_offload import KVOffload, PrefixBlock
from space_router.engine.pages import PagePool
from space_router.engine.request.request_state import RequestState


def conversation(number: int) -> tuple[int, ...]:
    return tuple(range(10 + number, 10 + number + 40))  # ten blocks of four, and none of another's


def house_of(num_host_blocks: int, **fields: Any) -> Lockstep:
    return Lockstep(Script(block_size=4, num_blocks=16, num_host_blocks=num_host_blocks, **fields))


def ask(house: Lockstep, prompt: tuple[int, ...], **fields: Any) -> RequestState:
    live = house.submit(request_of(prompt, 6, **fields))
    house.run()
    assert house.text(live) == answer(live.request, house.script)
    return live


@pytest.mark.parametrize(("num_host_blocks", "num_cached"), [(0, 0), (100, 3 * 36)])
def test_conversations_in_turn_find_their_prefix_again(num_host_blocks: int, num_cached: int) -> None:
    house = house_of(num_host_blocks)
    for _ in range(2):
        for number in range(3):
            ask(house, conversation(number))
    assert house.batch.figures.num_cached_ids == num_cached
    assert house.scheduler.offload.num_restored == house.batch.figures.num_restored_blocks
    assert (house.batch.figures.num_restored_blocks > 0) == bool(num_host_blocks)


def test_a_copy_that_was_restored_is_not_made_again() -> None:
    house = house_of(100)
    for _ in range(4):
        for number in range(2):
            ask(house, conversation(number))
    offload = house.scheduler.offload
    assert offload.num_offloaded == offload.num_cached <= 2 * 12
    assert offload.num_restored > offload.num_offloaded


@pytest.mark.parametrize("fields", [{"cache_salt": "other"}, {"share_prefix": False}, {"num_prompt_logprobs": 0}])
def test_nothing_comes_back_across_salts_or_where_it_is_not_wanted(fields: dict[str, Any]) -> None:
    house = house_of(100)
    for number in range(3):
        ask(house, conversation(number))
    ask(house, conversation(0), **fields)
    assert house.batch.figures.num_restored_blocks == 0


@pytest.mark.parametrize("num_host_blocks", [1, 2, 5, 11])
def test_a_small_host_memory_keeps_beginnings_and_never_what_is_wrong(num_host_blocks: int) -> None:
    house = house_of(num_host_blocks)
    for _ in range(3):
        for number in range(3):
            ask(house, conversation(number))
    assert house.scheduler.offload.num_cached == num_host_blocks


def test_what_is_about_to_be_restored_makes_no_room() -> None:
    pool = PagePool(2)
    offload = KVOffload(pool, 1)
    [block, other] = offload.take(2, [])
    pool.publish(block, b"a")
    pool.give_back([block, other])
    commands: list[Any] = []
    [one, two] = offload.take(2, commands)
    assert [(list(c.offload_blocks.blocks), list(c.offload_blocks.host_blocks)) for c in commands] == [([block], [0])]
    pool.publish(one, b"b")
    pool.give_back([one, two])
    assert offload.lookup_prefix([b"a", b"b", b"c"]) == [PrefixBlock(0, True), PrefixBlock(one, False)]
    commands = []
    taken = offload.take(2, commands, frozenset([b"a"]))
    assert commands == []  # b is lost, for host memory holds nothing but a
    offload.restore(taken[:1], [b"a"], commands)
    assert list(commands[0].restore_blocks.blocks) == taken[:1]
    assert offload.lookup_prefix([b"a"]) == [PrefixBlock(taken[0], False)]
    offload.check()


def test_host_memory_that_loses_a_block_is_caught() -> None:
    offload = KVOffload(PagePool(1), 3)
    offload._free.pop()
    with pytest.raises(ValueError, match="host memory"):
        offload.check()
