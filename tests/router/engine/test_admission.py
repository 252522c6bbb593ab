"""Which worker a request goes to, what fits none that is there, what cannot be done in time, and suspects of crashes.

On a table: a step takes 0.02 s on its clock, whatever the machine does meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest
from doubles.router import Script
from doubles.router.scripted_worker import ScriptedBatch
from doubles.router.tabletop import Tabletop, answer, request_of
from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.errors import EngineError, RequestFailed, WorkerFailed
from space_router.engine.queueing import admission
from space_router.engine.queueing.admission import MAX_ABSENCE, QueueAdmission, ThroughputEstimator
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request import SamplingOptions, Stream, ValidRequest
from space_router.engine.request.request_state import RequestState
from space_router.engine.workers.crash_quarantine import MAX_HOLD, SUSPECT_WAIT, TRIAL_GROWTH
from space_router.engine.workers.supervisor import ExitCause, RemoteWorker

STEP = 0.02  # seconds
SCRIPT = Script(block_size=16, num_blocks=512, window=2048, eos_ids=(), max_sequences=16)
SMALL, LARGE = replace(SCRIPT, num_blocks=8), replace(SCRIPT, num_blocks=64)


def elsewhere() -> ExitCause:
    """What the router knows of the end of a worker that it has not started."""
    return asyncio.run(RemoteWorker("gpu1:50051").find_exit_cause())


class Reader:
    """One request on the table, what it has got, and when."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.tokens: list[int] = []
        self.longest_pause = 0.0
        self.is_deaf = False
        self._last: float | None = None

    @property
    def error(self) -> EngineError | None:
        return self.stream.error

    @property
    def is_whole(self) -> bool:
        return len(self.tokens) == self.stream.request.max_tokens

    def read(self, now: float) -> None:
        while self.stream.num_ready and not self.is_deaf:
            self.tokens += self.stream.read().tokens
            if self._last is not None:
                self.longest_pause = max(self.longest_pause, now - self._last)
            self._last = now


