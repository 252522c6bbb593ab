"""`perf streams`: what is counted, and that nothing is counted that did not happen."""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import ProcessFigures
from space_proto import worker_pb2

from perf.harness import main
from perf.streams import Emitted, InstantWorker, Load, Point, StreamReader, emitted_at, figures, report


def admit(seq_id: int, *, num_ids: int, num_pages: int, max_tokens: int) -> worker_pb2.Command:
    command = worker_pb2.Command()
    made = command.admit
    made.seq_id, made.num_prompt, made.limits.max_tokens, made.sampling.seed = seq_id, num_ids, max_tokens, 10 * seq_id
    made.ids.extend(range(num_ids))
    made.pages.extend(range(num_pages))
    return command


def test_a_worker_emits_one_token_per_stream_and_step_records_when_and_writes_beyond_no_page(tmp_path: Path) -> None:
    emitted: Emitted = defaultdict(list)
    now = 0.0
    batch = InstantWorker(token=7, on_token=lambda seed: emitted[seed].append(now))

    def step(at: float) -> worker_pb2.StepReport:
        nonlocal now
        now = at
        return batch.step()

    batch.apply(admit(1, num_ids=14, num_pages=1, max_tokens=5))
    batch.apply(admit(2, num_ids=3, num_pages=1, max_tokens=2))
    reports = [step(float(second)) for second in range(4)]
    assert [[part.seq_id for part in report.sequences] for report in reports] == [[1, 2], [1, 2], [1], []]
    assert reports[1].sequences[1].finish == worker_pb2.FINISH_LENGTH
    assert reports[2].sequences[0].num_computed == 16  # of the page's 16 slots: then it waits for more
    assert not batch.has_work
    batch.apply(worker_pb2.Command(extend=worker_pb2.Extend(seq_id=1, pages=[5])))
    assert batch.has_work
    assert [part.num_computed for part in step(4.0).sequences] == [17]
    batch.apply(worker_pb2.Command(release=worker_pb2.Release(seq_id=2)))
    assert list(step(5.0).released) == [2]
    (tmp_path / "0.json").write_text(json.dumps(emitted))
    (tmp_path / "1.json").write_text(json.dumps({"20": [0.5]}))
    assert emitted_at([tmp_path / "0.json", tmp_path / "1.json"]) == {
        10: [0.0, 1.0, 2.0, 4.0, 5.0],
        20: [0.0, 0.5, 1.0],
    }


class Transport:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("size", [1, 7, 30, 1000])
def test_a_reader_counts_every_letter_once_however_the_bytes_are_cut(size: int) -> None:
    answer = (
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"index":0,"text":"a"}]}\n\ndata: {"choices":[{"text":"aaa"}]}\n\n'
    )
    answer += b'data: {"choices":[{"text":""}]}\n\ndata: [DONE]'
    events: list[str] = []
    reader = StreamReader(b"", lambda: events.append("begun"), lambda: events.append("over"))
    reader._transport = Transport()  # type: ignore[assignment]
    for start in range(0, len(answer), size):
        assert not reader.is_whole
        reader.data_received(answer[start : start + size])
    reader.connection_lost(None)
    assert (len(reader.seconds), reader.num_events, reader.is_whole) == (4, 3, True)
    assert reader.num_bytes == len(answer)
    assert events == ["begun", "over"]


def reader_of(seconds: list[float], *, is_whole: bool = True) -> Any:
    num_events = len(seconds)
    return SimpleNamespace(
        seconds=array("d", seconds), num_events=num_events, num_bytes=300 * num_events, is_whole=is_whole
    )


def point(readers: dict[int, Any], emitted: dict[int, list[float]]) -> Point:
    def mark(seconds: float, cpu: float, mib: int) -> Any:
        return SimpleNamespace(seconds=seconds, cpu_seconds=cpu, process=ProcessFigures(mib * 2**20))

    marks = {"before": mark(0.0, 1.0, 50), "begun": mark(10.0, 1.5, 60), "ending": mark(20.0, 3.5, 60)}
    return figures(Load(len(readers), 1.0, 3), emitted, readers, marks, ProcessFigures(55 * 2**20))


def test_figures_are_of_the_time_in_which_all_streams_ran() -> None:
    emitted = {1: [9.0, 12.0, 15.0], 2: [9.0, 13.0, 21.0]}
    found = point({1: reader_of([9.5, 12.001, 15.002]), 2: reader_of([9.5, 13.004, 21.5])}, emitted)
    assert (found.num_lost, found.num_tokens, found.seconds) == (0, 6, 10.0)
    assert found.tokens_per_second == pytest.approx(0.3)
    assert found.added_ms == pytest.approx({"median": 2.0, "p99": 4.0, "most": 4.0})
    assert found.cpu_us_per_token == pytest.approx(2e6 / 3)
    assert found.tokens_per_core_second == pytest.approx(1.5)
    assert found.cpu_ms_per_request == pytest.approx(250.0)
    assert found.resident_kib_per_stream == pytest.approx(5 * 1024)
    assert found.router_mib == [50, 60, 55]
    assert found.bytes_per_event == 300


@pytest.mark.parametrize(
    ("reader", "emitted"),
    [
        (reader_of([11.0, 12.0, 13.0], is_whole=False), [11.0, 12.0, 13.0]),
        (reader_of([11.0, 12.0]), [11.0, 12.0, 13.0]),
        (reader_of([11.0, 12.0, 13.0, 14.0]), [11.0, 12.0, 13.0]),
        (reader_of([]), []),
    ],
)
def test_a_stream_without_its_end_or_with_other_tokens_is_lost(reader: Any, emitted: list[float]) -> None:
    assert point({1: reader}, {1: emitted}).num_lost == 1


def test_where_streams_never_all_ran_there_is_no_figure() -> None:
    found = point({1: reader_of([1.0, 2.0, 3.0])}, {1: [1.0, 2.0, 3.0]})
    assert math.isnan(found.cpu_us_per_token)
    page = report([found], num_workers=1, serve_flags=[]).markdown()
    assert "| 1 | 1 | – | 0 | – | – | – | – | – |" in page
    assert "more --tokens" in page


def run(flags: list[str]) -> int:
    try:
        return main(["streams", *flags])
    except SystemExit as left:
        return int(left.code or 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--streams", "0"], "at least 1"),
        (["--streams", "3000", "--workers", "2"], "need 3 --workers"),
        (["--tokens", "9000"], "fit the workers' window"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(flags) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_hundred_streams_through_one_router_lose_nothing(tmp_path: Path) -> None:
    flags = ["--streams", "1,100", "--workers", "3", "--tokens", "120", "--pace", "10", "--out", str(tmp_path)]
    assert main(["streams", *flags]) == 0
    made = json.loads((tmp_path / "streams.json").read_text())
    assert [(row["num_streams"], row["num_lost"]) for row in made["points"]] == [(1, 0), (100, 0), (100, 0)]
    assert made["points"][1]["num_tokens"] == 12_000
    assert 0 < made["points"][1]["added_ms"]["median"] < 5_000
    assert made["points"][1]["cpu_us_per_token"] > 0
