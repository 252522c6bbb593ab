"""Workers of different sizes: who fits only one that is away holds up nobody, and empties nobody's worker."""

from __future__ import annotations

import pytest
from doubles.router import Script
from doubles.router.house import request_of
from doubles.router.scenario import ScriptedTableWorker
from doubles.router.tabletop import Tabletop
from space_router.engine.errors import RequestFailed
from space_router.engine.queueing.admission import MAX_ABSENCE
from space_router.engine.request.request import ValidRequest
from space_router.engine.request.stream import Stream
from space_router.engine.workers.supervisor import ExitCause

SMALL, LARGE = 8, 64  # blocks of 16 slots
STEP = 0.02  # seconds


class House:
    """Workers of these sizes, and readers that read at once."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)  # of the workers that are started next, in turn
        self.top = Tabletop(self._new_worker, num_workers=len(sizes))
        self.streams: list[Stream] = []
        self.num_tokens: dict[Stream, int] = {}

    def _new_worker(self) -> ScriptedTableWorker:
        return ScriptedTableWorker(Script(block_size=16, num_blocks=self.sizes.pop(0), window=2048, eos_ids=()))

    def come_back(self, number: int, size: int) -> None:
        self.sizes.append(size)
        self.top.connections[number].start()

    def submit(self, request: ValidRequest) -> Stream:
        stream = self.top.engine.submit(request)
        self.num_tokens[stream] = 0
        return stream

    def turn(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.top.tick(STEP)
            for stream in self.num_tokens:
                while stream.num_ready:
                    self.num_tokens[stream] += len(stream.read().tokens)
        self.top.engine.check()

    def until(self, stream: Stream, num_tokens: int) -> None:
        for _ in range(2000):
            if self.num_tokens[stream] >= num_tokens:
                return
            self.turn()
        raise AssertionError(f"{self.num_tokens[stream]} tokens, {stream.error}")


def test_who_fits_only_a_worker_that_is_away_lets_others_go_first_and_runs_when_it_is_back() -> None:
    house = House(SMALL, LARGE)
    house.top.connections[1].die(ExitCause.EXTERNAL)
    large, small = house.submit(request_of(6, 500)), house.submit(request_of(7, 20))
    house.until(small, 20)
    assert not house.num_tokens[large]
    house.come_back(1, LARGE)
    house.until(large, 500)


def test_a_small_worker_that_comes_back_last_refuses_nothing_that_the_large_one_can_take() -> None:
    house = House(LARGE, SMALL)
    house.top.connections[1].die(ExitCause.EXTERNAL)
    house.come_back(1, SMALL)
    house.until(house.submit(request_of(6, 500)), 500)


def test_who_fits_no_worker_is_refused_once_none_is_missing() -> None:
    house = House(SMALL, LARGE)
    house.top.connections[1].die(ExitCause.EXTERNAL)
    large = house.submit(request_of(6, 500))
    house.turn()
    assert large.error is None
    house.come_back(1, SMALL)
    assert isinstance(large.error, RequestFailed)


def test_nobody_waits_for_ever_for_a_worker_that_does_not_come() -> None:
    house = House(SMALL, LARGE)
    house.top.connections[1].die(ExitCause.EXTERNAL)
    large = house.submit(request_of(6, 500))
    house.turn()
    house.top.tick(0.9 * MAX_ABSENCE)
    assert large.error is None
    house.top.tick(0.1 * MAX_ABSENCE)
    assert isinstance(large.error, RequestFailed)


def test_who_fits_only_a_worker_that_ends_lets_others_go_first() -> None:
    house = House(SMALL, LARGE)
    scheduler = house.top.connections[1].scheduler
    assert scheduler is not None
    scheduler.closing = True
    large, small = house.submit(request_of(6, 500)), house.submit(request_of(7, 20))
    house.until(small, 20)
    house.top.tick(1.1 * MAX_ABSENCE)
    assert large.error is None, "it may run elsewhere once that one has ended"
    house.top.connections[1].die(ExitCause.EXTERNAL)
    house.come_back(1, LARGE)
    house.until(large, 500)


def test_a_suspect_empties_no_worker_that_it_does_not_fit() -> None:
    house = House(SMALL, SMALL, LARGE)
    large = house.submit(request_of(6, 500))
    others = [house.submit(request_of(7 + i, 100)) for i in range(2)]
    house.turn(2)
    assert [connection.scheduler and connection.scheduler.num_running for connection in house.top.connections] == [
        1,
        1,
        1,
    ]
    house.top.connections[2].die(ExitCause.CRASHED)
    while any(house.num_tokens[stream] < 100 for stream in others):
        before = [house.num_tokens[stream] for stream in others]
        house.turn()
        after = [house.num_tokens[stream] for stream in others]
        assert all(new > old or new == 100 for old, new in zip(before, after, strict=True))
    assert house.num_tokens[large] < 500
    house.come_back(2, LARGE)
    house.until(large, 500)


@pytest.mark.parametrize("comes_back", [SMALL, LARGE])
def test_of_two_suspects_the_one_that_fits_is_tried_and_the_other_waits(comes_back: int) -> None:
    house = House(SMALL, LARGE)
    large = house.submit(request_of(6, 500))
    house.turn()
    small = house.submit(request_of(7, 20))
    scheduler = house.top.connections[1].scheduler
    assert scheduler is not None
    house.turn(2)
    for number in (0, 1):
        house.top.connections[number].die(ExitCause.CRASHED)
    house.come_back(0, SMALL)
    house.until(small, 20)
    assert not large.error
    house.come_back(1, comes_back)
    if comes_back == LARGE:
        house.until(large, 500)
    else:
        house.turn()
        assert isinstance(large.error, RequestFailed)
