"""A worker that is told to end, by somebody else than its router, finishes what it runs and is no loss."""

from __future__ import annotations

from doubles.router.house import answer, in_house, request_of


async def test_a_worker_that_ends_when_all_is_done_is_no_loss_and_nobody_s_fault() -> None:
    """As each does in its turn when a new version is rolled out."""

    async with in_house() as house:
        (place,) = house.engine.connections
        for number in range(5):
            request = request_of(6, 40, name=str(number))
            async with house.engine.submit(request) as stream:
                first = await anext(stream)
                house.worker.leave()
                rest = [token async for delta in stream for token in delta.tokens]
            assert (*first.tokens, *rest) == answer(request, house.worker.script)
            assert stream.statistics.num_worker_losses == 0
            assert await house.text(request_of(6, 20)) == answer(request_of(6, 20), house.worker.script)
            assert place.num_incarnations == number + 2
        assert place.num_crashes == 0
        assert house.metrics.value("spaceserve_worker_restarts_total") == 0
        house.worker.kill()
        await house.until(lambda: place.num_incarnations == 7)
        assert house.metrics.value("spaceserve_worker_restarts_total") == 1


async def test_a_worker_that_says_it_leaves_and_does_not_counts_as_lost() -> None:
    async with in_house() as house:
        (place,) = house.engine.connections
        await house.text(request_of(6, 4))
        house.worker.leave()
        house.worker.num_lives -= 1  # the same process
        await house.until(lambda: place.num_incarnations == 2)
        assert house.metrics.value("spaceserve_worker_restarts_total") == 1
