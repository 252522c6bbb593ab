"""Servers that benchmarks start end with them."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import free_port
from space_common.module_process import children

BENCHMARK = """
import sys, time
from space_eval.bench.server_process import ServerProcess, exit_on_sigterm

class Sleeper(ServerProcess):
    def start(self):
        self._command = [sys.executable, "-c", "import time; time.sleep(600)"]
        super().start()

exit_on_sigterm()
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


HURRIED = """
import os, signal, subprocess, sys
from space_eval.bench import server_process

class Popen(subprocess.Popen):
    def __init__(self, command, **settings):
        super().__init__([sys.executable, "-c", "import time; time.sleep(600)"], **settings)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

server_process.exit_on_sigterm()
server_process.subprocess.Popen = Popen
with server_process.ServerProcess([], wait_ready=False) as server:
    print("not to be reached", flush=True)
"""


def test_a_benchmark_that_is_told_to_end_while_it_starts_a_server_leaves_none_behind() -> None:
    done = subprocess.run([sys.executable, "-c", HURRIED], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    (server,) = done.stdout.split()
    assert not psutil.pid_exists(int(server))


@pytest.mark.parametrize("program", [["space_eval.bench"], ["chaos", "crowd"]], ids=" ".join)
def test_programs_unwind_when_they_are_told_to_end(program: list[str]) -> None:
    started = subprocess.Popen([sys.executable, "-m", *program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with started:
        end = time.monotonic() + 60
        while not (servers := children(started.pid)):
            assert started.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 128 + signal.SIGTERM
    assert not any(map(psutil.pid_exists, servers))


def test_two_who_ask_for_a_port_before_either_takes_it_get_two() -> None:
    assert free_port() != free_port()
