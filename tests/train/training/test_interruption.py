"""A run is told to stop: once, behind its update; twice, at once; and what it says of what is left is true."""

import signal
from pathlib import Path

import pytest
import torch
from space_train.run_folder import STATE_FILE
from space_train.training.trainer import interruptions, stopped_at_once


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_acknowledged_at_once_and_a_second_one_raises(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before, seconds = signal.getsignal(signal.SIGINT), [10.0, 10.5, 12.0]
    with interruptions(says=True, clock=lambda: seconds.pop(0)) as told:
        assert told == []
        signal.raise_signal(number)
        assert told == [number]
        assert "ends behind this update; once more to stop at once" in capfd.readouterr().err
        signal.raise_signal(number)  # the same one, which a launcher passed on
        assert told == [number]
        assert capfd.readouterr().err == ""
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGINT) is before


def test_of_several_processes_one_acknowledges(capfd: pytest.CaptureFixture[str]) -> None:
    with interruptions(says=False) as told:
        signal.raise_signal(signal.SIGINT)
        assert told == [signal.SIGINT]
    assert capfd.readouterr().err == ""


def test_what_is_kept_is_what_the_state_holds(tmp_path: Path) -> None:
    assert stopped_at_once(tmp_path) == "Stopped before an update was saved."
    torch.save({"counters": {"step": 7}, "trained": {"w": torch.zeros(3)}}, tmp_path / STATE_FILE)
    assert stopped_at_once(tmp_path) == (
        f"Stopped. {tmp_path} keeps the run up to update 7: the same command, without --restart, goes on from there."
    )
