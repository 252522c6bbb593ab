"""Tensor parallelism: processes that share one model, over torch.distributed (NCCL between GPUs, Gloo between CPUs).

Rank 0 sends each step to the followers, which run its rows. Its messages are numbered, each a few integers:

    [number, kind, …]        kind   ROWS   one step: padded rows, then each segment in turn
                                    HEAD   how many hidden rows follow, to make logits of
                                    PAGES  number of blocks, block size: allocate
                                    MEMORY say how much is free
                                    BEAT   answer, so that each knows that the others live
                                    END    leave

A segment is its slot, start, adapter, ids, layout, and what is new of its pages: rank 0 and the followers keep the page
tables of the sequences that the last step had, and forget the others'.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from space_common.process import module_command, report_error, safe_environment
from space_common.worker.settings import WorkerSettings
from space_kernels.paging.step_rows import Ints
from space_model.draft_network import DraftNetwork
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.heads import DraftHeadWeights
from space_model.model_error import InvalidSetting
from space_model.model_facts import ModelFacts, Ranks
from space_model.networks.network import USUAL_ROOM, PagedKV, StateRoom
from space_model.recurrent_head import RecurrentHead
from space_model.space_model import SpaceModel
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from space_server.batch import begins_with
from space_server.machine.memory import free_bytes

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
    report_error("error", reason)
    os._exit(GROUP_LOST)


class RankGroup:
    """One rank's view of the group. All ranks make the same calls in the same order. A rank that waits longer than
    `watchdog` seconds for another exits: it calls `lost` with a reason that names the call."""

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


class PlanMessageKind(IntEnum):
    """What a message asks for."""

    ROWS = 1
    HEAD = 2
    PAGES = 3
    MEMORY = 4
    BEAT = 5
    END = 6


class MessageLost(Exception):
    """A message does not follow the one before it, so its cached page tables cannot be resolved."""


@dataclass(frozen=True)
class PlanMessage:
    """A decoded message."""

    kind: PlanMessageKind
    figures: tuple[int, ...]  # HEAD: (rows,); PAGES: (blocks, block size); ROWS: (padded rows,)
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    """A sequence's pages, and the slot where both sides cache them."""

    slot: int
    pages: Ints


class PlanWriter:
    """Encodes rank 0's messages. One writer numbers all of them without gaps."""

    def __init__(self) -> None:
        self._number = 0
        self._tables: dict[int, _Table] = {}  # by the sequence's number

    def simple(self, kind: PlanMessageKind, *figures: int) -> bytes:
        """Encode a message without segments."""
        return self._numbered(kind, figures)

    def rows(self, segments: Sequence[Segment], num_padded: int) -> bytes:
        """Encode one step's rows."""
        words = [num_padded, len(segments)]
        before, self._tables = self._tables, {}
        taken = {table.slot for s in segments if s.owner is not None and (table := before.get(s.owner)) is not None}
        free = iter(slot for slot in range(2 * len(segments) + 1) if slot not in taken)
        for segment in segments:
            known = None if segment.owner is None else before.get(segment.owner)
            pages = np.asarray(segment.pages, dtype=np.int64)
            kept = 0
            if known is not None:
                kept = len(known.pages) if begins_with(pages, known.pages) else 0
            table = _Table(next(free) if known is None else known.slot, pages)
            if segment.owner is not None:
                self._tables[segment.owner] = table
            layout = segment.layout
            words += [table.slot, segment.start, -1 if segment.adapter is None else segment.adapter]
            words += [len(segment.ids), *segment.ids, layout.num_drafts, *layout.masks]
            words += [kept, len(pages) - kept, *pages[kept:].tolist()]
        return self._numbered(PlanMessageKind.ROWS, words)

    def _numbered(self, kind: PlanMessageKind, words: Sequence[int]) -> bytes:
        self._number += 1
        number = self._number
        return np.array([number & 0x7FFFFFFF, number >> 31, kind, *words], dtype=np.int32).tobytes()


