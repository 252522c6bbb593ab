"""What a step of the worker takes besides model computation, by batch and layout.

Host time is everything between the ends of two steps that is not model computation: planning, packing rows, the
attention plan, sampling parameters and verification, draft sources, advancing the sequences, building the report and
handing it to the event loop, and serialising it there. Model computation is the time in the network, its heads, the
draft head, and tensor operations over the vocabulary. The worker runs as it is served, behind its router session,
without the socket. The clock is the stepping thread's processor time, which other programs do not lengthen.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch
from space_common.process import collect_seldom
from space_eval.flags import whole_from
from space_model.loading.load import load_model
from space_model.malloc import keep_freed_memory
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.grpc_server import RouterSession
from space_server.host_runner import HostRunner
from space_server.model_runner import SequenceOutput, StepTimes
from space_server.scheduled_batch import ScheduledSequence
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from space_server.worker_messages import PROTOCOL_MAJOR

from perf.harness import PerfError, Report, log, numbers, table, take_turns, without_tails

BOUNDS_MS = {1: 0.3, 64: 1.5}  # upper bounds of the median host time, by batch
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 192
"""Ids: contexts of many lengths, so that sequences cross key blocks at different steps."""
WARM_STEPS = 5
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A batch, and the layout of all its sequences."""

    batch: int
    num_drafts: int  # 0: plain decoding; k: k drafts with all groups whole

    @property
    def layout(self) -> str:
        return f"full({self.num_drafts},{self.num_drafts})" if self.num_drafts else "plain"


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """One decode step. Host parts in the order in which they come; `computed` is the rest of the step."""

    hand_over: float  # from the end of the step before: report to the event loop, commands in
    plan: float  # layouts, and which sequences run
    pack: float  # rows of the segments
    attend: float  # attention plan; 0 in a step of one call
    verify: float  # sampling parameters of the rows, verification, ends
    propose: float  # draft sources
    settle: float  # sequences advance; the report is built
    other: float  # of the step, between those
    serialize: float  # event loop: processor time to take the report and serialise it, beside the next step
    computed: float  # network, heads, draft head, processors and sampling over the vocabulary

    @property
    def host(self) -> float:
        """All parts; the event loop's counts in full, though it overlaps the next step."""
        return float(sum(getattr(self, part) for part in PARTS))


PARTS = tuple(field.name for field in fields(HostSeconds) if field.name != "computed")


