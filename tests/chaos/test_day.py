"""The schedule and the report of a day of chaos, the machine's faults alone, and two minutes of all together."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from itertools import islice
from pathlib import Path

import pytest
from doubles.tcp import tcp_connection, tcp_server
from processes import ProcessFigures
from space_common.http_client import Endpoint, HttpError

from chaos import day_load, harness
from chaos.__main__ import main
from chaos.day import DayRecord, final_status, held_gauges, report
from chaos.day_load import MixedLoad, visits
from chaos.footprint import ROUTER, WORKER, Footprint, FootprintWatch
from chaos.machine_faults import FaultyMachine, NetworkLink, built_library
from chaos.schedule import EventKind, events

FACTS = {"id": "m", "dtype": "float32", "device_type": "cpu", "machine": "here", "commit": "c"}


def test_a_schedule_is_that_of_its_seed_and_has_each_kind_once_a_cycle() -> None:
    drawn = list(islice(events(7, 60.0), 3 * len(EventKind)))
    assert drawn == list(islice(events(7, 60.0), 3 * len(EventKind)))
    assert drawn != list(islice(events(8, 60.0), 3 * len(EventKind)))
    for number in range(3):
        cycle = [event for event in drawn if 60 * number <= event.at < 60 * (number + 1)]
        assert Counter(event.kind for event in cycle) == Counter(EventKind)
    assert [event.at for event in drawn] == sorted(event.at for event in drawn)


def test_the_load_has_every_kind_of_request_with_and_without_drafts() -> None:
    made = visits(24, 96)
    kinds = {"stream", "whole answer", "chat stream", "chat", "JSON schema", "stored response"}
    assert {visit.kind for visit in made} == kinds
    assert len({str(visit) for visit in made}) == 24
    assert {"off", "auto"} < {visit.body.get("speculation") for visit in made}
    assert {visit.streams for visit in made if visit.kind == "JSON schema"} == {True, False}
    assert all(visit.body["temperature"] == 0 or "seed" in visit.body for visit in made)


@pytest.mark.parametrize("broken", ["", "kind", "wrong", "lost", "memory", "files", "unwatched"])
def test_a_day_passes_only_where_everything_happened_and_nothing_was_lost(broken: str) -> None:
    record, load = DayRecord(), MixedLoad(Endpoint("127.0.0.1", 1), [], 1)
    record.happened = Counter(kind for kind in EventKind if not (broken == "kind" and kind is EventKind.CLOCK))
    record.statuses["flood"][429] = 3
    load.counts.num_answered["chat"] = 5
    if broken == "wrong":
        record.wrong.append("2 pages leaked.")
    if broken == "lost":
        load.counts.wrong.append("chat: lost")
    found = [Footprint("router, process 1", ROUTER, ProcessFigures(1000, 10))]
    found += [Footprint("worker 0, process 2", WORKER, ProcessFigures(1000, 10))] * (broken != "unwatched")
    found[-1].add(ProcessFigures(1000 + 2 * WORKER.growth_bytes * (broken == "memory"), 10 + 17 * (broken == "files")))
    made = report(FACTS, record, load, 120.0, found[: 1 if broken == "unwatched" else 2], seed=3)
    assert len(made.failures) == (2 if broken == "memory" else broken != ""), "too much at last is too much at most"
    assert "| clock jump | " in made.markdown()
    assert "| flood | 3 × 429 |" in made.markdown()
    assert made.record["events"]["worker killed"] == 1
    json.dumps(made.record)


def test_both_loads_read_a_stream_to_its_done_and_refuse_one_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(text: str, finish: str | None = None) -> bytes:
        return json.dumps({"choices": [{"text": text, "token_ids": [7], "finish_reason": finish}]}).encode()

    whole = [[event("a"), event("b")], [b'{"choices": []}'], [event("c", "stop"), b"[DONE]"]]
    endpoint, body = Endpoint("127.0.0.1", 1), {"stream": True}

    def served(batches: list[list[bytes]]) -> None:
        async def stream(*_: object) -> AsyncGenerator[list[bytes]]:
            for batch in batches:
                yield batch

        monkeypatch.setattr(harness, "stream_events", stream)

    def answered(leave_after: int | None = None) -> day_load.Answer:
        answer = day_load.Answer()
        asyncio.run(day_load.ask(endpoint, day_load.Visit("stream", harness.PATH, body), answer, leave_after))
        return answer

    served(whole)
    alone = asyncio.run(harness.ask(endpoint, body))
    assert (alone.token_ids, alone.text, alone.finish) == ((7, 7, 7), "abc", "stop")
    assert answered() == day_load.Answer("abc", "stop")
    assert answered(leave_after=2) == day_load.Answer("ab", None)
    for batches, reason in (
        (whole[:2], r"without \[DONE\]"),
        ([[event("a"), b'{"error": {"message": "no"}}']], "with an error"),
    ):
        served(batches)
        with pytest.raises(HttpError, match=reason):
            asyncio.run(harness.ask(endpoint, body))
        with pytest.raises(HttpError, match=reason):
            answered()


def test_a_process_is_held_to_its_figures_after_the_warm_up_and_its_successor_to_its_own() -> None:
    mib = 1 << 20
    watch = FootprintWatch(warm_seconds=60.0)

    def look(now: float, pid: int, memory: int, files: int = 20, peak: int = 0) -> None:
        watch.look("worker 0", pid, WORKER, now, ProcessFigures(memory * mib, files, 1, peak * mib))

    for now, memory, peak in ((0.0, 5, 5), (59.0, 900, 2000), (60.0, 1000, 2000), (61.0, 1100, 2000)):
        look(now, 7, memory, peak=peak)
    (first,) = watch.footprints
    assert first.failures == [], "the peak of the start is none of the run's"
    look(62.0, 7, 1000, files=53)
    look(63.0, 7, 1257, peak=2001)
    look(64.0, 7, 0, files=0)  # it is gone
    assert first.row == (
        "worker 0, process 7", "1000 MiB, 20 files", "2001 MiB, 53 files", "1257 MiB, 20 files",
    )  # fmt: skip
    assert [line.split("; ")[0] for line in first.failures] == [
        "worker 0, process 7 had 1257 MiB at last, 1000 after its warm-up",
        "worker 0, process 7 had 2001 MiB at most, 1000 after its warm-up",
        "worker 0, process 7 had 53 open files at most, 20 after its warm-up",
    ]
    look(65.0, 8, 3000)
    assert watch.footprints == [first]
    look(125.0, 8, 3000, files=30)
    look(126.0, 8, 3000, files=47)
    assert [one.failures[:1] for one in watch.footprints[1:]] == [
        ["worker 0, process 8 had 47 open files at last, 30 after its warm-up; it may have 16 more."]
    ]


def test_gauges_of_an_idle_server_that_are_not_zero_are_named() -> None:
    idle = 'spaceserve_requests{state="running"} 0.0\nspaceserve_kv_blocks{state="held"} 0.0\n'
    assert held_gauges(idle + 'spaceserve_kv_blocks{state="free"} 7.0\n') == []
    assert held_gauges(idle + 'spaceserve_requests{state="queued"} 1.0\n') == [
        'spaceserve_requests{state="queued"} 1.0'
    ]


def test_the_status_is_that_after_interim_answers() -> None:
    assert final_status(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 400 Bad Request\r\na: b\r\n\r\n{}") == 400
    assert final_status(b"HTTP/1.1 503 x\r\n\r\n") == 503
    assert final_status(b"HTTP/1.1 102 Processing\r\n\r\n") == final_status(b"") == 0


PROBE = """
import os, sys, time
for line in sys.stdin:
    try:
        descriptor = os.open(line.strip(), os.O_WRONLY | os.O_CREAT)
        begun = time.monotonic()
        os.write(descriptor, b"a")
        outcome = "slow" if time.monotonic() - begun > 0.05 else "written"
    except OSError as error:
        outcome = error.strerror
    print(round(time.time()), outcome, flush=True)
