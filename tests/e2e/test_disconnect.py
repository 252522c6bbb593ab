"""Somebody who goes away gives back what he held. (In the queue: see test_worker_loss.)"""

from contextlib import closing
from typing import Any

import pytest


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_gives_its_blocks_back(live: Any, stream: bool) -> None:
    cancelled = live.wait_idle()["spaceserve_requests_total{outcome=cancelled}"]
    body = {"prompt": "x = ", "stream": stream, "temperature": 0, "ignore_eos": True, "max_tokens": 400}
    with closing(live.connect(body)) as connection:
        now = live.wait_for(lambda now: now["spaceserve_requests{state=running}"] == 1, "it runs")
        assert now["spaceserve_kv_blocks{state=held}"] > 0
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    now = live.wait_idle()
    assert now["spaceserve_requests_total{outcome=cancelled}"] == cancelled + 1
