"""What a device takes for something by its own clock, and how fast a worker decodes on it."""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from overhead_arms import Arm
from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_common.worker.settings import StepsHere
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_batch import why_on_host
from space_server.model_runner import StepModel
from space_server.step_cost import StepCost
from space_server.worker import Worker

from gpu.llama import FIRST_MASK, NUM_MASKS, Foretold

_log = logging.getLogger(__name__)

FLUSH_BYTES = 512 * 1024**2
"""Written before each timed call: more than any L2 cache holds, and long enough that the host gets ahead."""

_WARM_UP = 3
_AHEAD_CYCLES = 400_000  # that the device sleeps (a fifth of a millisecond) while the host gives it the call to time


class DeviceClock:
    """Times calls on one device, with its caches cold."""

    def __init__(self, device: torch.device, *, flush_bytes: int = FLUSH_BYTES) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._flush = torch.empty(flush_bytes if self._on_gpu else 1 << 16, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], object], *, repeats: int = 20) -> float:
        """The median of `repeats` calls, without what the host takes to launch them; on a CPU of one."""
        for _ in range(_WARM_UP if self._on_gpu else 1):
            call()
        self.wait()
        return statistics.median(self._timed(call, repeats if self._on_gpu else 1))

    def _timed(self, call: Callable[[], object], repeats: int) -> list[float]:
        if not self._on_gpu:
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                call()
                times.append(time.perf_counter() - begun)
            return times
        marks = []
        for _ in range(repeats):
            self._flush.zero_()
            torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
            begin = _mark()
            call()
            marks.append((begin, _mark()))
        self.wait()
        return [begin.elapsed_time(end) / 1000.0 for begin, end in marks]

    def wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def copy_bandwidth(self, num_bytes: int) -> float:
        """Bytes per second of a copy on the device, read and written."""
        source = torch.ones(num_bytes, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.seconds(lambda: target.copy_(source), repeats=10)
        return 2 * num_bytes / seconds

    def empty_launch(self) -> float:
        """Seconds of a kernel that does next to nothing."""
        tiny = torch.zeros(1, device=self.device)
        return self.seconds(lambda: tiny.add_(1))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def device_busy(run: Callable[[], object]) -> float:
    """Seconds within `run` in which the device had something under way. Raises RuntimeError without a profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    if not spans:
        raise RuntimeError("the profiler saw no kernel: this machine does not let it")
    return covered(spans) * 1e-6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much the spans (begin, end) cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """(bytes of tensors now, most bytes that torch has taken); nothing is known of a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_reserved(device)


def graphed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`call` as a CUDA graph that is replayed; as it is on a CPU, or where it cannot be captured."""
    if device.type != "cuda":
        return call
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        _log.warning("it is timed kernel by kernel, for it cannot be captured: %s", error)
        return call
    return graph.replay


def forward_seconds(
    model: SpaceModel, kv: PagedKV, layout: DraftLayout, context: int, clock: DeviceClock
) -> tuple[int, float]:
    """Rows of a step of one sequence behind `context` ids, and the seconds of network and head on the device alone."""
    chain, device = layout.num_drafts + 1, model.facts.device
    segment = Segment([9] * chain, context, range(-(-(context + 2 * chain) // kv.block_size)), layout)
    batch = ForwardBatch.build([segment], block_size=kv.block_size, mask_ids=model.facts.mask_ids, device=device)

    def call() -> None:
        model.logits(model.forward(batch, kv)[:chain])

    return batch.num_rows, clock.seconds(graphed(call, device))


BLOCK_SIZE = 16
SLACK = 24  # tokens of each sequence beyond those that may be timed: two steps under way, and their drafts

HOST: Final[StepsHere] = "host"
DEVICE: Final[StepsHere] = "device"  # how a worker steps: each step waited for, or state and next step on the device


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
        return self.seconds / self.num_steps

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / (self.num_steps * self.batch)


@dataclass(frozen=True)
class SequenceSize:
    """What the sequences of a measurement have."""

    context: int  # positions computed before; their keys and values are zeros
    most_tokens: int  # timed, of each

    @property
    def blocks_each(self) -> int:
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
            model, num_blocks=kv.num_blocks, block_size=kv.block_size, max_sequences=max_sequences, kv=kv, cost=cost,
            controller=arm.controller(), synthetic=None if foretold is None else foretold.synthetic,
            device_steps=steps == DEVICE,
        )  # fmt: skip
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
