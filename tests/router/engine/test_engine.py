"""The engine with a scripted worker over a real socket: what a caller sees, and what is left afterwards."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
from doubles.router import FixedReply, HashLanguage, Script, always, never, sometimes
from doubles.router.tabletop import answer, in_house, request_of
from space_router.engine.errors import (
    CacheTooSmall,
    DeadlineExceeded,
    Draining,
    PromptTooLong,
    QueueFull,
    RequestCancelled,
    RequestFailed,
)
from space_router.engine.request.request import Delta, Finish, SamplingOptions, Statistics, Stream, ValidRequest


async def read(stream: Stream) -> tuple[int, ...]:
    return tuple([token async for delta in stream for token in delta.tokens])


async def test_64_concurrent_streams_equal_their_solo_runs() -> None:
    async with in_house() as house:
        requests = [
            request_of(5 + i % 9, 10 + i % 23, sampling=SamplingOptions(seed=i), name=str(i)) for i in range(64)
        ]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]


async def test_deltas_carry_tokens_figures_and_the_finish() -> None:
    async with in_house(Script(accepts=always)) as house:
        async with house.engine.submit(request_of(6, 10)) as stream:
            deltas = [delta async for delta in stream]
        assert [len(delta.tokens) for delta in deltas] == [1, 4, 4, 1]
        assert [delta.decoded for delta in deltas] == [False, True, True, True]
        assert [(delta.drafted, delta.accepted) for delta in deltas] == [(0, 0), (3, 3), (3, 3), (0, 0)]
        assert [delta.finish for delta in deltas] == [None, None, None, Finish.LENGTH]
        figures = stream.statistics
        assert (figures.num_steps, figures.num_generated, figures.num_decoded) == (3, 10, 9)
        assert figures.tokens_per_step == 3.0
        assert figures.first_token_seconds is not None
        assert figures.seconds >= figures.first_token_seconds


@pytest.mark.parametrize(
    ("reply", "fields", "finish", "num_tokens"),
    [
        ([7, 8, 2, 9], {"eos_ids": (2,)}, Finish.EOS, 3),
        ([7, 8, 2, 9], {"eos_ids": ()}, Finish.LENGTH, 10),
        ([7, 8, 2, 9], {"stop_ids": (8,)}, Finish.STOP_ID, 2),
    ],
)
async def test_a_stream_says_why_it_ended(
    reply: list[int], fields: dict[str, Any], finish: Finish, num_tokens: int
) -> None:
    async with in_house(Script(language=FixedReply(reply), accepts=always)) as house:
        async with house.engine.submit(request_of(6, 10, **fields)) as stream:
            deltas = [delta async for delta in stream]
        assert deltas[-1].finish is finish
        assert sum(len(delta.tokens) for delta in deltas) == num_tokens


async def test_logprobs_come_one_per_token_and_one_per_prompt_id_but_the_first() -> None:
    async with in_house(max_prefill_rows=4) as house:
        request = request_of(9, 6, want_logprobs=True, num_logprobs=2, num_prompt_logprobs=1)
        async with house.engine.submit(request) as stream:
            deltas = [delta async for delta in stream]
        tokens = [token for delta in deltas for token in delta.tokens]
        assert [entry.id for delta in deltas for entry in delta.logprobs] == tokens
        assert all(len(entry.top) == 2 for delta in deltas for entry in delta.logprobs)
        assert [entry.id for delta in deltas for entry in delta.prompt_logprobs] == list(request.prompt_ids[1:])


async def test_leaving_the_block_early_frees_the_pages() -> None:
    async with in_house() as house:
        async with house.engine.submit(request_of(6, 200)) as stream:
            async for _ in stream:
                break
        with pytest.raises(RequestCancelled):
            await read(stream)


async def test_a_request_left_while_it_is_queued_never_reaches_the_worker() -> None:
    async with in_house(Script(max_sequences=1)) as house:
        async with house.engine.submit(request_of(6, 40)) as first:
            async with house.engine.submit(request_of(7, 40)):
                assert house.engine.load().num_queued == 1
            assert house.engine.load().num_queued == 0
            await read(first)
        assert house.worker.figures.num_admits == 1


async def test_a_request_is_cancelled_by_its_name() -> None:
    async with in_house() as house, house.engine.submit(request_of(6, 200, name="mine")) as stream:
        assert not house.engine.cancel("yours")
        assert house.engine.cancel("mine")
        with pytest.raises(RequestCancelled, match="mine"):
            await read(stream)


@pytest.mark.parametrize("max_sequences", [1, 2])
async def test_a_deadline_ends_a_request_that_runs_or_waits(max_sequences: int) -> None:
    async with (
        in_house(Script(max_sequences=max_sequences, num_blocks=300, step_seconds=0.005)) as house,
        house.engine.submit(request_of(6, 400)) as first,
        house.engine.submit(request_of(6, 400, deadline=0.02)) as second,
    ):
        with pytest.raises(DeadlineExceeded, match=r"0\.02 s"):
            await read(second)
        house.worker.script.step_seconds = 0.0
        await read(first)


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with (
        in_house(Script(max_sequences=1), max_queue=1) as house,
        house.engine.submit(request_of(6, 20)) as running,
        house.engine.submit(request_of(6, 20)) as waiting,
    ):
        with pytest.raises(QueueFull) as refused:
            house.engine.submit(request_of(6, 20))
        assert refused.value.retry_after >= 1.0
        assert house.engine.load().num_queued == 1
        for stream in (running, waiting):
            await read(stream)


async def test_a_queue_of_nobody_still_admits_whom_there_is_room_for() -> None:
    async with in_house(max_queue=0) as house:
        assert len(await house.text(request_of(6, 5))) == 5


async def test_choices_that_wait_for_their_prompt_wait_as_one_even_where_nobody_may_wait() -> None:
    async with in_house(max_queue=0) as house:
        first = house.engine.submit(request_of(40, 5))
        second = house.engine.submit(request_of(40, 5, sampling=SamplingOptions(seed=0, choice=1)), leader=first)
        for stream in (first, second):
            async with stream:
                assert len(await read(stream)) == 5


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "error", "message"),
    [
        (64, None, PromptTooLong, "at most 63 fit"),
        (60, 5, PromptTooLong, "maximum context length is 64 tokens.*65 together"),
        (30, 10, CacheTooSmall, "needs 41 slots"),
    ],
)
async def test_what_can_never_fit_is_refused_at_the_door(
    num_prompt: int, max_tokens: int | None, error: type[Exception], message: str
) -> None:
    async with in_house(Script(window=64, num_blocks=10, block_size=4)) as house:
        with pytest.raises(error, match=message):
            house.engine.submit(request_of(num_prompt, max_tokens))
        assert house.engine.load().num_queued == 0


@pytest.mark.parametrize(("window", "expected"), [(64, 40 - 30 - 1), (35, 35 - 30)])
async def test_a_defaulted_max_tokens_is_cut_to_fit(window: int, expected: int) -> None:
    async with in_house(Script(window=window, num_blocks=10, block_size=4)) as house:
        assert len(await house.text(request_of(30, None))) == expected


async def test_choices_wait_for_their_leader_and_share_its_prompt() -> None:
    async with in_house() as house:
        requests = [request_of(41, 8, sampling=SamplingOptions(seed=5, choice=choice)) for choice in range(4)]
        leader = house.engine.submit(requests[0])
        followers = [house.engine.submit(request, leader=leader) for request in requests[1:]]
        texts = []
        for stream in (leader, *followers):
            async with stream:
                texts.append(await read(stream))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert len(set(texts)) == 4
        assert house.worker.figures.num_cached_ids == 3 * 40
        assert house.metrics.value("spaceserve_prefix_cache_hit_tokens_total") == 3 * 40


async def test_choices_share_nothing_where_layers_are_recurrent() -> None:
    async with in_house(Script(state_bytes_per_sequence=64)) as house:
        requests = [request_of(41, 8, sampling=SamplingOptions(seed=5, choice=choice)) for choice in range(3)]
        leader = house.engine.submit(requests[0])
        followers = [house.engine.submit(request, leader=leader) for request in requests[1:]]
        for stream, request in zip((leader, *followers), requests, strict=True):
            async with stream:
                assert await read(stream) == answer(request, house.worker.script)
        assert house.worker.figures.num_cached_ids == 0


@pytest.mark.parametrize("ending", ["left", "failed"])
async def test_choices_go_on_when_their_leader_ends_before_its_prompt_is_computed(ending: str) -> None:
    async with in_house(Script(failing_id=99), max_prefill_rows=4) as house:
        prompt = (99, *range(10, 50)) if ending == "failed" else tuple(range(10, 50))
        leader = house.engine.submit(request_of(prompt, 8))
        follower = house.engine.submit(request_of(tuple(range(10, 50)), 8), leader=leader)
        async with leader:
            if ending == "failed":
                with pytest.raises(RequestFailed, match="the script says"):
                    await read(leader)
        async with follower:
            assert len(await read(follower)) == 8


async def test_a_slow_reader_gets_a_bounded_number_of_tokens_ahead_and_loses_none() -> None:
    async with in_house(Script(num_blocks=400), max_lag=16) as house:
        slow = request_of(6, 300, name="slow")
        async with house.engine.submit(slow) as stream:
            assert len(await house.text(request_of(7, 300))) == 300  # another one is not held up
            paused_at = stream.num_unread
            assert 16 < paused_at <= 16 + (4 + 1) * 4 + 4  # max_lag, four blocks ahead, one step
            assert len(await house.text(request_of(8, 100))) == 100
            assert stream.num_unread == paused_at
            text = await read(stream)
        assert text == answer(slow, house.worker.script)


async def test_slow_readers_that_hold_every_page_do_not_stop_a_fast_one() -> None:
    async with in_house(Script(num_blocks=18, block_size=4), max_lag=4) as house:
        slow = [request_of((10 + i, 11, 12, 13), 60, name=f"slow {i}") for i in range(3)]
        streams = [house.engine.submit(request) for request in slow]
        assert len(await house.text(request_of((20, 21), 60))) == 60
        for stream, request in zip(streams, slow, strict=True):
            async with stream:
                text = await read(stream)
                assert text == answer(request, house.worker.script)


async def test_a_failed_request_harms_no_other() -> None:
    async with in_house(Script(failing_id=99)) as house:
        good = request_of(6, 60)
        text = asyncio.create_task(house.text(good))
        for _ in range(3):
            with pytest.raises(RequestFailed, match="the script says"):
                await house.text(request_of((98, 99), 9))
        assert await text == answer(good, house.worker.script)


async def test_what_is_submitted_in_one_moment_goes_to_the_worker_in_one_message() -> None:
    async with in_house(Script(num_blocks=200)) as house:
        await house.until(lambda: house.worker.figures.num_messages == 1)  # Start
        prompts = [(20 + i, 11, 12, 13, 14, 15) for i in range(20)]  # nothing to share, so nobody waits for another
        streams = [house.engine.submit(request_of(prompt, 1)) for prompt in prompts]
        await house.until(lambda: house.worker.figures.num_admits == 20)
        assert house.worker.figures.num_messages == 2
        for stream in streams:
            async with stream:
                pass


async def test_priority_goes_before_arrival() -> None:
    async with in_house(Script(max_sequences=1)) as house:
        done: list[str] = []

        async def run(request: ValidRequest) -> None:
            await house.text(request)
            done.append(request.request_id)

        await asyncio.gather(
            run(request_of(6, 20, name="first")),
            run(request_of(6, 20, name="late", priority=1)),
            run(request_of(6, 20, name="soon", priority=0)),
        )
        assert done == ["first", "soon", "late"]


async def test_draining_refuses_new_work_and_waits_for_the_old() -> None:
    async with in_house() as house:
        text = asyncio.create_task(house.text(request_of(6, 30)))
        await asyncio.sleep(0)
        draining = asyncio.create_task(house.engine.drain(10.0))
        await asyncio.sleep(0)
        assert not house.engine.ready
        with pytest.raises(Draining):
            house.engine.submit(request_of())
        assert len(await text) == 30
        assert await draining


async def test_draining_gives_up_after_its_time() -> None:
    async with in_house() as house, house.engine.submit(request_of(6, 200)):
        assert not await house.engine.drain(0.0)


async def test_a_stream_that_is_open_when_the_engine_stops_ends_with_an_error() -> None:
    async with in_house(Script(num_blocks=256, max_sequences=1)) as house:
        running, waiting = (house.engine.submit(request_of(6, 400)) for _ in range(2))
        await house.engine.__aexit__(None, None, None)
        with pytest.raises(RequestFailed, match="server has stopped"):
            await read(running)
        with pytest.raises(Draining, match="Nothing of it was computed"):  # 503: it may be sent elsewhere
            await read(waiting)


async def test_preempted_streams_lose_nothing() -> None:
    async with in_house(
        Script(num_blocks=20, block_size=4, language=HashLanguage(range(4, 200)), accepts=sometimes)
    ) as house:
        requests = [request_of((10 + i, 11, 12, 13), 50, name=str(i)) for i in range(8)]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert (house.metrics.value("spaceserve_preemptions_total") or 0) > 0


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


NUM_SLOW = 64


@pytest.mark.parametrize(
    ("max_sequences", "num_blocks"),
    [(72, 4096), (64, 4096), (72, 300)],
    ids=["room for all", "seats taken", "few pages"],
)
async def test_sixty_four_slow_readers_cost_a_fast_one_at_most_a_tenth_more_steps(
    max_sequences: int, num_blocks: int
) -> None:
    script = Script(accepts=never, max_sequences=max_sequences, num_blocks=num_blocks, block_size=4, window=512)

    async with in_house(script, max_lag=16) as house:
        figures = house.worker.figures

        async def num_steps(name: str) -> int:
            begun: int = figures.num_steps
            assert len(await house.text(request_of(6, 200, name=name))) == 200
            return int(figures.num_steps - begun)

        alone = await num_steps("alone")
        async with AsyncExitStack() as leaving:
            slow = [
                await leaving.enter_async_context(house.engine.submit(request_of(5 + n % 3, 400, name=f"slow {n}")))
                for n in range(NUM_SLOW)
            ]
            await house.until(lambda: all(stream.lagging for stream in slow))
            beside = [await num_steps(f"fast {n}") for n in range(3)]
            most = max(stream.num_unread for stream in slow)
            assert most <= 2 * 16 + 4 * 4, "what nobody reads is not made: the lag, and the pages that were granted"
            assert max(beside) <= 1.1 * alone, (alone, beside)


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
