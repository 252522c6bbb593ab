"""How fast a worker decodes: made-up sequences in the middle of their texts, timed by the wall while all run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from overhead_arms import Arm
from space_common.worker_client import ClientSequence, SequenceRequest, WorkerClient
from space_common.worker_settings import StepsHere
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_batch import why_on_host
from space_server.model_runner import StepModel
from space_server.step_cost import StepCost
from space_server.worker import Worker

from gpu.llama import FIRST_MASK, NUM_MASKS, Foretold

BLOCK_SIZE = 16
SLACK = 24
"""Tokens of each sequence beyond those that may be timed: two steps under way, and their drafts."""

HOST: Final[StepsHere] = "host"
DEVICE: Final[StepsHere] = "device"
"""How a worker steps: each step waited for, or state and next step on the device."""


def known_steps(facts: ModelFacts) -> list[StepsHere]:
    """Those that this model can have; the last is the one a server would take on a GPU."""
    return [HOST] if why_on_host(facts) else [HOST, DEVICE]


@dataclass(frozen=True)
class DecodingSpeed:
    """What so many sequences gave, together."""

    batch: int
    num_steps: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    seconds: float

    @property
    def step_seconds(self) -> float:
        """By the wall, from report to report."""
        return self.seconds / self.num_steps

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """E: of one sequence."""
        return self.num_tokens / (self.num_steps * self.batch)


@dataclass(frozen=True)
class SequenceSize:
    """What the sequences of a measurement have."""

    context: int  # positions computed before; their keys and values are zeros
    most_tokens: int  # timed, of each

    @property
    def blocks_each(self) -> int:
        """Pages of a sequence."""
        return -(-(self.context + 1 + self.most_tokens + SLACK) // BLOCK_SIZE)


class PacedWorker:
    """A worker with one way to lay out steps. Several share the pages: they take turns."""

    def __init__(
        self,
        model: StepModel,
        kv: PagedKV,
        arm: Arm,
        sequence_size: SequenceSize,
        *,
        max_sequences: int,
        steps: StepsHere = HOST,
        cost: StepCost | None = None,
        foretold: Foretold | None = None,
    ) -> None:
        """`foretold`: sets which drafts are accepted; None: the masks' own drafts."""
        self.arm, self._sequence_size, self._facts, self._foretold = arm, sequence_size, model.facts, foretold
        self.worker = Worker(
            model,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            max_sequences=max_sequences,
            kv=kv,
            cost=cost,
            controller=arm.controller(),
            synthetic=None if foretold is None else foretold.synthetic,
            device_steps=steps == DEVICE,
        )
        self._most_drafts = NUM_MASKS if arm.num_drafts is None else arm.num_drafts
        self._client = WorkerClient(
            self.worker, max_prefill_rows=1 << 20, max_draft_length=self._most_drafts, keeps_reports=False
        )

    def pace(self, batch: int, *, num_steps: int, seconds: float = 2.0, warm_up: int = 12) -> DecodingSpeed:
        """At most so many steps and seconds, after `warm_up` steps. Raises RuntimeError where a sequence fails."""
        sequences = self._admit(batch)
        for _ in range(warm_up):
            self._step()
        while not all(sequence.tokens for sequence in sequences):
            self._step()
        before, done = sum(len(sequence.tokens) for sequence in sequences), 0
        drafted = accepted = 0
        # From report to report: with steps under way, waiting for the device here would count some of them twice.
        begun = time.perf_counter()
        most_tokens = self._sequence_size.most_tokens
        while done < num_steps and max(len(sequence.tokens) for sequence in sequences) < most_tokens:
            report = self._step()
            drafted += sum(sequence.num_drafted for sequence in report.sequences)
            accepted += sum(sequence.num_accepted for sequence in report.sequences)
            done += report.stepped
            if time.perf_counter() - begun > seconds:
                break
        taken = time.perf_counter() - begun
        made = sum(len(sequence.tokens) for sequence in sequences) - before
        self._release()
        if not done:
            raise RuntimeError(f"{self.arm.name}: no step was left to time; give the sequences more tokens")
        return DecodingSpeed(batch, done, made, drafted, accepted, taken)

    def stretch(self, batch: int, num_steps: int, measure: Callable[[Callable[[], None]], float]) -> float:
        """What `measure` says of `num_steps` steps, by step."""
        sequences, before = self._admit(batch), self._client.num_steps
        while not all(sequence.tokens for sequence in sequences) or self._client.num_steps - before < 8:
            self._step()
        self._wait()

        def run() -> None:
            for _ in range(num_steps):
                self._step()

        found = measure(run) / num_steps
        self._release()
        return found

    def _admit(self, batch: int) -> list[ClientSequence]:
        """New sequences with pages of their own, whose context counts as computed."""
        rng, size, client = random.Random(batch), self._sequence_size, self._client
        first, num_cached = FIRST_MASK + NUM_MASKS, size.context // BLOCK_SIZE
        sequences = []
        for number in range(batch):
            ids = [rng.randrange(first, self._facts.vocab_size) for _ in range(size.context + 1)]
            request = SequenceRequest(
                tuple(ids),
                pb.Sampling(seed=number),
                pb.Limits(max_tokens=size.most_tokens + SLACK),
                max_draft_length=self._most_drafts,
            )
            shared, client.free = client.free[:num_cached], client.free[num_cached:]
            sequences.append(client.submit(ClientSequence(request), num_pages=size.blocks_each, shared=shared))
            sequence = self.worker.batch.get(sequences[-1].seq_id)
            if self._foretold is not None and sequence is not None:
                self._foretold.tell(sequence, sequence.num_left)
        return sequences

    def _step(self) -> pb.StepReport:
        report = self._client.step()
        if report is None:
            raise RuntimeError(f"{self.arm.name}: the worker has nothing to do, and the sequences have not ended")
        if failed := next((part.error for part in report.sequences if part.error), ""):
            raise RuntimeError(f"{self.arm.name}: {failed}")
        return report

    def _release(self) -> None:
        for seq_id in self._client.running:
            self._client.release(seq_id)
        while self._client.running:
            if self._client.step() is None:
                raise RuntimeError(f"{self.arm.name}: {len(self._client.running)} releases are not acknowledged")

    def _wait(self) -> None:
        if self._facts.device.type == "cuda":
            torch.cuda.synchronize(self._facts.device)
