"""`torchrun --nnodes 2` as it is typed on two machines: two agents, in network namespaces here or on loopback."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from chaos.hosts import can_have_namespaces
from processes import free_port
from space_common.worker.client import GrpcWorker, WorkerClient
from space_common.worker.secret import SecretFile
from space_model.loading.load import load_model
from space_server.worker import Worker

PROMPT = [70, 71, 72, 73]
MAX_TOKENS = 20
SECONDS = 240.0
WORKER_PORT, STORE_PORT = 50051, 29500
PAGE = Path(__file__).parents[3] / "docker" / "KUBERNETES.md"


@dataclass
class Machine:
    """Where an agent runs: what goes before its command, its address, and the interface that this is on."""

    prefix: list[str]
    ip: str
    interface: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def machines(namespaces: bool) -> Iterator[list[Machine]]:
    """Two, joined by a cable; each with a name of its own for its end of it."""
    if not namespaces:
        yield [Machine([], "127.0.0.1", "lo") for _ in range(2)]
        return
    number = os.getpid() % 100000
    names = [f"sst{number}n{place}" for place in range(2)]
    found = []
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"st{number}a", "netns", names[0], "type", "veth", "peer", f"st{number}b", "netns", names[1])
        for place, (name, end) in enumerate(zip(names, "ab", strict=True)):
            address = f"10.{200 + number % 50}.7.{place + 1}"
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"st{number}{end}")
            ip("-n", name, "link", "set", f"st{number}{end}", "up")
            ip("-n", name, "link", "set", "lo", "up")
            found.append(Machine(["ip", "netns", "exec", name], address, f"st{number}{end}"))
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def typed() -> list[str]:
    """The page's own command: with `torchrun` of this environment."""
    (line,) = re.findall(r"^(?:\w+=\S+ )*torchrun .*$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return line[line.index("torchrun") :].split()


def agent(machine: Machine, rank: int, first: Machine, store_port: int, worker_port: int, secret: Path) -> list[str]:
    """What is typed on a machine, for two ranks of the embedded model in all."""
    values = {
        "--nproc-per-node": "1", "--node-rank": str(rank), "--master-addr": first.ip,
        "--master-port": str(store_port), "--tensor-parallel": "2", "--model": "demo",
        "--listen": f"{first.ip}:{worker_port}", "--worker-secret-file": str(secret),
    }  # fmt: skip
    words = typed()
    assert values.keys() <= set(words)
    words = [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    small = ["--num-threads", "1", "--num-blocks", "64", "--calibration-seconds", "0", "--rank-timeout", "20"]
    return [*machine.prefix, str(Path(sys.executable).with_name(words[0])), *words[1:], *small]


class Agents:
    """Both agents, and what they said."""

    def __init__(self, namespaces: bool, folder: Path) -> None:
        self._namespaces, self._folder = namespaces, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Agents:
        self._stack = ExitStack()
        self.machines = self._stack.enter_context(machines(self._namespaces))
        store, worker = (STORE_PORT, WORKER_PORT) if self._namespaces else (free_port(), free_port())
        self.secret = self._folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.address = f"{self.machines[0].ip}:{worker}"
        for rank, machine in enumerate(self.machines):
            said = self._stack.enter_context((self._folder / f"{rank}.log").open("wb"))
            self.processes.append(
                subprocess.Popen(
                    agent(machine, rank, self.machines[0], store, worker, self.secret), stdout=said,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"GLOO_SOCKET_IFNAME": machine.interface}, start_new_session=True,
                )
            )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            for pid in (*below(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        self._stack.close()

    def said(self, rank: int) -> str:
        return (self._folder / f"{rank}.log").read_text(errors="replace")

    def ready(self) -> None:
        """Until rank 0 listens; it alone says so."""
        end = time.monotonic() + SECONDS
        while "ready " not in self.said(0):
            assert time.monotonic() < end, self.said(0)
            assert [process.poll() for process in self.processes] == [None, None], self.said(0) + self.said(1)
            time.sleep(0.1)
        assert f"ready {self.address}" in self.said(0)
        assert "ready " not in self.said(1)

    def ranks(self) -> list[int]:
        """Of each agent, the process of its rank."""
        found = [[pid for pid in below(process.pid) if is_worker(pid)] for process in self.processes]
        assert [len(pids) for pids in found] == [1, 1]
        return [pids[0] for pids in found]

    def ended(self) -> list[int]:
        return [process.wait(SECONDS) for process in self.processes]


def below(pid: int) -> list[int]:
    """Every process that this one has started, and theirs."""
    try:
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_worker(pid: int) -> bool:
    words = psutil.Process(pid).cmdline()
    return "space_server" in words and "--nnodes" not in words


def written(address: str, secret: str) -> list[int]:
    """What the worker writes behind the prompt, greedily, with drafts."""
    with GrpcWorker(address, silence=SECONDS, secret=SecretFile(Path(secret))) as worker:
        return WorkerClient(worker, automatic=True).generate(PROMPT, max_tokens=MAX_TOKENS).tokens


def asked(agents: Agents) -> list[int]:
    """From the first machine: a cable joins the two, and nobody else."""
    if not agents.machines[0].prefix:
        return written(agents.address, str(agents.secret))
    code = f"import test_torchrun as t; print(t.written({agents.address!r}, {str(agents.secret)!r}))"
    command = [*agents.machines[0].prefix, sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr + agents.said(0) + agents.said(1)
    return [int(word) for word in re.findall(r"\d+", done.stdout.splitlines()[-1])]


NAMESPACES = pytest.param(
    True, id="namespaces", marks=pytest.mark.skipif(not can_have_namespaces(), reason="not root, or no namespaces")
)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("namespaces", [pytest.param(False, id="loopback"), NAMESPACES])
def test_two_agents_serve_one_model_with_one_process_text_and_end_at_sigterm(namespaces: bool, tmp_path: Path) -> None:
    with Agents(namespaces, tmp_path) as agents:
        agents.ready()
        found = asked(agents)
        ranks = agents.ranks()
        for process in reversed(agents.processes):  # as whoever stops the machines does: all at once
            process.terminate()
        codes = agents.ended()
        assert all(code in (0, 1, -signal.SIGTERM, 128 + signal.SIGTERM) for code in codes), codes
        assert not [pid for pid in ranks if Path(f"/proc/{pid}/exe").exists()]
    router = WorkerClient(Worker(load_model("demo", num_threads=1), num_blocks=4, block_size=16))
    sequence = router.generate(PROMPT, max_tokens=MAX_TOKENS)
    assert found == sequence.tokens  # no tie among these


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_group_on_both_machines(killed: int, tmp_path: Path) -> None:
    with Agents(can_have_namespaces(), tmp_path) as agents:
        agents.ready()
        ranks = agents.ranks()
        os.kill(ranks[killed], signal.SIGKILL)
        begun = time.monotonic()
        codes = agents.ended()
        assert all(code != 0 for code in codes)
        assert time.monotonic() - begun < 90.0
        assert not [pid for pid in ranks if Path(f"/proc/{pid}/exe").exists()]
