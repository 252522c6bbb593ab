"""`spaceserve workers` and SIGUSR1, at a router with two workers that somebody else keeps alive."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles.tokenizers import write_checkpoint

pytestmark = pytest.mark.e2e
SECONDS = 60.0
KEEPER = "while :; do python -m doubles.router --listen {address} --tokenizer {tokenizer} --step-seconds .01; done"


class Front:
    """A router, and workers that are started again whenever they end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, ""
        self.key_file = folder / "keys"
        self.lines: list[str] = []
        self._news = threading.Condition()

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            model = self.folder / "tiny"
            model.mkdir()
            write_checkpoint(model)
            self.key_file.write_text("sk-ops name=ops operator=yes\n")
            addresses = [f"unix:{self.folder}/{number}.sock" for number in range(2)]
            for address in addresses:
                loop = KEEPER.format(address=address, tokenizer=model / "tokenizer.json")
                loop = loop.replace("python", sys.executable)
                keeper = stack.enter_context(
                    subprocess.Popen(["sh", "-c", loop], start_new_session=True, stdout=subprocess.DEVNULL)
                )
                stack.callback(_end_group, keeper)
            flags = ["--model", str(model), "--port", "0", "--worker-address", ",".join(addresses)]
            command = [sys.executable, "-m", "space_router", "router", *flags, "--api-key-file", str(self.key_file)]
            self.process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(self.process.kill)
            reader = threading.Thread(target=self._read, daemon=True)
            reader.start()
            self.url = self.wait_for("listening on ").split()[3]
            self.wait_for("ready: ")
            yield

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def wait_for(self, words: str) -> str:
        def found() -> str | None:
            return next((line for line in self.lines if words in line), None)

        with self._news:
            line = self._news.wait_for(found, SECONDS)
        assert line is not None, self.lines
        return line

    def get(self) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.url}/workers", headers={"authorization": "Bearer sk-ops"}).json()
        return told

    def workers(self, *words: str) -> subprocess.CompletedProcess[str]:
        flags = ["--url", self.url, "--api-key-file", str(self.key_file), *words]
        command = [sys.executable, "-m", "space_router.cli", "workers", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)

    def stream(self) -> list[int]:
        body = {"prompt": "x", "max_tokens": 200, "seed": 3, "stream": True, "return_token_ids": True}
        ids: list[int] = []
        headers = {"authorization": "Bearer sk-ops"}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers, timeout=SECONDS) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return ids


def _end_group(keeper: subprocess.Popen[bytes]) -> None:
    subprocess.run(["kill", "-KILL", "--", f"-{keeper.pid}"], check=False)
    keeper.wait()


def test_streams_outlive_two_restarts_of_every_worker(tmp_path: Path) -> None:
    front = Front(tmp_path)
    with front.running():
        alone = front.stream()
        assert len(alone) == 200
        told: list[list[int]] = []
        readers = [threading.Thread(target=lambda: told.append(front.stream())) for _ in range(6)]
        for reader in readers:
            reader.start()
        done = front.workers("restart", "--finish-seconds", "0")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 of 2 workers restarted"), done.stderr
        front.process.send_signal(signal.SIGUSR1)
        front.wait_for("restarting 2 workers, one after the other")
        for reader in readers:
            reader.join(SECONDS)
        assert told == [alone] * 6
        while (seen := front.get())["restart"]["state"] == "running":
            pass
        assert seen["restart"]["state"] == "done"
        assert [worker["num_incarnations"] for worker in seen["workers"]] == [3, 3]
        shown = front.workers().stdout.splitlines()
        assert len(shown) == 3
        assert "up" in shown[1]
        refused = front.workers("restart", "--only", "9")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "There is no worker 9; there are 0, 1" in refused.stderr
