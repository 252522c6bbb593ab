"""Steps of the real worker behind a real conversation, with what each of them did on the host, timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.grpc_server.router_session import RouterSession
from space_server.host_runner.host_runner import HostRunner, SequenceOutput, StepTimes
from space_server.scheduling.scheduled_batch import ScheduledSequence
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_server.worker_messages.hello import PROTOCOL_MAJOR

SHORTEST_PROMPT, LONGEST_PROMPT = 64, 192
"""Ids: contexts of many lengths, so that sequences cross key blocks at different steps."""
WARM_STEPS = 5
_BLOCK_SIZE = 16

Clock = Callable[[], float]


class HostTimeError(Exception):
    """The measurement cannot be made as asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: how many sequences, and the layout that all of them have."""

    batch: int
    num_drafts: int  # 0: plain decoding; k: k drafts with all groups whole
    temperature: float

    @property
    def layout(self) -> str:
        """As SPACE writes it."""
        return f"full({self.num_drafts},{self.num_drafts})" if self.num_drafts else "plain"


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """One decode step. Host parts, in the order in which they come; `computed` is the rest of the step."""

    hand_over: float  # from the end of the step before: report to the event loop, commands in
    plan: float  # layouts, and who runs
    pack: float  # rows of the segments
    attend: float  # attention plan
    verify_sequences: float  # laws of the rows, verdict, ends
    propose: float  # whose drafts, and which rows they come from
    settle: float  # sequences move on; the report is built
    other: float  # of the step, between those
    speak: float  # event loop: processor time to take the report and serialise it, beside the next step
    computed: float  # network, heads, draft head, processors and choice over the vocabulary

    @property
    def host(self) -> float:
        """All of the parts; what the event loop does counts in full, though it overlaps the next step."""
        parts: list[float] = [getattr(self, name) for name in PARTS]
        return sum(parts)


PARTS = tuple(field.name for field in fields(HostSeconds) if field.name != "computed")


class _WatchedStepper(HostRunner):
    """Keeps the times of its last run."""

    began = ended = 0.0
    times = StepTimes()
    decoding = False  # every sequence had a root and nothing else pending

    def run(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        self.began = self._clock()
        advances = super().run(plans, times)
        self.ended = self._clock()
        self.times, self.decoding = times, all(plan.closes and plan.num_pending == 1 for plan in plans)
        return advances


class _WatchedWorker(Worker):
    """Notes down every decode step."""

    def __init__(self, model: SpaceModel, cell: Cell, num_blocks: int, clock: Clock) -> None:
        super().__init__(
            model,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_sequences=cell.batch,
            max_prefill_rows=cell.batch * LONGEST_PROMPT,  # in one step: then all decode
            controller=FixedLayout.full(cell.num_drafts),
            clock=clock,
        )
        self.runner = self._watched = _WatchedStepper(model, self.kv, clock=clock)
        self.seen: list[HostSeconds | None] = []  # by report; None: no decode step
        self._cell = cell
        self._last_ended: float | None = None

    def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
        began = self._clock()
        report = super().step(report)
        ended = self._clock()
        watched, last = self._watched, self._last_ended
        if report is not None:
            whole = watched.decoding and report.stats.num_sequences == self._cell.batch
            drafted = all(sequence.num_drafted == self._cell.num_drafts for sequence in report.sequences)
            is_asked = report.stepped and whole and drafted and last is not None
            self.seen.append(self._seconds(began, ended, began - (last or began)) if is_asked else None)
        self._last_ended = ended
        return report

    def _seconds(self, began: float, ended: float, hand_over: float) -> HostSeconds:
        watched, times = self._watched, self._watched.times
        computed = times.forward + times.sample + times.draft
        known = computed + times.pack + times.attend + times.verify_sequences + times.propose
        return HostSeconds(
            hand_over=hand_over,
            plan=watched.began - began,
            pack=times.pack,
            attend=times.attend,
            verify_sequences=times.verify_sequences,
            propose=times.propose,
            settle=ended - watched.ended,
            other=watched.ended - watched.began - known,
            speak=0.0,
            computed=computed,
        )


def run_cell(
    model: SpaceModel, cell: Cell, *, num_steps: int, seed: int, clock: Clock = time.thread_time
) -> list[HostSeconds]:
    """`num_steps` decode steps with the cell's batch and layout.

    `clock` is read on the stepping thread: its processor time, or the wall's. Raises HostTimeError if the window is
    too short or there are too few masks.
    """
    most = LONGEST_PROMPT + (num_steps + 2 * WARM_STEPS) * (cell.num_drafts + 1) + 1
    if most > model.facts.window:
        raise HostTimeError(
            f"{num_steps} steps of {cell.layout} may need {most} positions; the window of {model.facts.name} has "
            f"{model.facts.window}. Take fewer steps."
        )
    if cell.num_drafts > model.facts.num_masks:
        raise HostTimeError(f"{model.facts.name} has {model.facts.num_masks} masks; {cell.layout} needs more.")
    return asyncio.run(_run(model, cell, most, num_steps, np.random.default_rng(seed), clock))


async def _run(
    model: SpaceModel, cell: Cell, most: int, num_steps: int, generator: np.random.Generator, clock: Clock
) -> list[HostSeconds]:
    num_pages = -(-most // _BLOCK_SIZE)
    worker = _WatchedWorker(model, cell, num_pages * cell.batch, clock)
    conversation = RouterSession(worker)
    conversation.receive([pb.Command(start=pb.Start(protocol_major=PROTOCOL_MAJOR, max_draft_length=cell.num_drafts))])
    conversation.receive(
        pb.Command(admit=_admit(model, cell, number, num_pages, most, generator)) for number in range(cell.batch)
    )
    conversation.start()
    spoken: list[float] = []
    try:
        while sum(seconds is not None for seconds in worker.seen) < num_steps + WARM_STEPS:
            before = time.thread_time()
            message = await conversation.message(60.0)
            if message is None or not message.report.stepped:
                raise HostTimeError(f"The sequences of {cell.layout} ended early.")
            message.SerializeToString()
            conversation.sent(message)
            spoken.append(time.thread_time() - before)
    finally:
        await conversation.stop()
    said = zip(worker.seen, spoken, strict=False)
    found = [_with_speech(seconds, speech) for seconds, speech in said if seconds is not None]
    return found[WARM_STEPS:]


def _with_speech(seconds: HostSeconds, speech: float) -> HostSeconds:
    values = {field.name: getattr(seconds, field.name) for field in fields(HostSeconds)}
    return HostSeconds(**{**values, "speak": speech})


def _admit(
    model: SpaceModel, cell: Cell, number: int, num_pages: int, most: int, generator: np.random.Generator
) -> pb.Admit:
    """A prompt of random ids; nothing ends before the steps have been taken."""
    length = int(generator.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1))
    allowed = sorted(set(range(model.facts.vocab_size)) - set(model.facts.mask_ids))
    return pb.Admit(
        seq_id=number + 1,
        ids=generator.choice(allowed, length).tolist(),
        num_prompt=length,
        pages=range(number * num_pages, (number + 1) * num_pages),
        sampling=pb.Sampling(temperature=cell.temperature, seed=number),
        limits=pb.Limits(max_tokens=most - length),
        max_draft_length=cell.num_drafts,
    )
