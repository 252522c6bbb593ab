"""A worker that comes back under another address is found by its name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
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