class _TimedRunner(HostRunner):
    """Keeps the times of its last run."""

    began = ended = 0.0
    times = StepTimes()
    decoding = False  # every sequence had a root and nothing else pending

    def run(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        self.began = self._clock()
        outputs = super().run(plans, times)
        self.ended = self._clock()
        self.times, self.decoding = times, all(plan.closes and plan.num_pending == 1 for plan in plans)
        return outputs


class _TimedWorker(Worker):
    """Records the parts of every decode step."""

    def __init__(self, model: SpaceModel, cell: Cell, num_blocks: int) -> None:
        super().__init__(
            model,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_sequences=cell.batch,
            max_prefill_rows=cell.batch * LONGEST_PROMPT,  # in one step: then all decode
            controller=FixedLayout.full(cell.num_drafts),
            clock=time.thread_time,
        )
        self.engine.host = self._timed = _TimedRunner(
            model, self.kv, controller=FixedLayout.full(cell.num_drafts), cost=self.cost, clock=time.thread_time
        )
        self.seen: list[HostSeconds | None] = []  # by report; None: not a decode step of the whole batch
        self._cell = cell
        self._last_ended: float | None = None

    def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
        began, last = time.thread_time(), self._last_ended
        report = super().step(report)
        ended = self._last_ended = time.thread_time()
        if report is not None:
            whole = self._timed.decoding and report.stats.num_sequences == self._cell.batch
            drafted = all(sequence.num_drafted == self._cell.num_drafts for sequence in report.sequences)
            counts = report.stepped and whole and drafted and last is not None
            self.seen.append(self._seconds(began, ended, began - (last or began)) if counts else None)
        return report

    def _seconds(self, began: float, ended: float, hand_over: float) -> HostSeconds:
        timed, times = self._timed, self._timed.times
        computed = times.forward + times.sample + times.draft
        known = computed + times.pack + times.attend + times.verify + times.propose
        return HostSeconds(
            hand_over=hand_over, plan=timed.began - began, pack=times.pack, attend=times.attend, verify=times.verify,
            propose=times.propose, settle=ended - timed.ended, other=timed.ended - timed.began - known, serialize=0.0,
            computed=computed,
        )  # fmt: skip


def run_cell(model: SpaceModel, cell: Cell, *, num_steps: int, seed: int) -> list[HostSeconds]:
    """At least `num_steps` decode steps. Raises PerfError if the window is too short or there are too few masks."""
    most = LONGEST_PROMPT + (num_steps + 2 * WARM_STEPS) * (cell.num_drafts + 1) + 1
    if most > model.facts.window:
        raise PerfError(
            f"{num_steps} steps of {cell.layout} may need {most} positions; the window of {model.facts.name} has "
            f"{model.facts.window}. Take fewer steps."
        )
    if cell.num_drafts > model.facts.num_masks:
        raise PerfError(f"{model.facts.name} has {model.facts.num_masks} masks; {cell.layout} needs more.")
    return asyncio.run(_run(model, cell, most, num_steps, np.random.default_rng(seed)))


async def _run(
    model: SpaceModel, cell: Cell, most: int, num_steps: int, generator: np.random.Generator
) -> list[HostSeconds]:
    num_pages = -(-most // BLOCK_SIZE)
    worker = _TimedWorker(model, cell, num_pages * cell.batch)
    session = RouterSession(worker)
    session.receive([pb.Command(start=pb.Start(protocol_major=PROTOCOL_MAJOR, max_draft_length=cell.num_drafts))])
    session.receive(
        pb.Command(admit=_admit(model, cell, number, num_pages, most, generator)) for number in range(cell.batch)
    )
    session.start()
    serialized: list[float] = []
    try:
        # Count steps up to the last serialised report: the stepping thread may be several reports ahead.
        while sum(seconds is not None for seconds in worker.seen[: len(serialized)]) < num_steps + WARM_STEPS:
            before = time.thread_time()
            message = await session.message(60.0)
            if message is None or not message.report.stepped:
                raise PerfError(f"The sequences of {cell.layout} ended early.")
            message.SerializeToString()
            session.sent(message)
            serialized.append(time.thread_time() - before)
    finally:
        await session.stop()
    steps = zip(worker.seen, serialized, strict=False)  # those after the last serialised report are left out
    return [replace(step, serialize=seconds) for step, seconds in steps if step is not None][WARM_STEPS:]


def _admit(
    model: SpaceModel, cell: Cell, number: int, num_pages: int, most: int, generator: np.random.Generator
) -> pb.Admit:
    """A greedy request with a prompt of random ids; it does not end before the steps have been taken."""
    length = int(generator.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1))
    allowed = sorted(set(range(model.facts.vocab_size)) - set(model.facts.mask_ids))
    return pb.Admit(
        seq_id=number + 1, ids=generator.choice(allowed, length).tolist(), num_prompt=length,
        pages=range(number * num_pages, (number + 1) * num_pages), sampling=pb.Sampling(seed=number),
        limits=pb.Limits(max_tokens=most - length), max_draft_length=cell.num_drafts,
    )  # fmt: skip


def run(options: argparse.Namespace) -> Report:
    keep_freed_memory()  # these two as the worker process does
    model = load_model(options.model, weights=options.weights, num_threads=1)
    collect_seldom()
    layouts = [0] if model.facts.num_masks == 0 else options.drafts
    found: dict[Cell, list[HostSeconds]] = {Cell(batch, k): [] for batch in options.batches for k in layouts}

    def turn(cell: Cell, number: int) -> None:
        log(f"round {number + 1} of {options.rounds}: batch {cell.batch}, {cell.layout}")
        found[cell] += run_cell(model, cell, num_steps=options.steps, seed=number)

    take_turns(list(found), options.rounds, turn)
    rows, records, failures = [], [], []
    for cell, steps in found.items():
        host = without_tails([1e3 * step.host for step in steps])
        parts = {part: 1e3 * statistics.median(getattr(step, part) for step in steps) for part in (*PARTS, "computed")}
        bound = BOUNDS_MS.get(cell.batch)
        rows.append((cell.batch, cell.layout, host.shown(3), bound or "–", *(f"{part:.3f}" for part in parts.values())))
        records.append({**asdict(cell), "layout": cell.layout, **asdict(host), "bound_ms": bound, "parts_ms": parts})
        if options.check and bound is not None and host.median >= bound:
            failures.append(f"batch {cell.batch}, {cell.layout}: {host.median:.3f} ms, bound {bound:g} ms.")
    head = ("batch", "layout", "host", "bound", *(part.replace("_", " ") for part in PARTS), "computation")
    notes = "Medians of steps in milliseconds of processor time; in brackets where 80 % of the steps are."
    num_steps = options.steps * options.rounds
    facts = {"model": options.model, "weights": options.weights, "torch": torch.__version__, "steps": num_steps}
    return Report("Host time of a step", notes, [table(head, rows)], {"rows": records}, facts, failures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="a folder, a hub id, or demo [demo]")
    add("--weights", default="plain", help="as of serve: auto keeps a GGUF in its blocks [plain]")
    add("--batches", type=numbers(1), default=[1, 8, 64], metavar="B,…", help="sequences [1,8,64]")
    add("--drafts", type=numbers(0), default=[0, 2, 5], metavar="K,…", help="per sequence, groups whole [0,2,5]")
    add("--steps", type=whole_from(1), default=40, help="decode steps of each cell and round [40]")
    add("--rounds", type=whole_from(1), default=3, help="times that all cells are run [3]")
    add("--check", action="store_true", help="exit with 1 if a median is above its bound")
