"""One of two workers elsewhere is killed while all streams have just begun."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles.tokenizers import write_checkpoint

pytestmark = pytest.mark.e2e
NUM_STREAMS = 6
SECONDS = 60.0
Spawn = Callable[..., AbstractContextManager[Any]]


class Reader(threading.Thread):
    """Reads one stream; `times` are those at which its lines came, in seconds."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.last_line = ""
        self._url, self._seed = url, seed

    def run(self) -> None:
        body = {"prompt": f"x{self._seed}", "max_tokens": 60, "seed": self._seed, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    self.times.append(time.monotonic())
                    self.last_line = line

    @property
    def longest_pause(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


def test_streams_of_the_killed_one_go_on_at_once_beside_those_of_the_other(tmp_path: Path, spawn: Spawn) -> None:
    write_checkpoint(tmp_path)
    with ExitStack() as stack:
        flags = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--step-seconds", ".1", "--accepts", "never"]
        addresses = [f"unix:{tmp_path}/{number}.sock" for number in range(2)]
        workers = [stack.enter_context(spawn("doubles.router", "--listen", one, *flags)) for one in addresses]
        front = ["router", "--model", str(tmp_path), "--port", "0", "--worker-address", ",".join(addresses)]
        router = stack.enter_context(spawn("space_router", *front))
        url = router.wait_for(r"listening on (\S+)")[1]
        router.wait_for("ready: ")
        deadline = time.monotonic() + SECONDS
        while {one["state"] for one in httpx.get(f"{url}/workers").json()["workers"]} != {"up"}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        readers = [Reader(url, seed) for seed in range(NUM_STREAMS)]
        for reader in readers:
            reader.start()
        while not all(reader.times for reader in readers):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        counts = [one["num_running"] for one in httpx.get(f"{url}/workers").json()["workers"]]
        assert min(counts) > 0, "both have streams"
        workers[0].process.send_signal(signal.SIGKILL)
        for reader in readers:
            reader.join(SECONDS)
        assert [reader.last_line for reader in readers] == ["data: [DONE]"] * NUM_STREAMS
        assert max(reader.longest_pause for reader in readers) < 4.0, "and not the 10 s that suspects wait"
