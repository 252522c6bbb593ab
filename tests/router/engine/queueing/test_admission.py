"""Which worker a request goes to, what fits none that is there, and what cannot be done in time."""

from __future__ import annotations

import pytest
from doubles.router import Script, ScriptedBatch, ScriptedWorker
from doubles.router.house import request_of
from doubles.router.scenario import ScriptedTableWorker
from doubles.router.tabletop import Tabletop
from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.errors import RequestFailed
from space_router.engine.queueing.admission import (
    HALF_LIFE,
    MAX_ABSENCE,
    MIN_STEPS,
    RECENT,
    QueueAdmission,
    ThroughputEstimator,
)
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request import Stream, ValidRequest
from space_router.engine.request.request_state import RequestState
from space_router.engine.workers.supervisor import ExitCause

SIZE = 16


class TableWorker:
    """A scripted batch, stepped by the table."""

    def __init__(self, script: Script) -> None:
        self.batch, self._hello = ScriptedBatch(script), ScriptedWorker(script).hello()

    def hello(self) -> worker_pb2.Hello:
        return self._hello

    def apply(self, command: worker_pb2.Command) -> None:
        self.batch.apply(command)

    def step(self) -> worker_pb2.StepReport | None:
        return self.batch.step() if self.batch.has_work or self.batch.has_news else None


