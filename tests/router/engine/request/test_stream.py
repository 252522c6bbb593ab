"""The reader's end: deltas in order, then the end or the error; never more than it can hold."""

from __future__ import annotations

import asyncio

import pytest
from doubles.router.house import request_of
from space_router.engine.errors import RequestFailed
from space_router.engine.request.request import Delta, Finish, Statistics, ValidRequest
from space_router.engine.request.stream import Stream


def a_stream(request: ValidRequest, said: list[str]) -> Stream:
    return Stream(
        request,
        Statistics(num_prompt=1),
        max_lag=4,
        on_leave=lambda: said.append("left"),
        on_caught_up=lambda: said.append("caught up"),
    )


async def test_an_error_comes_after_everything_that_was_said_before_it() -> None:
    stream = a_stream(request_of(), [])
    stream.push(Delta(tokens=(1,)))
    stream.fail(RequestFailed("no more"))
    stream.push(Delta(tokens=(2,)))
    assert (await anext(stream)).tokens == (1,)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="no more"):
            await anext(stream)


async def test_nothing_follows_the_finish() -> None:
    stream = a_stream(request_of(), [])
    stream.push(Delta(tokens=(1,), finish=Finish.EOS))
    stream.push(Delta(tokens=(2,)))
    stream.fail(RequestFailed("too late"))
    assert [delta.tokens async for delta in stream] == [(1,)]


async def test_a_reader_that_waits_is_woken() -> None:
    stream = a_stream(request_of(), [])
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.push(Delta(tokens=(1,)))
    assert (await reader).tokens == (1,)


async def test_a_reader_lags_above_its_bound_and_has_caught_up_at_half_of_it() -> None:
    said: list[str] = []
    stream = a_stream(request_of(), said)
    for _ in range(2):
        stream.push(Delta(tokens=(1, 2)))
    assert not stream.lagging
    stream.push(Delta(tokens=(3,)))
    assert stream.lagging
    await anext(stream)
    assert stream.lagging
    await anext(stream)
    assert not stream.lagging
    assert said == ["caught up"]


async def test_leaving_the_block_is_said_however_it_is_left() -> None:
    said: list[str] = []
    async with a_stream(request_of(), said):
        pass
    with pytest.raises(ZeroDivisionError):
        async with a_stream(request_of(), said):
            raise ZeroDivisionError
    assert said == ["left", "left"]
