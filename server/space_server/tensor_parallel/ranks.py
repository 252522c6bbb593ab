"""The processes that hold one model between them, over torch.distributed: nccl between GPUs, gloo between CPUs."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

GROUP_LOST = 7
"""Exit status of a rank whose group has come to an end: another rank died, fell silent, or lost the thread."""

LOADING_SECONDS = 1800.0
"""Longest that ranks wait for each other to have read their weights."""

_FIRST_BYTES = 16384
"""Of a message that go in one broadcast, whatever its length; the rest, where there is some, in another."""

_log = logging.getLogger(__name__)


class GroupLost(Exception):
    """The ranks cannot go on together."""


def end_process(reason: str) -> NoReturn:
    """Leave at once, whatever other threads wait for."""
    _log.error("the ranks cannot go on: %s", reason)
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    os._exit(GROUP_LOST)


class RankGroup:
    """One rank's view of the group. All ranks make the same calls in the same order.

    A rank that waits longer than `watchdog` seconds for another ends: it calls `lost` with a reason that says in what.
    """

    def __init__(self, rank: int, size: int, *, watchdog: float, lost: Callable[[str], NoReturn] = end_process) -> None:
        self.rank, self.size, self.watchdog = rank, size, watchdog
        self._lost = lost
        self._since: float | None = None  # when what it waits for began
        self._waits_for = ""
        self._joined = False

    def join(self, store: Store, device: torch.device, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank is here, its weights read; `alive` is asked meanwhile and raises if one never will."""
        store.set(f"ready-{self.rank}", "1")
        deadline = time.monotonic() + LOADING_SECONDS
        try:
            for rank in range(self.size):
                while not store.check([f"ready-{rank}"]):
                    alive()
                    if time.monotonic() > deadline:
                        self.lost(f"Rank {rank} has not read its weights after {LOADING_SECONDS:.0f} s.")
                    time.sleep(0.05)
            dist.init_process_group(
                "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
                store=PrefixStore("ranks", store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.watchdog),
            )
        except RuntimeError as error:
            self.lost(f"Rank {self.rank} cannot join the others: {_first_line(error)}")
        self._joined = True
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()

    def leave(self) -> None:
        """Nothing more will be said."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def abandon(self) -> None:
        """This rank ends by itself, for a reason of its own: what the others do now is no loss to it."""
        self._joined, self._lost = False, _raise

    def lost(self, reason: str) -> NoReturn:
        """The ranks cannot go on."""
        self._lost(reason)

    # ------------------------------------------------------------------------------------------ between all ranks

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x; on the CPU a row's sum does not depend on the other rows.

        Of two ranks there is one order. Of more, a reduction's order depends on where in x a number is, so the parts
        are added here, in the order of the ranks; on GPUs the library adds them, for speed.
        """
        x = x.contiguous()
        with self._waiting("for the parts of a sum"):
            if self.size == 2 or x.device.type != "cpu":
                dist.all_reduce(x)
                return x
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            return total.to(x.dtype)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in order, at rank 0; nothing elsewhere."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self._waiting("for the parts of the logits"):
            dist.gather(x.contiguous(), parts, dst=0)
        return parts or []

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's x, on every rank; elsewhere x is room for it."""
        x = x.contiguous()
        with self._waiting("for hidden rows from rank 0"):
            dist.broadcast(x, src=0)
        return x

    def least(self, amount: int) -> int:
        """The smallest amount that any rank has."""
        found = torch.tensor([amount])
        with self._waiting("to hear how much memory the others have"):
            dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def answer(self) -> None:
        """Every rank says that it lives."""
        with self._waiting("for signs of life"):
            dist.all_reduce(torch.ones(1))

    # ------------------------------------------------------------------------------------------ from rank 0

    def send(self, message: bytes) -> None:
        """Say this to every other rank: one broadcast, two for a long one."""
        framed = len(message).to_bytes(8, "little") + message
        with self._waiting("to be heard by the others"):
            dist.broadcast(_bytes(framed[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")), src=0)
            if len(framed) > _FIRST_BYTES:
                dist.broadcast(_bytes(framed[_FIRST_BYTES:]), src=0)

    def receive(self) -> bytes:
        """What rank 0 says next."""
        with self._waiting("for rank 0 to say something"):
            first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
            dist.broadcast(first, src=0)
            framed = first.numpy().tobytes()
            length = 8 + int.from_bytes(framed[:8], "little")
            if length > _FIRST_BYTES:
                rest = torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)
                dist.broadcast(rest, src=0)
                framed += rest.numpy().tobytes()
            return framed[8:length]

    # ------------------------------------------------------------------------------------------ the watch

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self._waits_for, self._since = what, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            seconds = time.monotonic() - self._since
            self.lost(f"Rank {self.rank} waited {seconds:.1f} s {what}, and another is gone: {_first_line(error)}")
        finally:
            self._since = None

    def _watch(self) -> None:
        """The library gives up after the watchdog time; if it does not, this does."""
        patience = self.watchdog + max(1.0, self.watchdog / 4)
        while self._joined:
            since = self._since
            if since is not None and time.monotonic() - since > patience:
                self.lost(f"Rank {self.rank} has waited {patience:.0f} s {self._waits_for}: another rank is silent.")
            time.sleep(min(1.0, self.watchdog / 8))


def _raise(reason: str) -> NoReturn:
    raise GroupLost(reason)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
