"""How long streams are silent when their worker is lost, and how many workers a request can kill.

On a table: a step takes 0.02 s on its clock, whatever the machine does meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from doubles.router import Script
from doubles.router.house import answer, request_of
from doubles.router.scenario import ScriptedTableWorker
from doubles.router.tabletop import Tabletop
from space_router.engine.errors import EngineError, WorkerFailed
from space_router.engine.request.request import SamplingOptions, Stream, ValidRequest
from space_router.engine.request.request_state import RequestState
from space_router.engine.workers.crash_quarantine import MAX_HOLD, SUSPECT_WAIT, TRIAL_GROWTH
from space_router.engine.workers.supervisor import ExitCause, RemoteWorker

STEP = 0.02  # seconds
SCRIPT = Script(block_size=16, num_blocks=512, window=2048, eos_ids=(), max_sequences=16)


def elsewhere() -> ExitCause:
    """What the router knows of the end of a worker that it has not started."""
    return asyncio.run(RemoteWorker("gpu1:50051").find_exit_cause())


class Reader:
    """One request on the table, what it has got, and when."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.tokens: list[int] = []
        self.longest_pause = 0.0
        self.error: EngineError | None = None
        self.is_deaf = False
        self._last: float | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) == self.stream.request.max_tokens

    def read(self, now: float) -> None:
        self.error = self.stream.error
        while self.stream.num_ready and not self.is_deaf:
            self.tokens += self.stream.read().tokens
            if self._last is not None:
                self.longest_pause = max(self.longest_pause, now - self._last)
            self._last = now