class PlanReader:
    """Decodes messages on a follower."""

    def __init__(self) -> None:
        self._number = 0
        self._tables: dict[int, Ints] = {}  # by slot

    def read(self, message: bytes) -> PlanMessage:
        """Decode a message. Raises MessageLost if it does not follow the last one."""
        words = np.frombuffer(message, dtype=np.int32).tolist()
        number = words[0] + (words[1] << 31)
        self._number += 1
        if number != self._number:
            raise MessageLost(
                f"Message {number} came where message {self._number} was due: this rank no longer knows which rows "
                "the others lay out. Start the group again."
            )
        kind, rest = PlanMessageKind(words[2]), words[3:]
        if kind is not PlanMessageKind.ROWS:
            return PlanMessage(kind, tuple(rest))
        return PlanMessage(kind, (rest[0],), self._segments(rest))

    def _segments(self, words: list[int]) -> tuple[Segment, ...]:
        before, self._tables = self._tables, {}
        at = 2

        def take(count: int) -> list[int]:
            nonlocal at
            at += count
            return words[at - count : at]

        segments = []
        for _ in range(words[1]):
            slot, start, adapter, num_ids = take(4)
            ids = take(num_ids)
            (num_drafts,) = take(1)
            masks = take(num_drafts + 1)
            kept, num_new = take(2)
            fresh = take(num_new)
            pages = before[slot] if kept and not fresh else np.array([*before.get(slot, ())[:kept], *fresh], np.int64)
            self._tables[slot] = pages
            layout = DraftLayout.of(num_drafts, tuple(masks))
            segments.append(Segment(ids, start, pages, layout, None if adapter < 0 else adapter, slot))
        return tuple(segments)


BEATS_PER_WATCHDOG = 4  # heartbeats per watchdog time, after which a silent rank counts as lost


