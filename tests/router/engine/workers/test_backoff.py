"""Waits grow, and shrink when something worked."""

from __future__ import annotations

import pytest
from space_router.engine.workers.supervisor import Backoff


def test_waits_double_from_a_tenth_of_a_second_to_five_and_start_again_after_success() -> None:
    backoff = Backoff()
    assert [backoff.next() for _ in range(9)] == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    backoff.worked()
    assert [backoff.next() for _ in range(2)] == pytest.approx([0, 0.1])
