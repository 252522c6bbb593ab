"""Router and workers on hosts of their own, which are killed, cut off and restarted under load."""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from perf.harness import Report, log
from space_common.http_client import HttpError, get_json
from space_common.process import ServerError, ServerProcess, module_command
from space_eval.report import facts

from chaos.harness import StreamCounts, StreamLoad, add_flags, bodies, stream_table

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
        self.is_ready = False  # the newest process has its model
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

    @property
    def pid(self) -> int:
        """Of the worker's newest process; 0 before the first."""
        return 0 if self._process is None else self._process.pid

    def kill(self) -> None:
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
                self.is_ready = False
                self._changed.notify_all()
            for line in process.stdout or ():
                with self._changed:
                    self._output = [*self._output[-30:], line.rstrip("\n")]
                    self.is_ready = self.is_ready or line.startswith("ready ")
                    self._ready = self._ready or self.is_ready
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


def scripted(tokenizer: Path, secret: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """Workers without a model, each with a bound on what it can do: 20 ms a step, 8 sequences."""
    flags = ["--tokenizer", str(tokenizer), "--step-seconds", "0.02", "--max-sequences", "8"]
    flags += ["--num-blocks", "2048", "--block-size", "16", "--max-model-len", "2048", "--draft-length", "5"]
    return lambda address: module_command("doubles.router", "--listen", address, *flags, *secret)


def served(model: str, secret: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """`secret`: the flag and file of the workers' ports."""
    flags = ["--model", model, "--num-threads", "1", "--num-blocks", "2048", "--calibration-seconds", "0"]
    return lambda address: module_command("space_server", "--listen", address, *flags, *secret)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"ip {' '.join(words)}: {done.stderr.strip()}")


WORKER_TIMEOUT = 3.0  # seconds of silence after which the router considers a host lost

Phases = dict[str, StreamCounts]


def run(options: argparse.Namespace) -> Report:
    """Raises ServerError, HttpError and HostError."""
    namespaces = not options.loopback and can_have_namespaces()
    model = "demo" if options.scripted else options.model
    wanted = bodies(options.streams, options.tokens)
    with ExitStack() as stack:
        tokenizer = importlib.resources.as_file(importlib.resources.files("space_demo") / "tokenizer.json")
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="spaceserve-hosts-")))
        (folder / "secret").write_text(token_hex(32), encoding="ascii")
        secret = ["--worker-secret-file", str(folder / "secret")]
        command = scripted(stack.enter_context(tokenizer), secret) if options.scripted else served(model, secret)
        hosts = [stack.enter_context(Host(number, command, namespaces=namespaces)) for number in range(options.hosts)]
        with _router(model, hosts[:1], [*secret, *options.serve_flags]) as server:
            one = StreamLoad(server, wanted)
            phases = asyncio.run(_one_worker(one))
        with _router(model, hosts, [*secret, *options.serve_flags]) as server:
            load = StreamLoad(server, wanted, one.expected)
            known = facts(asyncio.run(get_json(load.endpoint, "/info")))
            phases |= asyncio.run(Disturbances(load, hosts, options, namespaces).run())
    workers = "scripted workers, 20 ms a step of at most 8 sequences" if options.scripted else "real workers"
    return report(known, phases, [host.num_starts for host in hosts], namespaces, workers)


def _router(model: str, hosts: Sequence[Host], more_flags: Sequence[str]) -> ServerProcess:
    addresses = ",".join(host.address for host in hosts)
    flags = ["--model", model, "--worker-address", addresses, "--worker-timeout", str(WORKER_TIMEOUT)]
    return ServerProcess([*flags, "--log-level", "warning", *more_flags])


async def _one_worker(load: StreamLoad) -> Phases:
    """Each request alone on one host, for its tokens; then all at once there."""
    await load.record_expected()
    return {"one worker": await load.once()}