class TensorParallelLeader:
    """A StepModel that sends each step to the followers before running its own part.

    Only rank 0 has a worker, which admits, schedules, samples and drafts; followers see rows only. A step that fails on
    some rank ends the group, because how far the others have got is unknown.
    """

    def __init__(
        self,
        model: SpaceModel,
        group: RankGroup,
        *,
        free: Callable[[], int] = lambda: 0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """`free`: returns the bytes that this rank can still allocate. `alive` is called between heartbeats, and does
        not return if another rank's process has ended."""
        self._model, self._group, self._free, self._alive = model, group, free, alive
        self._writer = PlanWriter()
        self._turn = threading.Lock()  # held for a message and all work that follows from it
        self._last = time.monotonic()  # when the last message was sent
        self._kv: PagedKV | None = None
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="rank beats", daemon=True)
        self._beats.start()

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model; heads, keys and values are those of one rank."""
        return self._model.facts

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        """Return the draft head, which only rank 0 has."""
        return self._model.draft_head_of(adapter)

    @property
    def draft_network(self) -> DraftNetwork | None:
        """None: ranks share no draft network."""
        return None

    def recurrent_head_of(self, adapter: int | None) -> RecurrentHead | None:
        """Return the recurrent draft head, which only rank 0 has."""
        return self._model.recurrent_head_of(adapter)

    def free_bytes(self) -> int:
        """Return the bytes that every rank can still allocate for keys and values."""
        with self._ordered(PlanMessageKind.MEMORY):
            return self._group.least(self._free())

    def allocate_kv(self, num_blocks: int, block_size: int, room: StateRoom = USUAL_ROOM) -> PagedKV:
        """Allocate pages on every rank, replacing earlier ones. No model that ranks share has recurrent layers."""
        with self._ordered(PlanMessageKind.PAGES, num_blocks, block_size):
            self._kv = self._model.allocate_kv(num_blocks, block_size)
            return self._kv

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Return [R, hidden] after the final norm."""
        if kv is not self._kv:
            raise ValueError("These pages are not the last that were allocated on all ranks.")
        if not batch.segments:
            raise ValueError("These rows were laid out on a device; several ranks take rows that the host lays out.")
        with self._sending(lambda: self._writer.rows(batch.segments, len(batch.ids))):
            return self._model.forward(batch, kv)

    def sampled_step(self, kv: PagedKV, banned_ids: Tensor) -> None:
        """Return None: ranks compute layer after layer."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32."""
        if not len(hidden):
            return hidden.new_empty(0, self.facts.vocab_size).float()
        with self._ordered(PlanMessageKind.HEAD, len(hidden)):
            return self._model.logits(self._group.share(hidden))

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32, from rank 0's own copy of the head."""
        return self._model.logits_of(hidden, ids)

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]"""
        return self._model.embed(ids)

    def end(self) -> None:
        """Send END to the followers."""
        if not self._ended.is_set():
            with self._ordered(PlanMessageKind.END):
                self._ended.set()
            self._beats.join()

    def abandon(self) -> None:
        """Send nothing more, not even END."""
        self._ended.set()

    @contextmanager
    def _ordered(self, kind: PlanMessageKind, *figures: int) -> Iterator[None]:
        with self._sending(lambda: self._writer.simple(kind, *figures)):
            yield

    @contextmanager
    def _sending(self, encode: Callable[[], bytes]) -> Iterator[None]:
        """Send a message and run this rank's part, without another message in between."""
        with self._turn:
            message = encode()  # if it raises, nothing was sent yet
            try:
                self._group.send(message)
                yield
                self._last = time.monotonic()
            except GroupLost:
                raise
            except Exception as error:
                self._group.lost(f"Rank 0 failed in the middle of a step: {type(error).__name__}: {error}")

    def _beat(self) -> None:
        """Send heartbeats while idle, so that silence means a lost rank."""
        pause = self._group.watchdog / BEATS_PER_WATCHDOG
        while not self._ended.wait(min(0.5, pause)):
            self._alive()
            if time.monotonic() - self._last < pause or not self._turn.acquire(blocking=False):
                continue
            try:
                if self._ended.is_set():
                    return
                self._group.send(self._writer.simple(PlanMessageKind.BEAT))
                self._group.answer()
                self._last = time.monotonic()
            except GroupLost:
                return  # sent already
            finally:
                self._turn.release()


@torch.inference_mode()
def run_follower(model: SpaceModel, group: RankGroup, free: Callable[[], int] = lambda: 0) -> None:
    """Execute rank 0's messages until END. `free`: returns the bytes that this rank can still allocate."""
    facts, reader = model.facts, PlanReader()
    kv: PagedKV | None = None
    while True:
        try:
            message = reader.read(group.receive())
        except MessageLost as error:
            group.lost(str(error))
        match message.kind:
            case PlanMessageKind.PAGES:
                num_blocks, block_size = message.figures
                kv = None  # free the old pages first
                kv = model.allocate_kv(num_blocks, block_size)
            case PlanMessageKind.ROWS:
                if kv is None:
                    group.lost("Rank 0 sent rows before pages.")
                batch = ForwardBatch.build(
                    message.segments,
                    block_size=kv.block_size,
                    mask_ids=facts.mask_ids,
                    adapter_masks=[adapter.num_masks for adapter in facts.adapters],
                    device=facts.device,
                )
                if len(batch.ids) != message.figures[0]:
                    group.lost(f"Rank 0 lays out {message.figures[0]} rows, rank {group.rank} {len(batch.ids)}.")
                model.forward(batch, kv)
            case PlanMessageKind.HEAD:
                buffer = torch.empty(message.figures[0], facts.hidden_size, dtype=facts.dtype, device=facts.device)
                model.logits(group.share(buffer))
            case PlanMessageKind.MEMORY:
                group.least(free())
            case PlanMessageKind.BEAT:
                group.answer()
            case PlanMessageKind.END:
                return


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
    `lost`: called when the ranks cannot continue together."""
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
