"""What is said comes in order, from any thread; silence is noticed in time."""

import asyncio
import threading

import pytest
from space_server.grpc_server.router_session import ReportQueue


def test_what_is_said_is_taken_in_order_whether_somebody_waits_for_it_or_not() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[int] = ReportQueue()
        report_queue.put(1)
        report_queue.put(2)
        assert [await report_queue.take(10.0), await report_queue.take(10.0)] == [1, 2]
        taking = asyncio.ensure_future(report_queue.take(10.0))
        await asyncio.sleep(0)
        threading.Thread(target=report_queue.put_from_thread, args=(3,)).start()
        assert await taking == 3
        report_queue.close()

    asyncio.run(scene())


def test_a_silence_longer_than_patience_is_noticed_though_the_timer_was_set_for_an_earlier_message() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[str] = ReportQueue()
        loop = asyncio.get_running_loop()
        loop.call_later(0.03, report_queue.put, "said")
        assert await report_queue.take(0.05) == "said"
        begun = loop.time()
        with pytest.raises(TimeoutError):
            await report_queue.take(0.05)
        assert loop.time() - begun >= 0.045
        report_queue.put("again")
        assert await report_queue.take(0.05) == "again"
        report_queue.close()

    asyncio.run(scene())


def test_less_patience_than_before_is_kept_too() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[str] = ReportQueue()
        taking = asyncio.ensure_future(report_queue.take(60.0))
        await asyncio.sleep(0)
        report_queue.put("said")
        assert await taking == "said"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(report_queue.take(0.01), 5.0)
        report_queue.close()

    asyncio.run(scene())


def test_a_taker_that_is_cancelled_loses_nothing() -> None:
    async def scene() -> None:
        report_queue: ReportQueue[str] = ReportQueue()
        taking = asyncio.ensure_future(report_queue.take(60.0))
        await asyncio.sleep(0)
        taking.cancel()
        report_queue.put("said")
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await report_queue.take(1.0) == "said"
        report_queue.close()

    asyncio.run(scene())
