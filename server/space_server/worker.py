"""Applies the router's commands, runs steps and builds reports. The sockets are in `grpc_server`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from space_model.networks.paged_kv import PagedKV
from space_proto import worker_pb2 as pb

from space_server.batch.admission import AdmissionError, admit, check_pages
from space_server.batch.running_batch import RunningBatch
from space_server.batch.sequence import RunningSequence
from space_server.batch.waiting import Waiting
from space_server.device_runner.device_runner import DeviceRunner, StepRead
from space_server.device_runner.device_scheduler import DeviceScheduler
from space_server.drafts.acceptance import Acceptance, shapes_by_adapter
from space_server.drafts.draft_source import DraftSource
from space_server.drafts.drafts import DraftSources
from space_server.grammar.grammars import Grammars
from space_server.host_runner.host_runner import HostRunner, SequenceOutput, StepTimes
from space_server.machine.device_health import is_lost
from space_server.machine.memory import give_back_unused, is_out_of_memory
from space_server.scheduling.prefill_budget import PrefillBudget
from space_server.scheduling.scheduled_batch import ScheduledSequence, plan_step
from space_server.speculation.controller import Controller, SpeculationController
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_costs.step_cost import StepCost
from space_server.step_model import StepModel
from space_server.worker_messages.failure import TOO_LARGE, failure_message
from space_server.worker_messages.hello import PROTOCOL_MAJOR, PROTOCOL_MINOR, hello_of
from space_server.worker_messages.sequence_report import commit, say_paused
from space_server.worker_messages.step_stats import count_read, count_step

MAX_PREFILL_ROWS = 512
"""Prompt tokens per step (the prefill chunk) until a router's Start sets it."""

SOURCE_DRAFTS = 8
"""Default draft bound per step where other sources than masks propose drafts."""

_log = logging.getLogger(__name__)


class ProtocolError(Exception):
    """The router violated the worker protocol; its stream is closed."""


