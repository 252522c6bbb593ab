"""A real Ray cluster on this machine: scale 1 -> 3 -> 1 under load, kill a worker and a replica, compare every text.

    python tests/e2e/ray_trial.py [pending]      needs `pip install 'spaceserve[ray]'`; two to four minutes on two cores

The model is the embedded one, each worker a process. Every text is held to the one that plain decoding gave before the
load began. Exit code 0: no stream was lost and no text differs.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from space_common.process import say
from space_router.ray_cluster.app import app

PROMPTS = [
    "def fibonacci(n):", "class Stack:", "import os\n", "for i in range(", "The quick brown", "SELECT * FROM", "x = [",
    "# A",
]  # fmt: skip
MAX_TOKENS = 96
NUM_CLIENTS = 12
WAIT_SECONDS = 180.0


class Server:
    """The application behind Serve's proxy."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def stream(self, number: int, **fields: Any) -> tuple[str, int]:
        """The text of one prompt, and the events it came in. Raises where the stream does not end as it should."""
        body = {
            "prompt": PROMPTS[number], "max_tokens": MAX_TOKENS, "seed": number, "temperature": number % 2,
            "stream": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body | fields), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(f"status {answer.status}: {answer.read()[:300]!r}")
            text, num_events = "", 0
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return text, num_events
                event = json.loads(line[6:])
                if "error" in event:
                    raise ConnectionError(str(event))
                text += "".join(choice["text"] for choice in event["choices"])
                num_events += 1
            raise ConnectionError("the stream ended without [DONE]")
        finally:
            connection.close()

    def workers(self) -> list[str]:
        _, reported = self.get("/workers")
        return [one["address"] for one in reported["workers"] if one["state"] == "up"]


class Load:
    """Clients that ask again and again, as long as they are wanted."""

    def __init__(self, server: Server, expected: list[str]) -> None:
        self.num_wanted = 0
        self.num_streams = self.num_different = self.num_whole = 0
        self.lost: list[str] = []
        self._server, self._expected = server, expected
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(NUM_CLIENTS)]
        self._over = False
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over = True
        for thread in self._threads:
            thread.join(WAIT_SECONDS)

    def _client(self, index: int) -> None:
        turn = index
        while not self._over:
            if index >= self.num_wanted:
                time.sleep(0.1)
                continue
            number, turn = turn % len(PROMPTS), turn + 1
            try:
                text, num_events = self._server.stream(number)
            except Exception as error:  # each is a lost stream
                with self._lock:
                    self.num_streams += 1
                    self.lost.append(f"{type(error).__name__}: {error}")
                continue
            with self._lock:
                self.num_streams += 1
                self.num_different += text != self._expected[number]
                self.num_whole += num_events == 1


