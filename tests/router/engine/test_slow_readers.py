"""Readers that do not read cost those who do nothing, counted in the worker's steps."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from doubles.router import Script, never
from doubles.router.house import in_house, request_of

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


async def test_who_reads_again_gets_the_text_that_a_fast_reader_gets() -> None:
    async with in_house(Script(num_blocks=300, window=512), max_lag=16) as house:
        expected = await house.text(request_of(6, 300, name="fast"))
        async with house.engine.submit(request_of(6, 300, name="slow")) as stream:
            await house.until(lambda: stream.lagging)
            await house.text(request_of(9, 200, name="other"))
            assert tuple([id_ async for delta in stream for id_ in delta.tokens]) == expected
