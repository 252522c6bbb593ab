"""A worker process of one's own: quoted when it fails, and never left behind."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from space_common.process import WorkerNotReady, WorkerProcess


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module that can be run in place of the worker; its name."""

    def written(code: str) -> str:
        (tmp_path / "not_quite_a_worker.py").write_text(code)
        return "not_quite_a_worker"

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return written


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_cannot_start_is_quoted(script: Callable[[str], str]) -> None:
    module = script("import sys; print('loading', file=sys.stderr); sys.exit('error: no weights')")
    process = WorkerProcess(["--model", "x"], module=module)
    with pytest.raises(WorkerNotReady, match=r"ended with code 1. It said last:\n    loading\n    error: no weights"):
        process.__enter__()


def test_a_worker_that_never_gets_ready_is_given_up_and_ended(script: Callable[[str], str]) -> None:
    process = WorkerProcess([], start_timeout=0.3, module=script("import time; time.sleep(600)"))
    with pytest.raises(WorkerNotReady, match=r"within 0\.3 s"):
        process.__enter__()
    assert process.pid == 0


def test_whatever_leaves_the_block_ends_the_process(script: Callable[[str], str]) -> None:
    module = script(
        "import sys, time; print('ready', sys.argv[sys.argv.index('--listen') + 1], flush=True); time.sleep(60)"
    )
    pids: list[int] = []

    def interrupted() -> None:
        with WorkerProcess([], module=module) as process:
            assert process.address.startswith("unix:")
            assert is_alive(process.pid)
            pids.append(process.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_alive(pids[0])


def test_a_worker_that_was_killed_is_said_to_have_been(script: Callable[[str], str]) -> None:
    said = "print('step 9', file=sys.stderr, flush=True)"
    module = script(f"import sys, time; {said}; print('ready x', flush=True); time.sleep(60)")
    with WorkerProcess([], module=module) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.obituary("It is gone") == "It is gone: it was ended by SIGKILL. It said last:\n    step 9"