class Disturbances:
    """One router and all hosts: throughput, kills, cuts, rolling restarts."""

    def __init__(self, load: StreamLoad, hosts: Sequence[Host], options: argparse.Namespace, namespaces: bool) -> None:
        self._load, self._hosts, self._options, self._namespaces = load, hosts, options, namespaces
        self._source = random.Random(options.seed)

    async def run(self) -> Phases:
        await self._all_up()
        phases = {f"{len(self._hosts)} workers": await self._load.once()}
        disturbances = {"workers killed": self._kill, "machines cut off": self._cut, "rolling restarts": self._restart}
        if not self._namespaces:
            del disturbances["machines cut off"]
        for name, disturb in disturbances.items():
            async with self._load.running() as counts:
                await disturb()
            await self._all_up()
            await self._load.wait_idle()
            phases[name] = counts
            log(f"{name}: {len(counts.lost)} of {counts.num_streams} streams lost, {counts.num_different} other tokens")
        return phases

    async def _kill(self) -> None:
        for _ in range(self._options.faults):
            await self._tokens()
            self._source.choice(self._hosts).kill()
            await self._tokens()
            await self._all_up()

    async def _cut(self) -> None:
        """For longer than the router waits, so that streams go on elsewhere; the host comes back as it was."""
        for _ in range(self._options.faults):
            await self._tokens()
            host = self._source.choice(self._hosts)
            host.cut()
            try:
                await self._workers(
                    lambda state: any(one["state"] == "away" for one in state["workers"]), "a lost worker"
                )
                await self._tokens()
            finally:
                host.mend()
            await self._all_up()

    async def _restart(self) -> None:
        for number in range(1, self._options.restarts + 1):
            await self._tokens()
            before = [host.num_starts for host in self._hosts]
            self._load.server.signal(signal.SIGUSR1)
            await self._workers(lambda state: state["restart"]["state"] == "running", "a rolling restart")
            state = await self._workers(
                lambda state: state["restart"]["state"] != "running", "the end of a rolling restart"
            )
            restarted = all(host.num_starts > starts for host, starts in zip(self._hosts, before, strict=True))
            if state["restart"]["state"] != "done" or not restarted:
                raise HttpError(f"Rolling restart {number} of every worker has failed: {state['restart']['error']}")

    async def _all_up(self) -> None:
        await self._workers(lambda state: all(one["state"] == "up" for one in state["workers"]), "all workers")

    async def _workers(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        return await self._load.wait_until("/workers", holds, what)

    async def _tokens(self) -> None:
        """Until every stream has got tokens, and a moment longer.

        The router tries a request alone whose worker is gone. One that we took a second worker from meanwhile would
        rightly be refused.
        """
        await self._load.wait_for_tokens(len(self._load.bodies))
        await asyncio.sleep(self._source.uniform(0.05, 1.0))


def report(known: dict[str, Any], phases: Phases, num_starts: Sequence[int], namespaces: bool, workers: str) -> Report:
    where = "network namespaces" if namespaces else "loopback addresses"
    return Report(
        title="Workers on hosts of their own",
        facts=known,
        failures=[f"{name}: {words}" for name, counts in phases.items() for words in counts.failures],
        notes=f"{len(num_starts)} hosts simulated by {where}; {workers}, started "
        f"{' + '.join(map(str, num_starts))} times.",
        tables=[stream_table(phases)],
        record={
            "namespaces": namespaces,
            "num_starts": num_starts,
            "phases": [{"name": name, **asdict(counts)} for name, counts in phases.items()],
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser, ("--scripted", False, "workers without a model, 20 ms a step, 8 sequences"),
        ("--hosts", 3, "hosts, a worker on each"), ("--streams", 24, "streams at any time"),
        ("--tokens", 192, "longest answer"), ("--faults", 6, "kills, and as many cuts of the network"),
        ("--restarts", 2, "rolling restarts under load"),
        ("--loopback", False, "no namespaces: other addresses of this machine"),
    )  # fmt: skip