class Worker:
    """Runs the sequences that the router admits, on the KV-cache blocks that it grants.

    worker.apply(pb.Command(admit=...)); report = worker.step()
    """

    def __init__(
        self,
        model: StepModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_sequences: int = 64,
        max_draft_length: int | None = None,
        max_prefill_rows: int = MAX_PREFILL_ROWS,
        prefill_seconds: float | None = None,
        cost: StepCost | None = None,
        controller: Controller | None = None,
        draft_source: DraftSource | None = None,
        sources: DraftSources | None = None,
        synthetic: SyntheticAcceptance | None = None,
        kv: PagedKV | None = None,
        device_steps: bool = False,
        eager: bool = False,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_draft_length`: most drafts per sequence and step; None: the checkpoint's number of masks.

        `max_prefill_rows`: prompt tokens per step until a Start sets it. `prefill_seconds`: longest duration of a step
        that mixes prompt tokens with decoding sequences. `cost`: the measured step-cost model, which keeps learning.
        `kv`: KV cache to use; None: allocate one. `device_steps`: sequences past prefill keep their state on the
        device, and their next step is launched before the last one is read. `eager`: no CUDA graphs. `grammars`: the
        grammar compiler; None: requests with a grammar are refused.
        """
        facts = model.facts
        self.facts = facts
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_sequences = max_sequences
        only_masks = draft_source is None and sources is None
        most = max(facts.most_masks, 0 if only_masks else SOURCE_DRAFTS)
        self.max_draft_length = most if max_draft_length is None else max_draft_length
        if only_masks:
            self.max_draft_length = min(self.max_draft_length, facts.most_masks)
        self._sources = sources or DraftSources()
        self.kv = model.allocate_kv(num_blocks, block_size) if kv is None else kv
        self.runner = HostRunner(model, self.kv, draft_source=draft_source, synthetic=synthetic, clock=clock)
        self.synthetic = synthetic
        self.draining = False
        self.cost = cost or StepCost.typical(facts.device.type)
        self._controller = controller or SpeculationController(self.cost)
        self._prefill_seconds = prefill_seconds
        self._shapes = shapes_by_adapter(facts)
        self._shapes_in_grammars = shapes_by_adapter(facts)  # drafts inside a grammar are accepted more often
        self.waiting = Waiting(grammars)
        self._clock = clock
        self._ended: float | None = None  # end of the last step, if work remained after it
        self._default_prefill_rows = max_prefill_rows
        self._device: DeviceScheduler | None = None
        if device_steps and draft_source is None and facts.num_ranks == 1:
            runner = DeviceRunner(
                model,
                self.kv,
                max_sequences=max_sequences,
                max_drafts=self.max_draft_length,
                eager=eager,
                synthetic=synthetic,
                clock=clock,
            )
            self._device = DeviceScheduler(runner, controller or SpeculationController(self.cost))
        self.reset()

    def reset(self) -> None:
        """Drop every sequence. Called when a router disconnects or a new one connects."""
        if self._device is not None:
            self._device.reset()
        self._leaving: list[int] = []  # released, but still used by a step in flight
        self.waiting.clear()
        self.batch = RunningBatch()
        self._started = False
        self._max_prefill_rows = self._default_prefill_rows
        self._draft_bound = self.max_draft_length

    def hello(self, incarnation: str) -> pb.Hello:
        """Return the Hello message that describes this worker to the router."""
        return hello_of(
            self.facts,
            incarnation,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_sequences=self.max_sequences,
            max_draft_length=self.max_draft_length,
            takes_grammars=self.waiting.why_none is None,
            synthetic=self.synthetic,
            cost_origin=self.cost.origin,
        )

    # ------------------------------------------------------------------------------------------ commands

    def apply(self, command: pb.Command) -> None:
        """Apply one command. A failure ends only the sequence concerned, unless the device is lost.

        Raises ProtocolError if the router violates the protocol.
        """
        match command.WhichOneof("command"):
            case "start":
                self._start(command.start)
            case "admit":
                with self._failing_alone(command.admit.seq_id):
                    self._admit(command.admit)
            case "extend":
                with self._failing_alone(command.extend.seq_id):
                    self._extend(command.extend)
            case "release":
                self._release(command.release.seq_id)
            case "drain":
                self.draining = True
            case _:
                raise ProtocolError("The router sent a command this worker does not know.")

    def _start(self, start: pb.Start) -> None:
        if self._started:
            raise ProtocolError("The router sent Start twice.")
        if start.protocol_major != PROTOCOL_MAJOR:
            raise ProtocolError(
                f"The router speaks protocol {start.protocol_major}.{start.protocol_minor}, this worker "
                f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}. Install the same version of spaceserve on both."
            )
        self._started = True
        self._max_prefill_rows = start.max_prefill_rows or self._default_prefill_rows
        self._draft_bound = min(self.max_draft_length, start.max_draft_length)

    @contextmanager
    def _failing_alone(self, seq_id: int) -> Iterator[None]:
        """Turn an exception in the block into a failure of this sequence only."""
        try:
            yield
            return
        except ProtocolError:
            raise
        except AdmissionError as error:
            message, wants_memory = str(error), False
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self.facts.device):
                raise
            _log.exception("sequence %d failed before its step", seq_id)
            message = failure_message("The sequence could not be taken in", error)
        if wants_memory:
            give_back_unused()
        self.batch.fail(seq_id, message)

    def _admit(self, message: pb.Admit) -> None:
        if message.seq_id in self.batch:
            raise ProtocolError(f"The router used the sequence number {message.seq_id} twice.")
        if self.draining:
            self.batch.hand_back(message.seq_id)
        elif len(self.batch) >= self.max_sequences:
            self.batch.fail(message.seq_id, f"The worker runs {self.max_sequences} sequences already, its most.")
        else:
            sequence = admit(
                message,
                self.facts,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_drafts=self._draft_bound,
                sources=self._sources,
            )
            refused = self.waiting.why_refused(sequence) if sequence.waits else None
            if refused is not None:
                self.batch.fail(sequence.seq_id, refused)
                return
            shapes = self._shapes_in_grammars if sequence.waits else self._shapes
            sequence.acceptance = Acceptance(shapes[sequence.adapter])
            self.batch.add(sequence)
            if sequence.waits:
                ignores_eos = not message.limits.eos_ids
                self.waiting.add(sequence, message.sampling.grammar, ignores_eos=ignores_eos)

    def _extend(self, extend: pb.Extend) -> None:
        if (sequence := self.batch.get(extend.seq_id)) is None:
            return
        check_pages(extend.pages, self.num_blocks, sequence.held_pages)
        sequence.extend(extend.pages)
        sequence.paused = sequence.paused and not extend.pages

    def _release(self, seq_id: int) -> None:
        """Drop this sequence, and acknowledge the release once no step uses its pages."""
        if self._device is not None and self._device.runner.refers_to(seq_id):
            self.batch.forget(seq_id)
            self._leaving.append(seq_id)
        else:
            self.batch.release(seq_id)

    # ------------------------------------------------------------------------------------------ steps

    @property
    def num_forwards(self) -> int:
        """Forward passes run in this process."""
        return self.runner.num_forwards + (self._device.runner.num_launches if self._device is not None else 0)

    @property
    def num_replays(self) -> int:
        """Forward passes that replayed a CUDA graph."""
        return 0 if self._device is None else self._device.runner.num_replays

    @property
    def has_work(self) -> bool:
        """Whether `step` would run a step or report something."""
        under_way = self._device is not None and self._device.is_under_way
        runs = any(not (sequence.paused or sequence.waits) for sequence in self.batch)
        return under_way or runs or self.batch.has_news or self.waiting.is_over_for_some

    @property
    def drained(self) -> bool:
        """Whether the worker is draining, runs no sequence and has nothing left to report."""
        return self.draining and len(self.batch) == 0 and not self.has_work

    def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
        """Run one step of every sequence that can run. Returns the report, or None if there is nothing to report.

        `report`: an empty message to fill. The caller numbers it.
        """
        started = self._clock()
        pause = None if self._ended is None else started - self._ended
        report, device = pb.StepReport() if report is None else report, self._device
        waited = 0.0 if device is None else device.runner.waited
        self.waiting.take(self.batch)
        reads = []
        while device is not None and device.is_under_way and device.reads_first and not report.stepped:
            reads.append(device.read())
            self._apply_outputs(report, reads[-1].outputs)
        reads += self._launch(report)
        on_device = [] if device is None else device.sequences
        # On the device, or reported just now: a report names each sequence once.
        busy = {one.seq_id for one in on_device} | {part.seq_id for part in report.sequences}
        plan = plan_step(
            [one for one in self.batch if not (one.waits or one.seq_id in busy)],
            self._controller,
            block_size=self.block_size,
            budget=PrefillBudget(self._max_prefill_rows, self._prefill_seconds, self.cost),
            beside=on_device,
        )
        pricing = self._controller if device is None or not device.has_drafters else device.controller
        self._sources.price, self._sources.is_paused = pricing.row_price, pricing.is_paused
        times, begun = StepTimes(), self._clock() if on_device else started
        outputs = self._run(plan.plans, times) if plan.plans else []
        beside = device.runner.did_other_work() if device is not None and outputs else None
        self._apply_outputs(report, outputs)
        if device is not None:
            while device.is_under_way and not (reads and report.stepped):
                reads.append(device.read())
                self._apply_outputs(report, reads[-1].outputs)
                if device.reads_first and not device.is_under_way:
                    reads += self._launch(report)
        self._report_paused(report, plan.out_of_slots)
        released, failed = self.batch.take_news()
        report.released.extend(released)
        report.sequences.extend(failed)
        if outputs:
            seconds = self._clock() - begun if beside is None else beside
            count_step(report.stats, plan, times, seconds, self.cost)
            self._controller.stepped(sum(len(output.tokens) for output in outputs), seconds, pause)
        for read in reads:
            count_read(report.stats, read, self.cost)
        spent = times.forward + times.sample + times.draft
        if device is not None:
            spent += device.runner.waited - waited
        ended = self._clock()
        self._ended = ended if outputs and self.has_work else None
        if report.stepped:
            report.stats.host_seconds = max(0.0, ended - started - spent)
        return report if report.stepped or report.sequences or report.released else None

    def interrupted(self) -> None:
        """Exclude the time until the next step from the measured pauses between steps."""
        self._ended = None

    def _launch(self, report: pb.StepReport) -> list[StepRead]:
        """Launch the next device steps; the last one launched stays unread.

        If a launch fails, the steps in flight are read and reported, and all sequences return to the host runner.
        """
        device = self._device
        if device is None or (report.stepped and device.is_under_way):  # one report holds one step of a sequence
            return []
        device.admit(self.batch)
        if (reads := device.launch()) is None:
            return []
        for read in reads:
            self._apply_outputs(report, read.outputs)
        device.give_back()
        return reads

    def _run(self, plans: list[ScheduledSequence], times: StepTimes, *, again: bool = False) -> list[SequenceOutput]:
        """Run the step. If it fails, run each sequence alone, so that only the one that causes the failure ends.

        A sequence that runs out of memory alone is tried once more (`again`) after unused memory was freed.
        """
        try:
            return self.runner.run(plans, times)
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self.facts.device):
                raise
            if len(plans) == 1 and (again or not wants_memory):
                _log.exception("sequence %d failed", plans[0].sequence.seq_id)
                message = TOO_LARGE if wants_memory else failure_message("The step failed", error)
                failed = [SequenceOutput(plans[0], error=message)]
            else:
                _log.warning("a step of %d sequences failed (%s); they are stepped one by one", len(plans), error)
                failed = []
        # The step's tensors are unreferenced only after the except block, so memory is freed here.
        if wants_memory:
            give_back_unused()
        return failed or [output for plan in plans for output in self._run([plan], times, again=len(plans) == 1)]

    def _apply_outputs(self, report: pb.StepReport, outputs: list[SequenceOutput]) -> None:
        """Apply outputs to their sequences, and acknowledge releases that no step in flight holds back any more."""
        report.stepped = report.stepped or bool(outputs)
        device = self._device
        for sequence, output in [(one.plan.sequence, one) for one in outputs]:
            if self.batch.get(sequence.seq_id) is sequence:  # not released meanwhile
                self._commit(output, report)
            if device is not None:
                device.was_stepped(sequence.seq_id)
        if device is None:
            return
        still = [seq_id for seq_id in self._leaving if device.runner.refers_to(seq_id)]
        for seq_id in [one for one in self._leaving if one not in still]:
            self.batch.acknowledge(seq_id)
        self._leaving = still

    def _report_paused(self, report: pb.StepReport, waiting: list[RunningSequence]) -> None:
        """Report sequences that cannot continue without another page; each is reported once."""
        if self._device is not None:
            running = [one for one in self._device.sequences if self.batch.get(one.seq_id) is one]
            waiting = waiting + [one for one in running if one.num_free_slots(self.block_size) < 1]
        for sequence in waiting:
            if not sequence.paused:
                say_paused(sequence, report)

    def _commit(self, output: SequenceOutput, report: pb.StepReport) -> None:
        """Advance or end the sequence, and add its output to the report."""
        plan, sequence = output.plan, output.plan.sequence
        goes_on = output.end is None and output.error is None
        if plan.closes and goes_on and sequence.acceptance is not None:
            num_drafts = plan.layout.num_drafts
            by_masks = min(num_drafts, sequence.num_mask_drafts) if num_drafts else 0
            sequence.acceptance.step(sequence.draft_depth, by_masks, output.num_accepted)
        commit(output, report)
        if not goes_on:
            self.batch.end(sequence.seq_id)
