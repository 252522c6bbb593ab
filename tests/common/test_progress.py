"""Progress lines of downloads."""

import time

import pytest
from space_common import hub


def test_no_time_is_estimated_before_the_first_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PROGRESS_SECONDS", 0.01)
    lines: list[str] = []
    received = 0
    with hub.download_progress("model", 4_000_000, lambda: received, lines.append):
        wait_for_lines(lines, 2)
        received = 1_000_000
        wait_for_lines(lines, len(lines) + 2)
    assert lines[1].startswith("downloading model: 0 B of 4.0 MB (0%), nothing received for ")
    assert lines[-2].startswith("downloading model: 1.0 MB of 4.0 MB (25%), ")
    assert lines[-2].endswith(" s left")


def wait_for_lines(lines: list[str], number: int) -> None:
    deadline = time.monotonic() + 30
    while len(lines) < number:
        assert time.monotonic() < deadline
        time.sleep(0.005)