"""


def test_a_preloaded_clock_jumps_and_a_disk_is_full_or_slow_in_one_folder_only(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    machine = FaultyMachine(built_library(tmp_path), tmp_path / "state", tmp_path / "files")
    words = [sys.executable, "-S", "-c", PROBE]
    environment = {**os.environ, **machine.environment}
    with subprocess.Popen(words, env=environment, stdin=-1, stdout=-1, text=True) as process:

        def ask(file: str) -> tuple[int, str]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{tmp_path / file}\n")
            process.stdin.flush()
            now, outcome = process.stdout.readline().split(maxsplit=1)
            return int(now), outcome.strip()

        now, outcome = ask("files/a")
        assert outcome == "written"
        machine.set_clock(-86400.5)
        assert -5 < ask("files/a")[0] + 86400 - now < 60
        machine.set_disk(is_full=True)
        assert (ask("files/a")[1], ask("b")[1]) == ("No space left on device", "written")
        machine.set_disk(write_seconds=0.06)
        assert ask("files/a")[1] == "slow"
        machine.set_disk()
        assert ask("files/a")[1] == "written"


def test_a_link_holds_what_it_is_sent_and_breaks_what_it_carries() -> None:
    async def run() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while piece := await reader.read(100):
                writer.write(piece)
            writer.close()

        async with tcp_server(echo) as target, NetworkLink(target) as link:
            async with tcp_connection(link.address) as (reader, writer):
                writer.write(b"one")
                assert await reader.readexactly(3) == b"one"
                link.hold()
                writer.write(b"two")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.readexactly(3), 0.05)
                link.mend()
                assert await reader.readexactly(3) == b"two"
                link.drop()
                assert await _is_closed(reader)
            async with tcp_connection(link.address) as (other, _):
                assert await _is_closed(other)

    asyncio.run(run())


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_minutes_of_everything_lose_and_change_nothing(tmp_path: Path) -> None:
    assert main(["day", "--hours", "0.034", "--cycle", "120", "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "day.json").read_text())
    assert made["passed"]
    assert min(made["events"].values()) >= 1
