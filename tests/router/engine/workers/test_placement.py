"""Workers keep off the last processor where they are asked to."""

import os

import pytest
from space_router.config import ServeConfig
from space_router.engine.workers.worker_command import for_workers, processors, worker_command


@pytest.mark.parametrize(
    ("placement", "allowed", "cores"),
    [
        ("apart", {0, 1}, "0"),
        ("apart", {3, 0, 7, 5}, "0,3,5"),
        ("apart", {2}, None),
        ("auto", {0, 1}, "auto"),
        ("auto", {1}, None),
        ("shared", {0, 1, 2}, None),
    ],
)
def test_the_last_processor_is_left_to_the_router(placement: str, allowed: set[int], cores: str | None) -> None:
    assert for_workers(placement, allowed) == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to processors")
def test_the_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert processors() == {0, 1, 2, 3}
    command = worker_command(ServeConfig(placement="apart", workers=2), "h:1")
    assert command[command.index("--cores") + 1] == "0,1,2"
    assert command[command.index("--num-workers") + 1] == "2"
    command = worker_command(ServeConfig(), "h:1")
    assert command[command.index("--cores") + 1] == "auto"
    assert "--cores" not in worker_command(ServeConfig(placement="shared"), "h:1")
    assert "--num-workers" not in worker_command(ServeConfig(), "h:1")
