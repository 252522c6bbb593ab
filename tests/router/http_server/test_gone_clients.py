"""The log's lines about clients that go away."""

import logging

import pytest
from space_router.http_server.gone_clients import INTERVAL, MOST_LINES, GoneClients


def test_a_flood_of_them_is_a_few_lines_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    clients = GoneClients(lambda: now)
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            clients.log(f"request {number}: 499")
        assert caplog.messages == [f"request {number}: 499" for number in range(MOST_LINES)]
        caplog.clear()
        now = INTERVAL + 1
        clients.log("request %s: 499")
        count, line = caplog.messages
        assert count.startswith(f"{1000 - MOST_LINES} more clients went away in the {INTERVAL + 1:.0f} s")
        assert line == "request %s: 499"


def test_few_of_them_are_all_logged_without_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    clients = GoneClients(lambda: now)
    with caplog.at_level(logging.INFO):
        for minute in range(5):
            now = minute * INTERVAL
            for _ in range(MOST_LINES):
                clients.log("gone")
    assert caplog.messages == ["gone"] * (5 * MOST_LINES)
