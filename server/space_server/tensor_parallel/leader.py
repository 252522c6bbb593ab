"""The model of several ranks: rank 0 sends each step to the followers, which run its rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads import DraftHeadWeights
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from torch import Tensor

from space_server.tensor_parallel.plan_message import MessageLost, PlanMessageKind, PlanReader, PlanWriter
from space_server.tensor_parallel.ranks import GroupLost, RankGroup

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
        not return if another rank's process has ended.
        """
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

    def free_bytes(self) -> int:
        """Return the bytes that every rank can still allocate for keys and values."""
        with self._ordered(PlanMessageKind.MEMORY):
            return self._group.least(self._free())

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        """Allocate pages on every rank, replacing earlier ones."""
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
