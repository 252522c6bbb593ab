"""The pool in which long texts are tokenised: turns by bytes, bounded room, jobs that can be given up."""

import asyncio
import os
import threading
from collections.abc import Callable

import pytest
from space_router.errors import Overloaded
from space_router.text.text_pool import LONG_BODY, TextPool, checkpoint

LONG = LONG_BODY


def steps(name: str, count: int, done: list[str], gate: threading.Event | None = None) -> Callable[[], str]:
    """A job of `count` pieces of 100 bytes each."""

    def work() -> str:
        if gate is not None:
            gate.wait(30)
        for _ in range(count):
            done.append(name)
            checkpoint(100)
        return name

    return work


async def test_a_short_job_passes_a_long_one_between_two_pieces() -> None:
    pool, done, gate = TextPool(1), [], threading.Event()
    long = asyncio.create_task(pool.run("", LONG, steps("long", 50, done, gate)))
    await asyncio.sleep(0)
    short = asyncio.create_task(pool.run("", LONG, steps("short", 2, done)))
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(long, short) == ["long", "short"]
    assert done[:6].count("short") == 2


@pytest.mark.parametrize(("num_processors", "num_running"), [(2, 1), (16, 4)])
async def test_a_quarter_of_the_processors_computes(
    num_processors: int, num_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_processors)))
    pool, gate, running = TextPool(), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        running.release()
        gate.wait(30)

    jobs = [asyncio.create_task(pool.run(f"key {n}", LONG, work)) for n in range(8)]
    for _ in range(num_running):
        assert await asyncio.to_thread(running.acquire, timeout=30)
    assert not await asyncio.to_thread(running.acquire, timeout=0.05), "no more than these compute at once"
    gate.set()
    await asyncio.gather(*jobs)


async def test_keys_take_turns_by_bytes_however_many_jobs_one_of_them_has() -> None:
    pool, done, gate = TextPool(1), [], threading.Event()
    greedy = [asyncio.create_task(pool.run("greedy", LONG, steps("greedy", 20, done, gate))) for _ in range(20)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(pool.run("modest", LONG, steps("modest", 20, done)))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(modest, *greedy)
    until = len(done) - done[::-1].index("modest")
    assert done[:until].count("greedy") <= 23


async def test_a_job_whose_client_is_gone_ends_at_its_next_piece() -> None:
    pool, done, gate = TextPool(1), [], threading.Event()
    left = asyncio.create_task(pool.run("", LONG, steps("left", 1000, done, gate)))
    queued = asyncio.create_task(pool.run("", LONG, steps("queued", 1000, done)))
    await asyncio.sleep(0)
    for task in (left, queued):
        task.cancel()
    await asyncio.gather(left, queued, return_exceptions=True)
    gate.set()
    assert await pool.run("", LONG, steps("next", 1, done)) == "next"
    assert len(done) <= 2
    assert "queued" not in done
    assert pool.num_bytes == 0


async def test_bodies_beyond_the_room_are_refused_and_one_key_gets_half_of_it() -> None:
    assert TextPool(1)._max_bytes == 64 * 1024**2
    pool, gate = TextPool(1, max_bytes=4 * LONG), threading.Event()
    first = [asyncio.create_task(pool.run("a", LONG, gate.wait, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=f"This API key has {2 * LONG} bytes") as refused:
        await pool.run("a", LONG, print)
    assert int(refused.value.headers["Retry-After"]) >= 1
    second = [asyncio.create_task(pool.run("b", LONG, gate.wait, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="The server has"):
        await pool.run("c", LONG, print)
    gate.set()
    await asyncio.gather(*first, *second)
    assert await pool.run("a", 100 * LONG, lambda: "alone") == "alone"
    assert pool.num_bytes == 0


async def test_an_error_is_the_callers() -> None:
    pool = TextPool(1)

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await pool.run("", LONG, fails)
    assert await pool.run("", LONG, lambda: 1) == 1
