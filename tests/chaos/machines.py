"""Hosts simulated on this machine: each a network namespace with its own address, and a worker kept alive in it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from space_common.process import module_command
from space_eval.bench.server_process import ServerError

PORT = 9100
START_SECONDS = 600.0
RESTART_SECONDS = 0.2  # between the end of a worker and its next start


class HostError(ServerError):
    """A host cannot be simulated here, or its worker does not start."""


def can_have_namespaces() -> bool:
    """Root, with `ip` and the right to make network namespaces."""
    if os.geteuid() != 0:
        return False
    name = f"ssprobe{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
        if made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return made


class Host:
    """One host. Entered, its worker runs, and is started again when it ends.

    with Host(0, command, namespaces=True) as host:
        host.address; host.kill(); host.cut(); host.mend()
    """

    def __init__(self, number: int, command: Callable[[str], Sequence[str]], *, namespaces: bool) -> None:
        """`command`: of a worker, by its address; `namespaces`: False: the host is another loopback address."""
        self.num_starts = 0
        self._name = f"ss{os.getpid() % 100000}n{number}"
        self._link = f"ssv{os.getpid() % 100000}n{number}"
        self._namespaces = namespaces
        net = f"10.{200 + os.getpid() % 50}.{number}"
        self._ip = f"{net}.2" if namespaces else f"127.0.{77 + os.getpid() % 50}.{number + 1}"
        self._gateway = f"{net}.1"
        self.address = f"{self._ip}:{PORT}"
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._ready = False
        self._output: list[str] = []
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Host:
        if self._namespaces:
            self._make_network()
        self._keeper.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self.num_starts > 1, START_SECONDS)
                if not self._ready:
                    raise HostError(
                        f"The worker at {self.address} did not start. Its output:\n" + "\n".join(self._output)
                    )
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def kill(self) -> None:
        """Kill the worker; another is started."""
        if self._process is not None:
            self._process.kill()

    def cut(self) -> None:
        """Cut the host off from the network: its worker runs on, and no packet reaches it or leaves it."""
        if not self._namespaces:
            raise HostError("A loopback address cannot be cut off. Run as root, where network namespaces can be made.")
        _ip("link", "set", self._link, "down")

    def mend(self) -> None:
        _ip("link", "set", self._link, "up")

    def _make_network(self) -> None:
        inner = f"{self._link}i"
        _ip("netns", "add", self._name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", self._name)
        _ip("addr", "add", f"{self._gateway}/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        for words in (
            ("addr", "add", f"{self._ip}/30", "dev", inner),
            ("link", "set", inner, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self._name, *words)

    def _keep(self) -> None:
        """Start the worker again and again, as systemd or Kubernetes would."""
        prefix = ["ip", "netns", "exec", self._name] if self._namespaces else []
        while not self._closing:
            process = subprocess.Popen(
                [*prefix, *self._command(self.address)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            with self._changed:
                self._process = process
                self.num_starts += 1
                self._changed.notify_all()
            for line in process.stdout or ():
                with self._changed:
                    self._output = [*self._output[-30:], line.rstrip("\n")]
                    self._ready = self._ready or line.startswith("ready ")
                    self._changed.notify_all()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            with self._changed:
                self._changed.wait_for(lambda: self._closing, RESTART_SECONDS)

    def _leave(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.kill()
        self._keeper.join(10.0)
        self.kill()
        if self._namespaces:
            subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self._name], capture_output=True, check=False)


def scripted(tokenizer: Path) -> Callable[[str], Sequence[str]]:
    """Workers without a model, each with a bound on what it can do: 20 ms a step, 8 sequences."""
    flags = ["--tokenizer", str(tokenizer), "--step-seconds", "0.02", "--max-sequences", "8"]
    flags += ["--num-blocks", "2048", "--block-size", "16", "--max-model-len", "2048", "--draft-length", "5"]
    return lambda address: module_command("doubles.router", "--listen", address, *flags)


def served(model: str) -> Callable[[str], Sequence[str]]:
    """Real workers."""
    flags = ["--model", model, "--num-threads", "1", "--num-blocks", "2048", "--calibration-seconds", "0"]
    return lambda address: module_command("space_server", "--listen", address, *flags)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"ip {' '.join(words)}: {done.stderr.strip()}")
