"""Workers that somebody else keeps alive: `spaceserve workers` and SIGUSR1, and one that comes back elsewhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles.tokenizers import write_checkpoint

pytestmark = pytest.mark.e2e
SECONDS = 60.0
Spawn = Callable[..., AbstractContextManager[Any]]
KEEPER = "while :; do {python} -m doubles.router --listen {address} --tokenizer {tokenizer} --step-seconds .01; done"


@dataclass
class Front:
    """A router, and workers that are started again whenever they end."""

    router: Any
    url: str
    key_file: Path

    def get(self) -> dict[str, Any]:
        reported: dict[str, Any] = httpx.get(f"{self.url}/workers", headers={"authorization": "Bearer sk-ops"}).json()
        return reported

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


@pytest.fixture
def front(tmp_path: Path, spawn: Spawn) -> Iterator[Front]:
    model, key_file = tmp_path / "tiny", tmp_path / "keys"
    model.mkdir()
    write_checkpoint(model)
    key_file.write_text("sk-ops name=ops operator=yes\n")
    addresses = [f"unix:{tmp_path}/{number}.sock" for number in range(2)]
    with ExitStack() as stack:
        for address in addresses:
            loop = KEEPER.format(python=sys.executable, address=address, tokenizer=model / "tokenizer.json")
            command = ["sh", "-c", loop]
            keeper = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
            stack.enter_context(keeper)
            stack.callback(os.killpg, keeper.pid, signal.SIGKILL)
        flags = ["--model", str(model), "--port", "0", "--worker-address", ",".join(addresses)]
        router = stack.enter_context(spawn("space_router", "router", *flags, "--api-key-file", str(key_file)))
        url = router.wait_for(r"listening on (\S+)")[1]
        router.wait_for("ready: ")
        yield Front(router, url, key_file)


def test_streams_outlive_two_restarts_of_every_worker(front: Front) -> None:
    alone = front.stream()
    assert len(alone) == 200
    reported: list[list[int]] = []
    readers = [threading.Thread(target=lambda: reported.append(front.stream())) for _ in range(6)]
    for reader in readers:
        reader.start()
    done = front.workers("restart", "--finish-seconds", "0")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["2 of 2 workers restarted"]), done.stderr
    front.router.process.send_signal(signal.SIGUSR1)
    front.router.wait_for("restarting 2 workers, one after the other")
    for reader in readers:
        reader.join(SECONDS)
    assert reported == [alone] * 6
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


SCRIPT = """
import asyncio, sys
from pathlib import Path
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.metrics import Metrics
from doubles.router import Script, ScriptedWorker

def name(address):
    Path(sys.argv[1]).write_text(f"127.0.0.1 localhost\\n{address} worker.test\\n")

async def main():
    script = Script(eos_ids=(), step_seconds=0.01, num_blocks=256)
    request = ValidRequest("r", tuple(range(10, 16)), SamplingOptions(seed=0), max_tokens=200)
    async with ScriptedWorker(script, listen="127.0.0.2:0") as first:
        port = first.address.rpartition(":")[2]
        name("127.0.0.2")
        async with Engine(ServeConfig(worker_address=(f"worker.test:{port}",)), Metrics()) as engine:
            await engine.wait_ready()
            tokens = []
            async with ScriptedWorker(script, listen=f"127.0.0.3:{port}") as second, engine.submit(request) as stream:
                async for delta in stream:
                    if not tokens:
                        name("127.0.0.3")
                        await first.__aexit__(None, None, None)
                    tokens += delta.tokens
                assert second.figures.num_admits == 1, second.figures
                assert len(tokens) == 200
                print("found", engine.connections[0].num_incarnations)

asyncio.run(asyncio.wait_for(main(), 50))
"""


def may_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount, for an /etc/hosts of its own")
def test_a_name_is_resolved_anew_for_each_connection(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("")
    own = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", own, "sh", str(hosts), sys.executable, SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["found", "2"]), done.stderr
