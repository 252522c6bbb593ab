"""Servers that benchmarks start end with them."""

import signal
import subprocess
import sys

from space_eval.bench_server import children

BENCHMARK = """
import sys, time
from space_eval.bench_server import ServerProcess

class Sleeper(ServerProcess):
    def start(self):
        self._command = [sys.executable, "-c", "import time; time.sleep(600)"]
        super().start()

with Sleeper([], wait_ready=False) as server:
    print(server.pid, flush=True)
    {inside}
"""
INSIDE = ("time.sleep(600)", "import asyncio; asyncio.run(asyncio.sleep(600))")


def test_a_benchmark_that_is_told_to_end_leaves_no_server_behind() -> None:
    for inside in INSIDE:
        benchmark = subprocess.Popen(
            [sys.executable, "-c", BENCHMARK.format(inside=inside)], stdout=subprocess.PIPE, text=True
        )
        with benchmark:
            assert benchmark.stdout is not None
            server = int(benchmark.stdout.readline())
            assert children(benchmark.pid) == [server]
            benchmark.send_signal(signal.SIGTERM)
            assert benchmark.wait(60) == 128 + signal.SIGTERM
        assert subprocess.run(["kill", "-0", str(server)], check=False, capture_output=True).returncode != 0
