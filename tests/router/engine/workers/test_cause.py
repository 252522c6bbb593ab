"""Who ended a worker, as the system tells it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from space_router.engine.workers.supervisor import ExitCause, cause_of_end, cause_of_silence, count_oom_kills

SOMEBODY, ITSELF = ExitCause.EXTERNAL, ExitCause.CRASHED


@pytest.mark.parametrize(
    ("code", "num_oom_kills", "cause"),
    [
        (-signal.SIGKILL, (3, 3), SOMEBODY),
        (-signal.SIGKILL, (3, 4), ITSELF),
        (-signal.SIGKILL, (None, None), ITSELF),
        (-signal.SIGTERM, (None, None), SOMEBODY),
        (-signal.SIGSEGV, (3, 3), ITSELF),
        (1, (3, 3), ITSELF),
    ],
)
def test_a_kill_comes_from_somebody_unless_the_kernel_counts_one_for_want_of_memory(
    code: int, num_oom_kills: tuple[int | None, int | None], cause: ExitCause
) -> None:
    assert cause_of_end(code, num_oom_kills=num_oom_kills) is cause


@pytest.mark.parametrize(("state", "cause"), [("T", SOMEBODY), ("t", SOMEBODY), ("R", ITSELF), ("D", ITSELF)])
def test_a_process_that_is_stopped_did_not_stop_itself(tmp_path: Path, state: str, cause: ExitCause) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a (strange) name) {state} 1 7 7 0\n")
    assert cause_of_silence(7, tmp_path) is cause
    assert cause_of_silence(8, tmp_path) is ITSELF


def test_the_kernels_count_is_read_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 12\nswap_ra 0\n")
    assert count_oom_kills(tmp_path / "vmstat") == 12
    (tmp_path / "vmstat").write_text("nr_free_pages 5\n")
    assert count_oom_kills(tmp_path / "vmstat") is None
    assert count_oom_kills(tmp_path / "none") is None
