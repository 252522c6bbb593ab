"""Among several workers a request goes where its prefix is known, unless too many are there already."""

from __future__ import annotations

from doubles.router import Script, ScriptedBatch, ScriptedWorker
from doubles.router.house import request_of
from doubles.router.tabletop import Tabletop
from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.request.request import ValidRequest
from space_router.engine.request.stream import Stream

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
