"""This process's rank, the ranks' rendezvous, and the start of rank 0 with its followers, or of a follower."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
from space_common.process import module_command, safe_environment
from space_common.worker_settings import WorkerSettings
from space_model.model_error import InvalidSetting
from space_model.model_facts import Ranks
from space_model.space_model import SpaceModel
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from space_server.machine.memory import free_bytes
from space_server.tensor_parallel.leader import TensorParallelLeader, run_follower
from space_server.tensor_parallel.ranks import LOADING_SECONDS, RankGroup, end_process

_LEAVE_SECONDS = 3.0  # seconds for followers to leave by themselves; a supervisor gives the whole worker 5


@dataclass(frozen=True)
class RankPlace:
    """This process among the ranks, from torchrun's variables, or as rank 0 that starts the others."""

    rank: int
    size: int
    local_rank: int  # on this machine: the number of its GPU
    host: str  # where the store is ...
    port: int  # ... 0: any port, of a store of this process
    owns_store: bool
    starts_others: bool

    @classmethod
    def of(cls, size: int, environment: Mapping[str, str]) -> RankPlace:
        """Read the variables. Raises InvalidSetting if they do not fit `size`."""
        if "RANK" not in environment:
            return cls(0, size, 0, "127.0.0.1", 0, owns_store=True, starts_others=True)
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            local = int(environment.get("LOCAL_RANK", rank))
        except (KeyError, ValueError) as error:
            raise InvalidSetting(
                f"RANK is set, and with it RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be, as torchrun sets "
                f"them: {error!r}. Unset RANK to let --tensor-parallel start its own processes."
            ) from error
        if world != size or not 0 <= rank < world:
            raise InvalidSetting(
                f"WORLD_SIZE is {world} and RANK {rank}; --tensor-parallel {size} needs {size} ranks from 0 on."
            )
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world, local, host, port, owns_store=rank == 0 and not agent, starts_others=False)

    def device(self, asked: str) -> str:
        """Return this rank's device. Raises InvalidSetting if there are fewer GPUs than ranks."""
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
        if kind != "cuda":
            if kind.startswith("cuda"):
                raise InvalidSetting(f"--device {asked} names one GPU; with --tensor-parallel say --device cuda.")
            return kind
        found = torch.cuda.device_count()
        needed = self.size if self.starts_others else self.local_rank + 1
        if needed > found:
            raise InvalidSetting(
                f"{needed} ranks on this machine need {needed} GPUs; it has {found}. Lower --tensor-parallel to "
                f"{max(1, found)}, or choose GPUs with CUDA_VISIBLE_DEVICES."
            )
        return f"cuda:{self.local_rank}"

    def store(self) -> TCPStore:
        """Return the store of the rendezvous."""
        if not self.owns_store or not self.starts_others:
            return self._tcp_store(self.port)
        with socket.create_server((self.host, 0)) as listening:  # on this interface alone
            return self._tcp_store(listening.getsockname()[1], listening)

    def _tcp_store(self, port: int, listening: socket.socket | None = None) -> TCPStore:
        return TCPStore(
            self.host,
            port,
            is_master=self.owns_store,
            timeout=timedelta(seconds=LOADING_SECONDS),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )


class Followers:
    """The processes of the other ranks."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], lost: Callable[[str], NoReturn]) -> None:
        self._processes, self._lost = processes, lost
        self.leaving = False  # END was sent, so exits are expected

    def check(self) -> None:
        """Raise if one has ended."""
        for rank, process in enumerate(self._processes, start=1):
            status = process.poll()
            if status is not None and not self.leaving:
                self._lost(f"Rank {rank} is gone: {_ending(status)}. Its last words are above.")

    def end(self) -> None:
        """Wait a little for followers that are leaving, then kill the others."""
        deadline = time.monotonic() + (_LEAVE_SECONDS if self.leaving else 0.0)
        self.leaving = True
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def followers(
    arguments: Sequence[str], place: RankPlace, port: int, lost: Callable[[str], NoReturn]
) -> Iterator[Followers]:
    """Start ranks 1, 2, …: this program again, with torchrun's variables. They end with the block."""
    processes = [
        subprocess.Popen(
            module_command("space_server", *arguments, "--parent-pid", os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # rank 0 alone says ready
            env=safe_environment(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(place.size),
                    "MASTER_ADDR": place.host,
                    "MASTER_PORT": str(port),
                }
            ),
        )
        for rank in range(1, place.size)
    ]
    group = Followers(processes, lost)
    try:
        yield group
    finally:
        group.end()


def _ending(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


LoadModel = Callable[[Ranks, str], SpaceModel]
"""Loads a rank's part of the model on this device."""


@contextmanager
def leading(
    config: WorkerSettings,
    arguments: Sequence[str],
    place: RankPlace,
    load: LoadModel,
    lost: Callable[[str], NoReturn] = end_process,
) -> Iterator[TensorParallelLeader]:
    """Run rank 0 of a complete group. The followers are released at the end of the block.

    `lost`: called when the ranks cannot continue together.
    """
    group = RankGroup(0, place.size, watchdog=config.rank_timeout, lost=lost)
    device = place.device(config.device)
    with ExitStack() as stack:
        store = place.store()
        others = Followers([], group.lost)
        if place.starts_others:
            others = stack.enter_context(followers(arguments, place, store.port, group.lost))
        model = load(group, device)
        group.join(store, model.facts.device, others.check)
        lead = TensorParallelLeader(model, group, free=partial(_free_bytes, model, place), alive=others.check)
        try:
            yield lead
        except BaseException:
            group.abandon()
            lead.abandon()
            raise
        others.leaving = True
        lead.end()
        group.leave()


def following(config: WorkerSettings, place: RankPlace, load: LoadModel) -> None:
    """Run another rank until rank 0 sends END."""
    group = RankGroup(place.rank, place.size, watchdog=config.rank_timeout)
    device = place.device(config.device)
    store = place.store()
    model = load(group, device)
    group.join(store, model.facts.device)
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 handles them: it finishes its sequences and sends END
        signal.signal(number, signal.SIG_IGN)
    run_follower(model, group, partial(_free_bytes, model, place))
    group.leave()


def _free_bytes(model: SpaceModel, place: RankPlace) -> int:
    """Bytes free for this rank; ranks on one machine's CPU share its memory."""
    device: torch.device = model.facts.device
    return free_bytes(device) // (place.size if device.type == "cpu" else 1)