class Table:
    """Three workers, 64 ids of prompt per step each."""

    def __init__(self, *, max_sequences: int = 64) -> None:
        script = Script(block_size=SIZE, num_blocks=512, window=2048, eos_ids=(), max_sequences=max_sequences)
        config = ServeConfig(max_prefill_rows=64)
        self._table = Tabletop(lambda: TableWorker(script), num_workers=3, config=config)
        self.streams: list[Stream] = []

    def submit(self, request: ValidRequest) -> None:
        self.streams.append(self._table.engine.submit(request))

    def turn(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self._table.tick()
            for stream in self.streams:
                while stream.num_ready:
                    stream.read()

    @property
    def num_running(self) -> list[int]:
        schedulers = [connection.scheduler for connection in self._table.connections]
        return [0 if scheduler is None else scheduler.num_running for scheduler in schedulers]

    def finish(self) -> None:
        self.turn(3000)
        assert self.num_running == [0, 0, 0]
        self._table.engine.check()


def prompt(first: int, length: int) -> tuple[int, ...]:
    """No two prompts with other `first` ids share a block."""
    return (4 + first, *range(10, 10 + length - 1))


def test_requests_that_share_nothing_are_spread_evenly() -> None:
    table = Table()
    for number in range(9):
        table.submit(request_of(prompt(number, 20), 50, name=str(number)))
    assert table.num_running == [3, 3, 3]
    table.finish()


def test_a_request_goes_where_its_prefix_is_known() -> None:
    table = Table()
    histories = [prompt(number, 150) for number in range(3)]
    for number, history in enumerate(histories):
        table.submit(request_of(history, 5, name=str(number)))
    table.finish()
    for _ in range(4):  # the next turns of each chat, whoever is least busy
        for number, history in enumerate(histories):
            table.submit(request_of((*history, 5, 6, 7), 5, name=f"again {number}"))
    table.turn(1)
    assert [stream.statistics.num_cached for stream in table.streams[3:]] == [144] * 12
    assert table.num_running == [4, 4, 4]
    table.finish()


def test_a_prefix_that_all_have_does_not_fill_one_worker_while_others_idle() -> None:
    table = Table()
    hot = prompt(0, 65)
    table.submit(request_of(hot, 5, name="first"))
    table.finish()
    for number in range(30):
        table.submit(request_of((*hot, 20 + number), 60, name=str(number)))
    table.turn(8)  # whoever waits for a prefix that is being computed has come by then
    assert sum(table.num_running) == 30
    assert max(table.num_running) - min(table.num_running) <= 3
    table.finish()


def test_a_long_history_outweighs_neighbours_and_a_short_one_does_not() -> None:
    for length, expected in ((321, [0, 0, 9]), (33, [3, 3, 3])):
        table = Table()
        history = prompt(0, length)
        table.submit(request_of(history, 5, name="first"))
        table.finish()
        for number in range(9):
            table.submit(request_of((*history, 20 + number), 100, name=str(number)))
        table.turn(8)
        assert sorted(table.num_running) == expected
        table.finish()


def test_a_prompt_that_waits_to_be_computed_counts_as_load() -> None:
    table = Table()
    table.submit(request_of(prompt(0, 600), 5, name="long"))
    busy = table.num_running.index(1)
    table.submit(request_of(prompt(1, 20), 5, name="a"))
    table.submit(request_of(prompt(2, 20), 5, name="b"))
    table.submit(request_of(prompt(3, 20), 5, name="c"))
    assert table.num_running[busy] == 1  # 64 ids of the long prompt wait there: as much as two neighbours
    table.finish()


def test_requests_fill_what_room_there_is_on_any_worker() -> None:
    table = Table(max_sequences=2)
    for number in range(8):
        table.submit(request_of(prompt(number, 20), 20, name=str(number)))
    assert table.num_running == [2, 2, 2]
    table.finish()
    assert [stream.statistics.num_generated for stream in table.streams] == [20] * 8


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


def prompt_step(num_rows: int, seconds: float) -> worker_pb2.StepReport:
    """With one sequence that decodes beside the prompt."""
    stats = worker_pb2.StepStats(prefill_rows=num_rows, chain_rows=1, forward_seconds=seconds)
    return worker_pb2.StepReport(stepped=True, stats=stats)


def decode_step(num_tokens: int, seconds: float) -> worker_pb2.StepReport:
    stats = worker_pb2.StepStats(chain_rows=num_tokens, forward_seconds=seconds)
    return worker_pb2.StepReport(stepped=True, stats=stats)


def is_hopeless(pace: ThroughputEstimator, request: ValidRequest, now: float) -> bool:
    """As the first in the queue hears it."""
    live = RequestState(request, request.max_tokens or 1, 0, now)
    return QueueAdmission(RequestQueue(9), pace).unmeetable_deadline(live, live.num_prompt, now) is not None


def test_what_small_prompts_take_says_little_of_a_long_one() -> None:
    pace = ThroughputEstimator(512)
    for _ in range(50):
        pace.learn(prompt_step(9, 0.015), [1], 0.0)
    assert not is_hopeless(pace, request_of(32_000, 9, deadline=20.0), 0.0)
    for _ in range(RECENT):
        pace.learn(prompt_step(511, 0.9), [1], 0.0)
    assert is_hopeless(pace, request_of(32_000, 9, deadline=20.0), 0.0)


def test_a_step_counts_by_the_ids_that_it_computed() -> None:
    pace = ThroughputEstimator(512)
    for _ in range(50):
        pace.learn(prompt_step(9, 0.015), [1], 0.0)
        pace.learn(prompt_step(499, 0.095), [1], 0.0)
    assert 0.0001 < pace.seconds(1, 0) < 0.0003


def test_a_decode_step_that_gives_nobody_a_token_teaches_nothing() -> None:
    pace = ThroughputEstimator(512)
    pace.learn(decode_step(1, 0.01), [0], 0.0)  # the one that ran failed
    assert pace.seconds(0, 1) == 0
    pace.learn(decode_step(2, 0.01), [0, 2], 0.0)
    assert pace.seconds(0, 2) == pytest.approx(0.01)


def test_a_step_that_took_a_thousand_times_too_long_refuses_nobody() -> None:
    pace = ThroughputEstimator(512)
    pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert not is_hopeless(pace, request_of(9, 200, deadline=20.0), 0.0)
    for _ in range(MIN_STEPS):
        pace.learn(decode_step(1, 0.01), [1], 0.0)
    pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert not is_hopeless(pace, request_of(9, 200, deadline=20.0), 0.0)
    assert is_hopeless(pace, request_of(9, 200, deadline=0.9), 0.0)


def test_without_a_step_of_its_kind_what_was_slow_is_not_so_for_ever() -> None:
    pace, asked = ThroughputEstimator(512), request_of(9, 200, deadline=20.0)
    for _ in range(MIN_STEPS):
        pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert is_hopeless(pace, asked, 1.0)
    for second in range(1, 300):
        pace.learn(prompt_step(9, 0.015), [1], float(second))
    assert not is_hopeless(pace, asked, 10 * HALF_LIFE)
