"""Doubles for tests of the worker: a model and drafts that follow a script, and a router's end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import torch
from space_common.worker.client import WorkerClient
from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads import DraftHeadWeights
from space_model.model_facts import AdapterFacts, ModelFacts
from space_model.networks.network import USUAL_ROOM, PagedKV, StateRoom
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from torch import Tensor

PROMPTS = [[70, 71, 72, 73, 74], [20] * 17 + [33, 90], [100, 101], [50 + n % 40 for n in range(37)]]


def router_of(model: Any, *, k: int = 3, device: bool = False, **settings: object) -> WorkerClient:
    """A client of a worker on this model, which lays out up to k drafts for every sequence."""
    fixed = {"num_blocks": 256, "block_size": 4, "controller": FixedLayout.full(k), "device_steps": device}
    return WorkerClient(Worker(model, **(fixed | settings)))  # type: ignore[arg-type]


def drafted_reports(model: Any, prompt: Sequence[int], num_drafts: int, max_tokens: int) -> list[pb.SequenceReport]:
    """The reports of steps with drafts of three texts at once, `num_drafts` made one after the other behind each step.
    Fails unless the texts are those of plain decoding."""
    found = []
    for controller in (FixedLayout.full(0), FixedLayout.by_head(num_drafts)):
        client = WorkerClient(Worker(model, num_blocks=100, block_size=4, controller=controller))
        samplings = [pb.Sampling(), pb.Sampling(seed=3, temperature=0.9), pb.Sampling(seed=4, temperature=0.5)]
        numbers = [client.admit(prompt[n:], max_tokens=max_tokens, sampling=one) for n, one in enumerate(samplings)]
        client.run()
        found.append([client.sequences[number].tokens for number in numbers])
    assert found[0] == found[1]
    return [report for sequence in client.sequences.values() for report in sequence.reports if report.num_drafted]


def script(model: ScriptedModel, start: int, count: int) -> list[int]:
    """The model's ids from this position on."""
    return [model.text(position) for position in range(start, start + count)]


class ScriptedModel:
    """A text given by position: chain rows and masks at position p-1 predict text(p).

    At positions in `wrong`, masks say the next id instead, so that the draft there is rejected. Sequences that start
    far apart have scripts of their own. `poison`: a forward pass with this id in it raises; `nan_at`: the chain row
    that predicts this position gives NaN. `adapters`: name -> masks of
    adapters, whose masks follow the script, too.
    """

    def __init__(
        self,
        *,
        num_masks: int = 3,
        vocab_size: int = 64,
        window: int = 1024,
        text: Callable[[int], int] | None = None,
        wrong: Iterable[int] = (),
        poison: int | None = None,
        nan_at: int | None = None,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        self.text = text or (lambda position: 10 + position * 7 % (vocab_size - 10))
        self.num_logit_rows = 0  # rows whose logits were asked for
        self.num_rows = 0  # rows of forward passes
        self._wrong, self._poison, self._nan_at = frozenset(wrong), poison, nan_at
        self.facts = ModelFacts(
            name="scripted", vocab_size=vocab_size, hidden_size=vocab_size, num_layers=0, num_heads=1, kv_heads=1,
            head_dim=1, window=window, dtype=torch.float32, dtype_reason="scripted", device=torch.device("cpu"),
            eos_ids=(0,), mask_ids=tuple(range(1, num_masks + 1)), num_masks=num_masks, model_hash="model",
            tokenizer_hash="tokenizer", has_draft_head=False, kv_bytes_per_token=8, attention="none", num_threads=1,
            adapters=tuple(AdapterFacts(name, masks, False) for name, masks in (adapters or {}).items()),
        )  # fmt: skip

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        """Its masks know the text already."""
        return None

    draft_network = None

    def recurrent_head_of(self, adapter: int | None) -> None:
        """It drafts by masks."""

    def allocate_kv(self, num_blocks: int, block_size: int, room: StateRoom = USUAL_ROOM) -> PagedKV:
        """Pages without a layer in them."""
        return PagedKV([], [], num_blocks, block_size)

    def sampled_step(self, kv: PagedKV, banned_ids: Tensor) -> None:
        """It has no such call."""

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, V]: the logits themselves."""
        ids = batch.ids.tolist()
        if self._poison in ids:
            raise RuntimeError(f"id {self._poison} is poison")
        self.num_rows += batch.num_rows
        hidden = torch.zeros(len(ids), self.facts.vocab_size)
        for row, position in enumerate(batch.positions.tolist()):
            is_mask = batch.num_chain_rows <= row < batch.num_rows
            said = self.text(position + 1)
            if is_mask and position + 1 in self._wrong:
                said = said + 1 if said + 1 < self.facts.vocab_size else 10
            hidden[row, said] = 9.0
            if not is_mask and position + 1 == self._nan_at:
                hidden[row] = torch.nan
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] -> [N, V], a copy."""
        self.num_logit_rows += len(hidden)
        return hidden.clone()

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, V], ids [N, M] -> [N, M]."""
        return hidden.gather(1, ids)

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, V]: one-hot."""
        return torch.nn.functional.one_hot(ids, self.facts.vocab_size).to(torch.float32)


@dataclass
class ScriptedDrafts:
    """A draft source that knows the whole text of each sequence, and where to be wrong about it.

    Position p of sequence s is drafted as texts[s][p]; where `wrong(p)`, as another id.
    """

    texts: Mapping[int, Sequence[int]]
    wrong: Callable[[int], bool] = lambda position: False
    other: Callable[[int], int] = lambda id_: id_ + 1

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> list[int]:
        """The next ids of the sequence's text."""
        text = self.texts[seq_id]
        positions = range(len(ids), min(len(ids) + max_drafts, len(text)))
        return [self.other(text[p]) if self.wrong(p) else text[p] for p in positions]


class Peer:
    """A router's end of one stream."""

    def __init__(self, call: grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]) -> None:
        self.call = call
        self.report_no = 0

    async def say(self, *commands: pb.Command) -> None:
        await self.call.write(pb.RouterMessage(commands=commands))

    async def hear(self) -> pb.WorkerMessage | None:
        """The next message; None at the end of the stream."""
        message = await asyncio.wait_for(self.call.read(), 20)
        if not isinstance(message, pb.WorkerMessage):
            return None
        if message.HasField("report"):
            self.report_no += 1
            if message.report.report_no != self.report_no:
                raise ValueError(f"Report {message.report.report_no} came where {self.report_no} was due.")
        return message

    async def hear_until(self, found: Callable[[pb.StepReport], bool]) -> list[pb.StepReport]:
        """Reports up to the first that is `found`."""
        reports: list[pb.StepReport] = []
        while True:
            message = await self.hear()
            if message is None:
                raise ValueError("The stream ended before what was waited for.")
            reports.append(message.report)
            if found(message.report):
                return reports

    async def last_word(self) -> pb.WorkerMessage | None:
        """What is said before the stream ends."""
        last = None
        while (message := await self.hear()) is not None:
            last = message
        return last