def processes(address: str) -> tuple[int, int]:
    """Of the worker there, and of the replica that keeps it."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "space_server" in words and address in words:
            return int(folder.name), int(words[words.index("--parent-pid") + 1])
    raise LookupError(f"there is no process of a worker at {address}")


def wait(what: str, holds: Callable[[], bool]) -> None:
    """Until it holds, and say how long that took. Time in which this process was stopped does not count."""
    waited, before = 0.0, time.monotonic()
    while not holds():
        time.sleep(0.2)
        now = time.monotonic()
        waited, before = waited + min(1.0, now - before), now
        if waited > WAIT_SECONDS:
            raise TimeoutError(f"{what}: not within {WAIT_SECONDS:g} s")
    say(f"{what}: after {waited:.1f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    server = Server(free_port())
    serve.start(http_options={"host": "127.0.0.1", "port": server.port})
    arguments = {
        "model": "demo", "min_workers": 1, "max_workers": 3, "gpus_per_worker": 0, "requests_per_worker": 4,
        "upscale_delay": 1, "downscale_delay": 5, "calibration_seconds": 0, "drain_timeout": 2,
    }  # fmt: skip
    begun = time.monotonic()
    serve.run(app(arguments), name="spaceserve", route_prefix="/")
    say(f"deployed: after {time.monotonic() - begun:.1f} s")
    wait("ready", lambda: server.get("/health")[0] == 200)
    expected = [server.stream(number, speculation="off")[0] for number in range(len(PROMPTS))]
    if not all(expected):
        raise ValueError("plain decoding gave an empty text, which compares with nothing")
    load = Load(server, expected)
    load.num_wanted = NUM_CLIENTS
    wait("1 -> 3 workers under load", lambda: len(server.workers()) == 3)
    time.sleep(5)

    victim = server.workers()[0]
    os.kill(processes(victim)[0], signal.SIGKILL)
    wait("a worker process killed: gone", lambda: victim not in server.workers())
    wait("a worker process killed: back at the same address", lambda: victim in server.workers())
    time.sleep(5)

    before = server.workers()
    os.kill(processes(before[1])[1], signal.SIGKILL)
    wait("a replica killed: gone", lambda: before[1] not in server.workers())
    wait("a replica killed: another in its place", lambda: len(server.workers()) == 3)
    time.sleep(5)

    load.num_wanted = 2
    wait("3 -> 1 workers under load", lambda: len(server.workers()) == 1)
    time.sleep(5)
    load.stop()
    say(
        f"{load.num_streams} streams of {MAX_TOKENS} tokens at most: {len(load.lost)} lost, {load.num_different} "
        f"different, {load.num_whole} that came as one event"
    )
    for line in load.lost[:5]:
        say(f"  lost: {line}")
    return 1 if load.lost or load.num_different else 0


def router_process() -> int:
    """Of the router's replica, 0: there is none. Ray names its processes by what they run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ServeReplica:spaceserve:Router" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    return 0


def answers(server: Server) -> bool:
    try:
        return server.get("/health")[0] == 200
    except (OSError, http.client.HTTPException, ValueError):
        return False


def num_starting() -> int:
    """Replicas of workers that are not placed yet."""
    states = serve.status().applications["spaceserve"].deployments["Worker"].replica_states
    return sum(number for state, number in states.items() if str(getattr(state, "value", state)) == "STARTING")


def pending() -> int:
    """On two processors two workers are placed; the router is killed while a third one waits for a processor."""
    server = Server(free_port())
    serve.start(http_options={"host": "127.0.0.1", "port": server.port})
    arguments = {
        "model": "demo", "min_workers": 2, "max_workers": 3, "gpus_per_worker": 0, "requests_per_worker": 2,
        "upscale_delay": 0, "downscale_delay": 600, "calibration_seconds": 0, "drain_timeout": 2,
    }  # fmt: skip
    serve.run(app(arguments), name="spaceserve", route_prefix="/")
    wait("ready", lambda: answers(server))
    wait("two workers on two processors", lambda: len(server.workers()) == 2)
    expected = [server.stream(number, speculation="off")[0] for number in range(len(PROMPTS))]
    load = Load(server, expected)
    load.num_wanted = NUM_CLIENTS
    wait("a third worker is pending", lambda: num_starting() == 1)
    killed = router_process()
    os.kill(killed, signal.SIGKILL)
    wait("router killed: another in its place", lambda: router_process() not in (0, killed))
    wait("router killed: both workers are back", lambda: answers(server) and len(server.workers()) == 2)
    load.stop()
    texts = [server.stream(number)[0] for number in range(len(PROMPTS))]
    num_different = load.num_different + sum(text != wanted for text, wanted in zip(texts, expected, strict=True))
    say(f"{len(texts)} streams of the new router, {load.num_streams} before: {num_different} different")
    return 1 if num_different else 0


if __name__ == "__main__":
    ray.init(
        num_cpus=2 if "pending" in sys.argv else 8,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver="--log" in sys.argv,
    )
    try:
        code = pending() if "pending" in sys.argv else main()
    finally:
        serve.shutdown()
        ray.shutdown()
    sys.exit(code)