class Table:
    """Workers with these scripts and readers that read at once, turned step by step."""

    def __init__(self, *scripts: Script, requests: Iterable[ValidRequest] = (), max_prefill_rows: int = 512) -> None:
        self._scripts = list(scripts)  # of the workers that are started next, in turn
        config = ServeConfig(max_prefill_rows=max_prefill_rows)
        self.top = Tabletop(self._new_worker, num_workers=len(scripts), config=config)
        self.connections = self.top.connections
        self.readers: list[Reader] = []
        for request in requests:
            self.submit(request)

    def _new_worker(self) -> ScriptedBatch:
        return ScriptedBatch(self._scripts.pop(0))

    def start(self, number: int, script: Script = SCRIPT) -> None:
        self._scripts.append(script)
        self.connections[number].start()

    def submit(self, request: ValidRequest) -> Reader:
        self.readers.append(Reader(self.top.engine.submit(request)))
        return self.readers[-1]

    def turn(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.top.tick(STEP)
            for reader in self.readers:
                reader.read(self.top.now)
        self.top.engine.check()

    def until_all_have(self, num_tokens: int, readers: Iterable[Reader] | None = None) -> None:
        for _ in range(3000):
            if all(len(reader.tokens) >= num_tokens for reader in readers or self.readers):
                return
            self.turn()
        raise AssertionError(f"{[(len(reader.tokens), reader.error) for reader in self.readers]}")

    def finish(self) -> None:
        for _ in range(3000):
            if all(reader.is_whole or reader.error for reader in self.readers):
                break
            self.turn()
        else:
            raise AssertionError(f"not over: {[len(reader.tokens) for reader in self.readers]}")
        self.turn(9)
        assert not any(self.num_running)

    @property
    def num_running(self) -> list[int]:
        return [len(self.lives_at(number)) for number in range(len(self.connections))]

    def lives_at(self, number: int) -> list[RequestState]:
        """Who runs at a worker."""
        scheduler = self.connections[number].scheduler
        return [] if scheduler is None else [sequence.live for sequence in scheduler.running]

    def names_at(self, number: int) -> set[str]:
        return {live.request.request_id for live in self.lives_at(number)}

    def readers_of(self, names: set[str]) -> list[Reader]:
        return [reader for reader in self.readers if reader.stream.request.request_id in names]


# Which worker


def three_workers(*, max_sequences: int = 64) -> Table:
    """Each takes 64 ids of prompt per step."""
    return Table(*[replace(SCRIPT, max_sequences=max_sequences)] * 3, max_prefill_rows=64)


def prompt(first: int, length: int) -> tuple[int, ...]:
    """No two prompts with other `first` ids share a block."""
    return (4 + first, *range(10, 10 + length - 1))


def test_requests_that_share_nothing_are_spread_evenly() -> None:
    table = three_workers()
    for number in range(9):
        table.submit(request_of(prompt(number, 20), 50, name=str(number)))
    assert table.num_running == [3, 3, 3]
    table.finish()


def test_a_request_goes_where_its_prefix_is_known() -> None:
    table = three_workers()
    histories = [prompt(number, 150) for number in range(3)]
    for number, history in enumerate(histories):
        table.submit(request_of(history, 5, name=str(number)))
    table.finish()
    for _ in range(4):  # the next turns of each chat, whoever is least busy
        for number, history in enumerate(histories):
            table.submit(request_of((*history, 5, 6, 7), 5, name=f"again {number}"))
    table.turn(1)
    assert [reader.stream.statistics.num_cached for reader in table.readers[3:]] == [144] * 12
    assert table.num_running == [4, 4, 4]
    table.finish()


def test_a_prefix_that_all_have_does_not_fill_one_worker_while_others_idle() -> None:
    table = three_workers()
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
        table = three_workers()
        history = prompt(0, length)
        table.submit(request_of(history, 5, name="first"))
        table.finish()
        for number in range(9):
            table.submit(request_of((*history, 20 + number), 100, name=str(number)))
        table.turn(8)
        assert sorted(table.num_running) == expected
        table.finish()


def test_a_prompt_that_waits_to_be_computed_counts_as_load() -> None:
    table = three_workers()
    table.submit(request_of(prompt(0, 600), 5, name="long"))
    busy = table.num_running.index(1)
    table.submit(request_of(prompt(1, 20), 5, name="a"))
    table.submit(request_of(prompt(2, 20), 5, name="b"))
    table.submit(request_of(prompt(3, 20), 5, name="c"))
    assert table.num_running[busy] == 1  # 64 ids of the long prompt wait there: as much as two neighbours
    table.finish()


def test_requests_fill_what_room_there_is_on_any_worker() -> None:
    table = three_workers(max_sequences=2)
    for number in range(8):
        table.submit(request_of(prompt(number, 20), 20, name=str(number)))
    assert table.num_running == [2, 2, 2]
    table.finish()
    assert [reader.stream.statistics.num_generated for reader in table.readers] == [20] * 8


# Workers of different sizes: 8 or 64 blocks of 16 slots


def test_who_fits_only_a_worker_that_is_away_lets_others_go_first_and_runs_when_it_is_back() -> None:
    table = Table(SMALL, LARGE)
    table.connections[1].die(ExitCause.EXTERNAL)
    large, small = table.submit(request_of(6, 500)), table.submit(request_of(7, 20))
    table.until_all_have(20, [small])
    assert not large.tokens
    table.start(1, LARGE)
    table.until_all_have(500, [large])


def test_a_small_worker_that_comes_back_last_refuses_nothing_that_the_large_one_can_take() -> None:
    table = Table(LARGE, SMALL)
    table.connections[1].die(ExitCause.EXTERNAL)
    table.start(1, SMALL)
    table.submit(request_of(6, 500))
    table.until_all_have(500)


def test_who_fits_no_worker_is_refused_once_none_is_missing() -> None:
    table = Table(SMALL, LARGE)
    table.connections[1].die(ExitCause.EXTERNAL)
    large = table.submit(request_of(6, 500))
    table.turn()
    assert large.error is None
    table.start(1, SMALL)
    assert isinstance(large.error, RequestFailed)


def test_nobody_waits_for_ever_for_a_worker_that_does_not_come() -> None:
    table = Table(SMALL, LARGE)
    table.connections[1].die(ExitCause.EXTERNAL)
    large = table.submit(request_of(6, 500))
    table.turn()
    table.top.tick(0.9 * MAX_ABSENCE)
    assert large.error is None
    table.top.tick(0.1 * MAX_ABSENCE)
    assert isinstance(large.error, RequestFailed)


def test_who_fits_only_a_worker_that_ends_lets_others_go_first() -> None:
    table = Table(SMALL, LARGE)
    scheduler = table.connections[1].scheduler
    assert scheduler is not None
    scheduler.closing = True
    large, small = table.submit(request_of(6, 500)), table.submit(request_of(7, 20))
    table.until_all_have(20, [small])
    table.top.tick(1.1 * MAX_ABSENCE)
    assert large.error is None, "it may run elsewhere once that one has ended"
    table.connections[1].die(ExitCause.EXTERNAL)
    table.start(1, LARGE)
    table.until_all_have(500, [large])


def test_a_suspect_empties_no_worker_that_it_does_not_fit() -> None:
    table = Table(SMALL, SMALL, LARGE)
    large = table.submit(request_of(6, 500))
    others = [table.submit(request_of(7 + i, 100)) for i in range(2)]
    table.turn(2)
    assert table.num_running == [1, 1, 1]
    table.connections[2].die(ExitCause.CRASHED)
    while not all(reader.is_whole for reader in others):
        before = [len(reader.tokens) for reader in others]
        table.turn()
        after = [len(reader.tokens) for reader in others]
        assert all(new > old or new == 100 for old, new in zip(before, after, strict=True))
    assert len(large.tokens) < 500
    table.start(2, LARGE)
    table.until_all_have(500, [large])


@pytest.mark.parametrize("comes_back", [SMALL, LARGE], ids=["8", "64"])
def test_of_two_suspects_the_one_that_fits_is_tried_and_the_other_waits(comes_back: Script) -> None:
    table = Table(SMALL, LARGE)
    large = table.submit(request_of(6, 500))
    table.turn()
    small = table.submit(request_of(7, 20))
    table.turn(2)
    for number in (0, 1):
        table.connections[number].die(ExitCause.CRASHED)
    table.start(0, SMALL)
    table.until_all_have(20, [small])
    assert not large.error
    table.start(1, comes_back)
    if comes_back == LARGE:
        table.until_all_have(500, [large])
    else:
        table.turn()
        assert isinstance(large.error, RequestFailed)


# What cannot be done in time


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
    for _ in range(admission.RECENT):
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
    for _ in range(admission.MIN_STEPS):
        pace.learn(decode_step(1, 0.01), [1], 0.0)
    pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert not is_hopeless(pace, request_of(9, 200, deadline=20.0), 0.0)
    assert is_hopeless(pace, request_of(9, 200, deadline=0.9), 0.0)


def test_without_a_step_of_its_kind_what_was_slow_is_not_so_for_ever() -> None:
    pace, asked = ThroughputEstimator(512), request_of(9, 200, deadline=20.0)
    for _ in range(admission.MIN_STEPS):
        pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert is_hopeless(pace, asked, 1.0)
    for second in range(1, 300):
        pace.learn(prompt_step(9, 0.015), [1], float(second))
    assert not is_hopeless(pace, asked, 10 * admission.HALF_LIFE)


# Suspects of crashes: how long streams are silent, and how many workers a request can kill


def some(number: int, max_tokens: int = 200) -> list[ValidRequest]:
    return [
        request_of((10 + i, 11, 12), max_tokens, name=str(i), sampling=SamplingOptions(seed=i)) for i in range(number)
    ]


def test_streams_of_a_worker_elsewhere_go_on_at_once_though_it_stays_away() -> None:
    requests = some(12)
    table = Table(*[SCRIPT] * 3, requests=requests)
    table.until_all_have(TRIAL_GROWTH)
    assert len(table.names_at(0)) == 4
    table.connections[0].die(elsewhere())
    table.finish()
    assert [tuple(reader.tokens) for reader in table.readers] == [answer(request, SCRIPT) for request in requests]
    assert max(reader.longest_pause for reader in table.readers) <= 5 * STEP


@pytest.mark.parametrize("num_workers", [3, 2])
@pytest.mark.parametrize("num_tokens", [0, 1, TRIAL_GROWTH - 1])
def test_those_that_had_just_begun_there_go_on_at_once_too(num_workers: int, num_tokens: int) -> None:
    requests = some(12)
    table = Table(*[SCRIPT] * num_workers, requests=requests)
    table.until_all_have(num_tokens)
    table.connections[0].die(elsewhere())
    table.finish()
    assert [tuple(reader.tokens) for reader in table.readers] == [answer(request, SCRIPT) for request in requests]
    assert max(reader.longest_pause for reader in table.readers) <= 5 * STEP


def test_only_those_that_were_on_two_lost_workers_are_run_alone() -> None:
    table = Table(*[SCRIPT] * 3, requests=some(12))
    table.until_all_have(1)
    first = table.names_at(0)
    table.connections[0].die(elsewhere())
    table.turn()
    second = next(number for number in (1, 2) if first & table.names_at(number))
    on_both, others = first & table.names_at(second), table.names_at(second) - first
    assert others
    table.start(0)
    table.connections[second].die(elsewhere())
    tried: set[str] = set()
    for _ in range(3000):
        for lives in map(table.lives_at, range(3)):
            if any(live.is_suspect for live in lives):
                assert len(lives) == 1
                tried |= {live.request.request_id for live in lives}
        if all(reader.is_whole for reader in table.readers):
            break
        table.turn()
    assert tried == on_both
    table.finish()
    assert max(reader.longest_pause for reader in table.readers_of(others)) <= 5 * STEP


@pytest.mark.parametrize("at_token", [0, 5, 100], ids=["its first", "an early", "a late"])
def test_a_request_that_kills_in_the_same_step_everywhere_is_refused_and_the_others_end_whole(at_token: int) -> None:
    requests = some(12)
    table, num_deaths = Table(*[SCRIPT] * 3, requests=requests), 0
    deadly, others = table.readers[0], table.readers[1:]
    for _ in range(3000):
        for number, connection in enumerate(table.connections):
            if "0" in table.names_at(number) and len(deadly.tokens) >= at_token:
                connection.die(elsewhere())
                num_deaths += 1
            elif connection.scheduler is None and num_deaths % 2 == 0:  # one is back before the next is away
                table.start(number)
        table.turn()
        if deadly.error and all(reader.is_whole for reader in others):
            break
    assert isinstance(deadly.error, WorkerFailed)
    assert num_deaths == 3
    assert [tuple(reader.tokens) for reader in others] == [answer(request, SCRIPT) for request in requests[1:]]


@pytest.mark.parametrize("period", [40, 300], ids=["soon", "seldom"])
def test_a_request_that_kills_again_and_again_after_a_while_is_found_in_the_end(period: int) -> None:
    table = Table(*[SCRIPT] * 3, requests=[request_of((99, 12, 13), 1900, name="deadly"), *some(4, 40)])
    deadly, num_deaths = table.readers[0], 0
    for _ in range(5000):
        for number, connection in enumerate(table.connections):
            if connection.scheduler is None:
                table.start(number)
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
    table = Table(*[SCRIPT] * 3, requests=some(12))
    table.until_all_have(4)
    table.connections[0].die(cause)
    table.finish()
    assert max(reader.longest_pause for reader in table.readers) < 0.05 * SUSPECT_WAIT


def test_the_only_worker_that_is_left_is_not_emptied_for_trials_before_the_missing_one_has_had_its_time() -> None:
    table = Table(*[SCRIPT] * 2, requests=some(8, 1000))
    table.until_all_have(4)
    suspects, others = table.readers_of(table.names_at(0)), table.readers_of(table.names_at(1))
    assert suspects
    table.connections[0].die(ExitCause.CRASHED)
    table.turn(int(1.0 / STEP))
    assert max(reader.longest_pause for reader in others) <= 2 * STEP
    table.start(0)
    table.turn(int(1.0 / STEP))
    assert all(1.0 < reader.longest_pause < 2.0 for reader in suspects), "tried on the one that came back"
    assert max(reader.longest_pause for reader in others) <= 2 * STEP


def test_who_is_in_the_way_of_many_trials_goes_on_elsewhere() -> None:
    table = Table(*[SCRIPT] * 3, requests=some(24, 1000))
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
    table = Table(*[SCRIPT] * 1, requests=requests if others_are_suspects else requests[:1])
    table.until_all_have(4)
    for live in table.lives_at(0):
        live.num_suspicions = 2  # so that each is tried for many tokens
    deaf = table.readers[0]
    deaf.is_deaf = True
    table.connections[0].die(ExitCause.CRASHED)
    table.start(0)
    table.turn(int(SUSPECT_WAIT / STEP))
    if not others_are_suspects:
        assert table.names_at(0) == {"0"}, "nobody else wants the worker"
        for request in requests[1:]:
            table.submit(request)
    for _ in range(3000):
        table.turn()
        if all(reader.is_whole for reader in table.readers[1:]):
            break
    assert [reader.is_whole for reader in table.readers] == [False, True, True]
    deaf.is_deaf = False
    table.finish()
    assert [tuple(reader.tokens) for reader in table.readers] == [answer(request, SCRIPT) for request in requests]
