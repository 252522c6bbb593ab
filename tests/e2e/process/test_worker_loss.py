"""A worker that is killed takes nothing with it."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

KILLS = 2  # a request that sees a third worker die under it is given up


def test_streams_go_on_with_the_same_text_when_their_worker_is_killed(live: Any) -> None:
    batch_params: list[dict[str, Any]] = [
        {"temperature": 0, "speculation": "off"},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 4, "speculation": 2},
    ]
    wanted = [
        {"prompt": f"def f{i}(x):\n    ", "max_tokens": 400, **sampling_params}
        for i, sampling_params in enumerate(batch_params)
    ]
    undisturbed = [live.complete(**one)["choices"][0]["text"] for one in wanted]
    before = live.wait_idle()["spaceserve_worker_restarts_total"]
    # Every stream says when it has had some of its events and waits for the kill, so that each kill meets all of them.
    meeting = threading.Barrier(len(wanted) + 1, timeout=60)

    def read(one: dict[str, Any]) -> str:
        pieces = []
        for number, event in enumerate(live.stream(**one, return_token_ids=True), start=1):
            pieces.append(event["choices"][0]["text"])
            if number in (5, 12):
                meeting.wait()
                meeting.wait()
        return "".join(pieces)

    killed = []
    with ThreadPoolExecutor(len(wanted)) as pool:
        streams = [pool.submit(read, one) for one in wanted]
        for _ in range(KILLS):
            meeting.wait()
            killed.append(live.wait_worker())
            assert live.metrics()["spaceserve_requests{state=running}"] >= 2, "several streams lose it"
            os.kill(killed[-1], signal.SIGKILL)
            restarts = before + len(killed)
            live.wait_for(lambda now, n=restarts: now["spaceserve_worker_restarts_total"] == n, "another worker")
            meeting.wait()
        texts = [stream.result() for stream in streams]
    assert texts == undisturbed
    after = live.wait_idle()
    assert after["spaceserve_worker_restarts_total"] - before == KILLS
    assert live.wait_worker() not in killed
    assert len(set(killed)) == KILLS


def test_a_worker_that_is_told_to_end_finishes_what_runs_and_is_no_loss(live: Any) -> None:
    wanted = {"prompt": "def g(x):\n    ", "max_tokens": 400, "temperature": 0.9, "seed": 5}
    text = live.complete(**wanted)["choices"][0]["text"]
    before = live.wait_idle()["spaceserve_worker_restarts_total"]
    pieces, ended = [], 0
    for event in live.stream(**wanted):
        if not pieces:
            ended = live.wait_worker()
            os.kill(ended, signal.SIGTERM)
        pieces.append(event)
    assert "".join(event["choices"][0]["text"] for event in pieces) == text
    assert live.complete(**wanted)["choices"][0]["text"] == text
    assert live.wait_worker() != ended
    assert live.metrics()["spaceserve_worker_restarts_total"] == before


def test_requests_wait_while_the_worker_is_away_and_may_leave(live: Any) -> None:
    text = live.complete("while True:", seed=1, temperature=1)["choices"][0]["text"]
    live.wait_idle()
    os.kill(live.wait_worker(), signal.SIGKILL)
    live.wait_for(lambda now: now["spaceserve_worker_up"] == 0, "the loss is seen")
    assert live.http.get("/health").status_code == 503
    with closing(live.connect({"prompt": "I shall not wait"})):
        live.wait_for(lambda now: now["spaceserve_requests{state=queued}"] == 1, "it is queued")
    live.wait_for(lambda now: now["spaceserve_requests{state=queued}"] == 0, "it has left the queue")
    assert live.complete("while True:", seed=1, temperature=1)["choices"][0]["text"] == text
    assert live.http.get("/health").status_code == 200
