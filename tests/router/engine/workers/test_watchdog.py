"""How long a worker may be silent."""

from __future__ import annotations

import pytest
from space_router.engine.workers.worker_link import FLOOR, MIN_STEPS, Watchdog


def test_five_seconds_are_forgiven_where_steps_and_start_are_short() -> None:
    watchdog = Watchdog(30.0, start_seconds=2.0)
    watchdog.stepped(0.01)
    assert watchdog.silence == FLOOR == 5.0


def test_patience_grows_with_the_slowest_recent_step_and_with_what_a_start_costs() -> None:
    watchdog = Watchdog(30.0, start_seconds=8.0)
    assert watchdog.silence == 8.0
    watchdog.stepped(0.6)
    assert watchdog.silence == pytest.approx(12.0)
    for _ in range(1000):
        watchdog.stepped(0.01)
    assert watchdog.silence == 8.0


def test_nobody_is_waited_for_longer_than_was_set() -> None:
    watchdog = Watchdog(3.0, start_seconds=600.0)
    watchdog.stepped(60.0)
    assert watchdog.silence == 3.0


def test_a_worker_may_compile_for_long_before_its_steps_are_known() -> None:
    watchdog = Watchdog(30.0)
    for _ in range(MIN_STEPS - 1):
        watchdog.stepped(0.01)
    assert watchdog.stall == 300.0
    watchdog.stepped(0.01)
    assert watchdog.stall == 30.0


def test_slow_steps_are_waited_for_though_no_longer_than_ten_times_what_was_set() -> None:
    watchdog = Watchdog(30.0)
    for seconds in (*[0.01] * MIN_STEPS, 5.0):
        watchdog.stepped(seconds)
    assert watchdog.stall == pytest.approx(100.0)
    watchdog.stepped(500.0)
    assert watchdog.stall == 300.0
