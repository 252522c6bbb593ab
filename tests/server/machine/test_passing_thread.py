"""What is done in a passing thread is done when it returns, and leaves no thread behind."""

import threading

import pytest
import torch
from space_server.machine.threads import run_in_thread


def test_it_returns_what_the_work_returns_and_is_gone() -> None:
    before = set(threading.enumerate())
    names = []

    def work() -> int:
        names.append(threading.current_thread().name)
        return int(torch.ones(3).sum())

    assert run_in_thread(work) == 3
    assert names == ["passing"]
    assert set(threading.enumerate()) <= before


def test_it_raises_what_the_work_raises() -> None:
    def work() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run_in_thread(work)
