"""OpenMP's threads sleep soon, unless the user says how they wait."""

from __future__ import annotations

import pytest
from space_server.machine.cores import sleep_soon


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, {"GOMP_SPINCOUNT": "20000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_sleep_soon_unless_the_environment_says_otherwise(said: dict[str, str], wanted: dict[str, str]) -> None:
    environment = dict(said)
    sleep_soon(environment)
    assert environment == wanted
