"""The processes that share one model, over torch.distributed: NCCL between GPUs, Gloo between CPUs."""

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

GROUP_LOST = 7  # exit status of a rank whose group has failed: another rank died, fell silent, or lost a message
LOADING_SECONDS = 1800.0  # longest that ranks wait for each other to load weights
_FIRST_BYTES = 16384
"""Bytes of a message sent in the first broadcast, whatever its length; the rest follows in a second."""

_log = logging.getLogger(__name__)


class GroupLost(Exception):
    """The ranks cannot continue together."""


def end_process(reason: str) -> NoReturn:
    """Exit at once, whatever other threads wait for."""
    _log.error("the ranks cannot go on: %s", reason)
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    os._exit(GROUP_LOST)


class RankGroup:
    """One rank's view of the group. All ranks make the same calls in the same order.

    A rank that waits longer than `watchdog` seconds for another exits: it calls `lost` with a reason that names the
    call.
    """

    def __init__(self, rank: int, size: int, *, watchdog: float, lost: Callable[[str], NoReturn] = end_process) -> None:
        self.rank, self.size, self.watchdog = rank, size, watchdog
        self._lost = lost
        self._since: float | None = None  # start of the wait
        self._waits_for = ""
        self._joined = False

    def join(self, store: Store, device: torch.device, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank has loaded its weights; `alive` is called meanwhile and raises if one never will."""
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
        """Stop the watchdog: nothing more is sent."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Record that this rank exits for its own reason, so that later failures of others are not reported."""
        self._joined, self._lost = False, _raise

    def lost(self, reason: str) -> NoReturn:
        """Report that the ranks cannot continue."""
        self._lost(reason)

    # ------------------------------------------------------------------------------------------ between all ranks

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x; on the CPU a row's sum does not depend on the other rows.

        Two ranks have one order of summation. With more, a reduction's order depends on the position in x, so on a CPU
        the parts are added here in rank order; on GPUs the library adds them, for speed.
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
        """Return every rank's x, in order, on rank 0; nothing elsewhere."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self._waiting("for the parts of the logits"):
            dist.gather(x.contiguous(), parts, dst=0)
        return parts or []

    def share(self, x: Tensor) -> Tensor:
        """Return rank 0's x on every rank; elsewhere x is the receive buffer."""
        x = x.contiguous()
        with self._waiting("for hidden rows from rank 0"):
            dist.broadcast(x, src=0)
        return x

    def least(self, amount: int) -> int:
        """Return the smallest amount of any rank."""
        found = torch.tensor([amount])
        with self._waiting("to hear how much memory the others have"):
            dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def answer(self) -> None:
        """Confirm to every rank that this one is alive."""
        with self._waiting("for signs of life"):
            dist.all_reduce(torch.ones(1))

    # ------------------------------------------------------------------------------------------ from rank 0

    def send(self, message: bytes) -> None:
        """Send a message to every other rank: one broadcast, two for a long one."""
        framed = len(message).to_bytes(8, "little") + message
        with self._waiting("to be heard by the others"):
            dist.broadcast(_bytes(framed[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")), src=0)
            if len(framed) > _FIRST_BYTES:
                dist.broadcast(_bytes(framed[_FIRST_BYTES:]), src=0)

    def receive(self) -> bytes:
        """Return rank 0's next message."""
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
        """End this rank if the library does not do so after the watchdog time."""
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