class Table:
    """Workers and readers, turned step by step."""

    def __init__(self, num_workers: int, requests: Iterable[ValidRequest]) -> None:
        self.top = Tabletop(lambda: ScriptedTableWorker(SCRIPT), num_workers=num_workers)
        self.connections = self.top.connections
        self.readers = [Reader(self.top.engine.submit(request)) for request in requests]

    def turn(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.top.tick(STEP)
            for reader in self.readers:
                reader.read(self.top.now)

    def until_all_have(self, num_tokens: int) -> None:
        while any(len(reader.tokens) < num_tokens for reader in self.readers):
            self.turn()

    def finish(self) -> None:
        for _ in range(3000):
            self.turn()
            if all(reader.is_whole or reader.error for reader in self.readers):
                return
        raise AssertionError(f"not over: {[len(reader.tokens) for reader in self.readers]}")

    def lives_at(self, number: int) -> list[RequestState]:
        """Who runs at a seat."""
        scheduler = self.connections[number].scheduler
        return [] if scheduler is None else [sequence.live for sequence in scheduler.running]

    def names_at(self, number: int) -> set[str]:
        return {live.request.request_id for live in self.lives_at(number)}

    def readers_of(self, names: set[str]) -> list[Reader]:
        return [reader for reader in self.readers if reader.stream.request.request_id in names]


def some(number: int, max_tokens: int = 200) -> list[ValidRequest]:
    return [
        request_of((10 + i, 11, 12), max_tokens, name=str(i), sampling=SamplingOptions(seed=i)) for i in range(number)
    ]


def test_streams_of_a_worker_elsewhere_go_on_at_once_though_it_stays_away() -> None:
    requests = some(12)
    table = Table(3, requests)
    table.until_all_have(TRIAL_GROWTH)
    assert len(table.names_at(0)) == 4
    table.connections[0].die(elsewhere())
    table.finish()
    assert [tuple(reader.tokens) for reader in table.readers] == [answer(request, SCRIPT) for request in requests]
    assert max(reader.longest_pause for reader in table.readers) <= 5 * STEP


def test_those_that_had_just_begun_there_are_tried_alone_and_at_once() -> None:
    table = Table(3, some(12))
    table.until_all_have(1)
    table.connections[0].die(elsewhere())
    num_trials = 0
    while any(len(reader.tokens) < TRIAL_GROWTH for reader in table.readers):
        table.turn()
        for lives in map(table.lives_at, range(3)):
            num_trials += any(live.is_suspect for live in lives)
            assert len(lives) <= 1 or not any(live.is_suspect for live in lives)
    assert num_trials
    table.finish()
    assert max(reader.longest_pause for reader in table.readers) < 0.5


@pytest.mark.parametrize("at_token", [0, 5, 100], ids=["its first", "an early", "a late"])
def test_a_request_that_kills_in_the_same_step_everywhere_is_refused_and_the_others_end_whole(at_token: int) -> None:
    requests = some(12)
    table, num_deaths = Table(3, requests), 0
    deadly, others = table.readers[0], table.readers[1:]
    for _ in range(3000):
        for number, connection in enumerate(table.connections):
            if "0" in table.names_at(number) and len(deadly.tokens) >= at_token:
                connection.die(elsewhere())
                num_deaths += 1
            elif connection.scheduler is None and num_deaths % 2 == 0:  # one is back before the next is away
                connection.start()
        table.turn()
        if deadly.error and all(reader.is_whole for reader in others):
            break
    assert isinstance(deadly.error, WorkerFailed)
    assert num_deaths == (3 if at_token >= TRIAL_GROWTH else 2)
    assert [tuple(reader.tokens) for reader in others] == [answer(request, SCRIPT) for request in requests[1:]]


@pytest.mark.parametrize("period", [40, 300], ids=["soon", "seldom"])
def test_a_request_that_kills_again_and_again_after_a_while_is_found_in_the_end(period: int) -> None:
    table = Table(3, [request_of((99, 12, 13), 1900, name="deadly"), *some(4, 40)])
    deadly, num_deaths = table.readers[0], 0
    for _ in range(5000):
        for number, connection in enumerate(table.connections):
            if connection.scheduler is None:
                connection.start()
            elif any(
                live.request.request_id == "deadly" and connection.scheduler.num_given(live) >= period
                for live in table.lives_at(number)
            ):
                connection.die(elsewhere())
                num_deaths += 1
        table.turn()
        if deadly.error:
            break
    assert isinstance(deadly.error, WorkerFailed)
    assert num_deaths <= 5


@pytest.mark.parametrize("cause", [ExitCause.CRASHED, elsewhere()], ids=["by itself", "elsewhere"])
def test_suspects_do_not_wait_for_the_missing_worker_where_another_serves_beside_their_trial(cause: ExitCause) -> None:
    table = Table(3, some(12))
    table.until_all_have(4)
    table.connections[0].die(cause)
    table.finish()
    assert max(reader.longest_pause for reader in table.readers) < 0.05 * SUSPECT_WAIT


def test_the_only_worker_that_is_left_is_not_emptied_for_trials_before_the_missing_one_has_had_its_time() -> None:
    table = Table(2, some(8, 1000))
    table.until_all_have(4)
    suspects, others = table.readers_of(table.names_at(0)), table.readers_of(table.names_at(1))
    assert suspects
    table.connections[0].die(ExitCause.CRASHED)
    table.turn(int(1.0 / STEP))
    assert max(reader.longest_pause for reader in others) <= 2 * STEP
    table.connections[0].start()
    table.turn(int(1.0 / STEP))
    assert all(1.0 < reader.longest_pause < 2.0 for reader in suspects), "tried on the one that came back"
    assert max(reader.longest_pause for reader in others) <= 2 * STEP


def test_who_is_in_the_way_of_many_trials_goes_on_elsewhere() -> None:
    table = Table(3, some(24, 1000))
    table.until_all_have(4)
    suspects = table.lives_at(0)
    for live in suspects:
        live.num_suspicions = 2  # so that each is tried for many tokens
    names = [table.names_at(number) for number in range(3)]
    table.connections[0].die(ExitCause.CRASHED)
    (emptied,) = [number for number in (1, 2) if not names[number] & table.names_at(number)]
    in_the_way = table.readers_of(names[emptied])
    table.turn(int((MAX_HOLD + 0.5) / STEP))
    assert any(live.is_suspect for live in suspects), "trials are still going on"
    assert all(MAX_HOLD <= reader.longest_pause < MAX_HOLD + 0.3 for reader in in_the_way)
    table.finish()


@pytest.mark.parametrize("others_are_suspects", [True, False])
def test_a_suspect_whose_reader_does_not_read_keeps_nobody_from_the_worker(others_are_suspects: bool) -> None:
    requests = some(3, 400)
    table = Table(1, requests if others_are_suspects else requests[:1])
    table.until_all_have(4)
    for live in table.lives_at(0):
        live.num_suspicions = 2  # so that each is tried for many tokens
    deaf = table.readers[0]
    deaf.is_deaf = True
    table.connections[0].die(ExitCause.CRASHED)
    table.connections[0].start()
    table.turn(int(SUSPECT_WAIT / STEP))
    if not others_are_suspects:
        assert table.names_at(0) == {"0"}, "nobody else wants the worker"
        table.readers += [Reader(table.top.engine.submit(request)) for request in requests[1:]]
    for _ in range(3000):
        table.turn()
        if all(reader.is_whole for reader in table.readers[1:]):
            break
    assert [reader.is_whole for reader in table.readers] == [False, True, True]
    deaf.is_deaf = False
    table.finish()
    assert [tuple(reader.tokens) for reader in table.readers] == [answer(request, SCRIPT) for request in requests]
