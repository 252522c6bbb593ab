"""Blocks are free, held or cached, and never anything else."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from space_router.engine.kv_offload import KVOffload
from space_router.engine.pages import BlockKeys, PagePool


def prefix_of(pool: PagePool, keys: list[bytes]) -> list[int]:
    return [known.block for known in KVOffload(pool, 0).lookup_prefix(keys)]


def test_a_known_block_is_found_until_room_is_needed() -> None:
    pool = PagePool(2)
    [block, other] = pool.take(2)
    pool.publish(block, b"a")
    pool.give_back([block, other])
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 0, 1)
    assert prefix_of(pool, [b"a", b"b"]) == [block]
    pool.take(2)
    assert prefix_of(pool, [b"a"]) == []
    pool.check()


def test_the_longest_unused_content_goes_first_and_deep_blocks_before_their_roots() -> None:
    pool = PagePool(4)
    for name in (b"old", b"new"):
        pages = pool.take(2)
        pool.publish(pages[0], name + b" root")
        pool.publish(pages[1], name + b" deep")
        pool.give_back(pages)
    pool.take(1)
    assert len(prefix_of(pool, [b"old root", b"old deep"])) == 1
    pool.take(1)
    assert prefix_of(pool, [b"old root"]) == []
    assert len(prefix_of(pool, [b"new root", b"new deep"])) == 2


def test_a_shared_block_comes_back_with_its_last_holder() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    pool.publish(pages[0], b"a")
    pool.hold(pages)
    pool.give_back(pages)
    assert pool.num_held == 1
    pool.give_back(pages)
    assert pool.num_cached == 1


def test_content_that_is_known_already_keeps_its_block() -> None:
    pool = PagePool(2)
    [first, second] = pool.take(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert prefix_of(pool, [b"a"]) == [first]
    pool.give_back([first, second])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.check()


def test_more_than_there_is_cannot_be_taken() -> None:
    with pytest.raises(ValueError, match="3 blocks asked for, 2 available"):
        PagePool(2).take(3)


def test_keys_depend_on_salt_and_on_everything_before() -> None:
    ids = [1, 2, 3, 4]
    keys = BlockKeys("", 2).first_keys(ids, 2)
    assert BlockKeys("", 2).first_keys([1, 2, 3, 4, 5], 2) == keys
    assert BlockKeys("salt", 2).first_keys(ids, 2)[0] != keys[0]
    changed = BlockKeys("", 2).first_keys([1, 9, 3, 4], 2)
    assert changed[0] != keys[0]
    assert changed[1] != keys[1]


class AnyTraffic(RuleBasedStateMachine):
    """Random holders with random content; the books balance after every move."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.holders: list[list[int]] = []

    @rule(num=st.integers(1, 6))
    def take(self, num: int) -> None:
        if num <= self.pool.num_available:
            held = {block for holder in self.holders for block in holder}
            taken = self.pool.take(num)
            assert len(set(taken)) == num
            assert not held & set(taken)
            self.holders.append(taken)

    @rule(which=st.integers(0, 5), depth=st.integers(1, 3))
    def publish(self, which: int, depth: int) -> None:
        if which < len(self.holders):
            for i, block in enumerate(self.holders[which][:depth]):
                if block not in self.pool._key:
                    self.pool.publish(block, b"%d %d" % (which % 2, i))

    @rule(which=st.integers(0, 1))
    def share(self, which: int) -> None:
        blocks = prefix_of(self.pool, [b"%d %d" % (which, i) for i in range(3)])
        if blocks:
            self.pool.hold(blocks)
            self.holders.append(blocks)

    @rule(which=st.integers(0, 5))
    def give_back(self, which: int) -> None:
        if which < len(self.holders):
            self.pool.give_back(self.holders.pop(which))

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.num_held == len({block for holder in self.holders for block in holder})


AnyTraffic.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyTraffic = AnyTraffic.TestCase
