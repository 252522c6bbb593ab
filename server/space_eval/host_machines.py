"""Machines that this one plays: each a network namespace with an address of its own, and a worker kept alive in it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from space_common.python_process import module_command

PORT = 9100
START_SECONDS = 600.0
RESTART_SECONDS = 0.2  # that whatever keeps workers alive takes to notice


class HostError(RuntimeError):
    """A machine cannot be played here, or its worker does not start."""


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
    """One machine: `prefix` goes before what runs there. Entered, its worker runs, and is started again when it ends.

    with Host(0, command, namespaces=True) as host:
        host.address; host.pid; host.cut(); host.mend()
    """

    def __init__(self, number: int, command: Callable[[str], Sequence[str]], *, namespaces: bool) -> None:
        """`command`: of a worker, by its address; `namespaces`: else it is another loopback address of this machine."""
        self.number = number
        self.num_starts = 0
        self._name = f"ss{os.getpid() % 100000}n{number}"
        self._link = f"ssv{os.getpid() % 100000}n{number}"
        self._namespaces = namespaces
        net = f"10.{200 + os.getpid() % 50}.{number}"
        self.ip = f"{net}.2" if namespaces else f"127.0.{77 + os.getpid() % 50}.{number + 1}"
        self._gateway = f"{net}.1"
        self.address = f"{self.ip}:{PORT}"
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._news = threading.Condition()
        self._closing = False
        self._ready = False
        self._words: list[str] = []
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Host:
        if self._namespaces:
            self._make_network()
        self._keeper.start()
        try:
            with self._news:
                self._news.wait_for(lambda: self._ready or self.num_starts > 1, START_SECONDS)
                if not self._ready:
                    raise HostError(f"The worker at {self.address} did not start. It said:\n" + "\n".join(self._words))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    @property
    def pid(self) -> int | None:
        """The worker's process, which lives."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def kill(self) -> None:
        """The worker dies; another is started."""
        if self._process is not None:
            self._process.kill()

    def cut(self) -> None:
        """Nothing gets to the machine or from it: it may run on, and nobody says so."""
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
            ("addr", "add", f"{self.ip}/30", "dev", inner),
            ("link", "set", inner, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self._name, *words)

    def _keep(self) -> None:
        """As systemd or Kubernetes would."""
        prefix = ["ip", "netns", "exec", self._name] if self._namespaces else []
        while not self._closing:
            process = subprocess.Popen(
                [*prefix, *self._command(self.address)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            with self._news:
                self._process = process
                self.num_starts += 1
                self._news.notify_all()
            for line in process.stdout or ():
                with self._news:
                    self._words = [*self._words[-30:], line.rstrip("\n")]
                    self._ready = self._ready or line.startswith("ready ")
                    self._news.notify_all()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            with self._news:
                self._news.wait_for(lambda: self._closing, RESTART_SECONDS)

    def _leave(self) -> None:
        with self._news:
            self._closing = True
            self._news.notify_all()
        self.kill()
        self._keeper.join(10.0)
        self.kill()
        if self._namespaces:
            subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self._name], capture_output=True, check=False)


@contextmanager
def hosts(number: int, command: Callable[[str], Sequence[str]], *, namespaces: bool) -> Iterator[list[Host]]:
    """So many machines, all with a worker that listens."""
    made = [Host(place, command, namespaces=namespaces) for place in range(number)]
    entered: list[Host] = []
    try:
        for host in made:
            entered.append(host.__enter__())
        yield made
    finally:
        for host in entered:
            host.__exit__(None, None, None)


def scripted(tokenizer: Path, *, step_seconds: float, max_sequences: int) -> Callable[[str], Sequence[str]]:
    """Workers without a model, each with a bound on what it can do: its steps take so long, with so many sequences."""
    flags = ["--tokenizer", str(tokenizer), "--step-seconds", str(step_seconds), "--max-sequences", str(max_sequences)]
    flags += ["--num-blocks", "2048", "--block-size", "16", "--max-model-len", "2048", "--draft-length", "5"]
    return lambda address: module_command("space_router.testing", "--listen", address, *flags)


def served(model: str) -> Callable[[str], Sequence[str]]:
    """Workers as they are."""
    flags = ["--model", model, "--num-threads", "1", "--num-blocks", "2048", "--calibration-seconds", "0"]
    return lambda address: module_command("space_server", "--listen", address, *flags)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"ip {' '.join(words)}: {done.stderr.strip()}")
