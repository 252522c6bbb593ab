"""Nowhere to write: logs on a full disk, caches that cannot be kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from processes import free_port

FULL = Path("/dev/full")
"""Every write fails as on a full disk."""


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
def test_a_server_whose_logs_and_caches_cannot_be_written_serves_drains_and_exits_0(checkpoint: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "space_router", "serve", "--model", str(checkpoint), "--port", str(port)]
    with FULL.open("w") as full:
        server = subprocess.Popen(
            [
                *command,
                "--num-threads",
                "1",
                "--num-blocks",
                "256",
                "--calibration-seconds",
                "0.2",
                "--log-level",
                "debug",
            ],
            stdout=full,
            stderr=full,
            env={**os.environ, "XDG_CACHE_HOME": "/dev/full/none"},
        )
    try:
        limit = time.monotonic() + 120
        while not _is_ready(url):
            assert server.poll() is None, f"it ended with {server.returncode}"
            assert time.monotonic() < limit
            time.sleep(0.05)
        for seed in range(20):
            body = {"prompt": "x = ", "max_tokens": 20, "ignore_eos": True, "seed": seed}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 20
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
