"""`spaceserve workers`: what a restart prints, and how Ctrl-C ends it."""

from collections.abc import Iterator
from typing import Any

import pytest
from space_router.commands.workers_command import restart


class Watched:
    """A server with the events of one restart; `then`: what happens behind them."""

    def __init__(self, *events: dict[str, Any], then: BaseException | None = None) -> None:
        self.events, self.then = events, then
        self.is_closed = False

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert (path, body) == ("/workers/restart", {"workers": [0, 1], "stream": True})
        try:
            yield from ({"restart": progress} for progress in self.events)
            if self.then is not None:
                raise self.then
        finally:
            self.is_closed = True


def progress(state: str, num_done: int = 0, waits_for: str | None = None, error: str | None = None) -> dict[str, Any]:
    counts = {"state": state, "num_done": num_done, "num_wanted": 2, "waits_for": waits_for, "error": error}
    return counts | {"left_out": ["worker 2 has not been up yet"]}


def test_a_restart_prints_each_thing_it_waits_for_once(capsys: pytest.CaptureFixture[str]) -> None:
    events = [progress("running", 0, "worker 0 to be up"), progress("running", 0, "worker 0 to be up")]
    server: Any = Watched(*events, progress("running", 1), progress("done", 2))
    assert restart(server, [0, 1], None) == 0
    assert capsys.readouterr().out.splitlines() == [
        "left out: worker 2 has not been up yet",
        "waiting for worker 0 to be up",
        "1 of 2 workers restarted",
        "2 of 2 workers restarted",
    ]


def test_ctrl_c_closes_the_connection_which_ends_the_restart(capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = Watched(progress("running", 0, "worker 1 to be up"), then=KeyboardInterrupt())
    assert restart(server, [0, 1], None) == 130
    assert server.is_closed
    assert "the restart is ended" in capsys.readouterr().err


def test_a_restart_that_failed_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = Watched(progress("failed", 1, error="worker 1 was not up within 9 s"))
    assert restart(server, [0, 1], None) == 1
    assert "worker 1 was not up within 9 s" in capsys.readouterr().err
