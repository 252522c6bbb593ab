"""The worker without its sockets: commands in, steps, reports out."""

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
from space_server.speculation.controller import Controller
from space_server.speculation.speculation_controller import SpeculationController
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_costs.step_cost import StepCost
from space_server.step_model import StepModel
from space_server.worker_messages.failure import TOO_LARGE, failure_message
from space_server.worker_messages.hello import PROTOCOL_MAJOR, PROTOCOL_MINOR, hello_of
from space_server.worker_messages.sequence_report import commit, say_paused
from space_server.worker_messages.step_stats import count_read, count_step

MAX_PREFILL_ROWS = 512
"""Prompt rows per step while no router says otherwise."""

SOURCE_DRAFTS = 8
"""Drafts per step where not only masks propose and nobody says how many."""

_log = logging.getLogger(__name__)


class ProtocolError(Exception):
    """The router broke the contract; the conversation cannot go on."""


class Worker:
    """Steps the sequences that the router admits, on the pages that it grants.

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
        """`max_draft_length`: most drafts per sequence and step; None: as many as the checkpoint has masks.

        `max_prefill_rows`: prompt rows per step until a Start says otherwise; `prefill_seconds`: longest step that
        they may make while others decode. `cost`: what steps cost here, as measured; it goes on learning.
        `kv`: pages to use; None: this worker allocates them. `device_steps`: sequences whose prompt is read keep their
        state on the device, and the next step of theirs is launched before the last is read; `eager`: without graphs.
        `grammars`: compiles those that sequences are bounded by; None: no sequence is.
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
        self._shapes_in_grammars = shapes_by_adapter(facts)  # drafts that a grammar bounds come true more often
        self.waiting = Waiting(grammars)
        self._clock = clock
        self._ended: float | None = None  # the last step, if there has been work since
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
        """Forget every sequence: a router has gone, or another one comes."""
        if self._device is not None:
            self._device.reset()
        self._leaving: list[int] = []  # released, but a step under way has them
        self.waiting.clear()
        self.batch = RunningBatch()
        self._started = False
        self._max_prefill_rows = self._default_prefill_rows
        self._draft_bound = self.max_draft_length

    def hello(self, incarnation: str) -> pb.Hello:
        """Who this worker is."""
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
        """Carry out one order. What goes wrong with a sequence fails it alone, unless the device is lost.

        Raises ProtocolError if the router breaks the contract.
        """
        match command.WhichOneof("command"):
            case "start":
                self._start(command.start)
            case "admit":
                with self._alone(command.admit.seq_id):
                    self._admit(command.admit)
            case "extend":
                with self._alone(command.extend.seq_id):
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
    def _alone(self, seq_id: int) -> Iterator[None]:
        """What goes wrong in the block fails this sequence, and nobody else."""
        try:
            yield
            return
        except ProtocolError:
            raise
        except AdmissionError as error:
            said, wants_memory = str(error), False
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self.facts.device):
                raise
            _log.exception("sequence %d failed before its step", seq_id)
            said = failure_message("The sequence could not be taken in", error)
        if wants_memory:
            give_back_unused()
        self.batch.fail(seq_id, said)

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
        """Forget this sequence, and say so once no step uses its pages."""
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
        """Those of them that replayed a graph of the device."""
        return 0 if self._device is None else self._device.runner.num_replays

    @property
    def has_work(self) -> bool:
        """`step` would do or say something."""
        under_way = self._device is not None and self._device.is_under_way
        runs = any(not (sequence.paused or sequence.waits) for sequence in self.batch)
        return under_way or runs or self.batch.has_news or self.waiting.is_over_for_some

    @property
    def drained(self) -> bool:
        """Draining, and nothing runs or is left to say."""
        return self.draining and len(self.batch) == 0 and not self.has_work

    def step(self, report: pb.StepReport | None = None) -> pb.StepReport | None:
        """One step of every sequence that can run, and what there is to say; None if that is nothing.

        `report`: an empty one to say it in. It is not numbered: its sender does that.
        """
        started = self._clock()
        pause = None if self._ended is None else started - self._ended
        report, device = pb.StepReport() if report is None else report, self._device
        waited = 0.0 if device is None else device.runner.waited
        self.waiting.take(self.batch)
        reads = []
        while device is not None and device.is_under_way and device.reads_first and not report.stepped:
            reads.append(device.read())
            self._say(report, reads[-1].advances)
        reads += self._launch(report)
        on_lines = [] if device is None else device.sequences
        # On a line, or just off it and said already: a report names each sequence once.
        busy = {one.seq_id for one in on_lines} | {part.seq_id for part in report.sequences}
        plan = plan_step(
            [one for one in self.batch if not (one.waits or one.seq_id in busy)],
            self._controller,
            block_size=self.block_size,
            budget=PrefillBudget(self._max_prefill_rows, self._prefill_seconds, self.cost),
            beside=on_lines,
        )
        pays = self._controller if device is None or not device.has_drafters else device.controller
        self._sources.price, self._sources.naps = pays.row_price, pays.naps
        times, begun = StepTimes(), self._clock() if on_lines else started
        advances = self._run(plan.plans, times) if plan.plans else []
        beside = device.runner.did_other_work() if device is not None and advances else None
        self._say(report, advances)
        if device is not None:
            while device.is_under_way and not (reads and report.stepped):
                reads.append(device.read())
                self._say(report, reads[-1].advances)
                if device.reads_first and not device.is_under_way:
                    reads += self._launch(report)
        self._say_paused(report, plan.out_of_slots)
        released, failed = self.batch.take_news()
        report.released.extend(released)
        report.sequences.extend(failed)
        if advances:
            seconds = self._clock() - begun if beside is None else beside
            count_step(report.stats, plan, times, seconds, self.cost)
            self._controller.stepped(sum(len(advance.tokens) for advance in advances), seconds, pause)
        for read in reads:
            count_read(report.stats, read, self.cost)
        spent = times.forward + times.sample + times.draft
        if device is not None:
            spent += device.runner.waited - waited
        ended = self._clock()
        self._ended = ended if advances and self.has_work else None
        if report.stepped:
            report.stats.host_seconds = max(0.0, ended - started - spent)
        return report if report.stepped or report.sequences or report.released else None

    def interrupted(self) -> None:
        """Something else was done here since the last step: the time until the next one is no pause between steps."""
        self._ended = None

    def _launch(self, report: pb.StepReport) -> list[StepRead]:
        """The next steps on the device; the last one is not read yet.

        Where that fails those under way are read and said, and all sequences are stepped on the host.
        """
        device = self._device
        if device is None or (report.stepped and device.is_under_way):  # failed, that would be read and said as well
            return []
        device.admit(self.batch)
        if (reads := device.launch()) is None:
            return []
        for read in reads:
            self._say(report, read.advances)
        device.give_back()
        return reads

    def _run(self, plans: list[ScheduledSequence], times: StepTimes, *, again: bool = False) -> list[SequenceOutput]:
        """The step; if it fails, each sequence by itself, so that only the culprit is harmed.

        A sequence that alone is too much for the memory is tried once `again`, with all of it that can be had.
        """
        try:
            return self.runner.run(plans, times)
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self.facts.device):
                raise
            if len(plans) == 1 and (again or not wants_memory):
                _log.exception("sequence %d failed", plans[0].sequence.seq_id)
                said = TOO_LARGE if wants_memory else failure_message("The step failed", error)
                failed = [SequenceOutput(plans[0], error=said)]
            else:
                _log.warning("a step of %d sequences failed (%s); they are stepped one by one", len(plans), error)
                failed = []
        # Only here, where the error has let go of the step's tensors, is their memory unused.
        if wants_memory:
            give_back_unused()
        return failed or [advance for plan in plans for advance in self._run([plan], times, again=len(plans) == 1)]

    def _say(self, report: pb.StepReport, advances: list[SequenceOutput]) -> None:
        """Let these sequences go on or end, and let go of those that no step under way refers to any more."""
        report.stepped = report.stepped or bool(advances)
        device = self._device
        for sequence, advance in [(one.plan.sequence, one) for one in advances]:
            if self.batch.get(sequence.seq_id) is sequence:  # not released meanwhile
                self._settle(advance, report)
            if device is not None:
                device.was_stepped(sequence.seq_id)
        if device is None:
            return
        still = [seq_id for seq_id in self._leaving if device.runner.refers_to(seq_id)]
        for seq_id in [one for one in self._leaving if one not in still]:
            self.batch.acknowledge(seq_id)
        self._leaving = still

    def _say_paused(self, report: pb.StepReport, waiting: list[RunningSequence]) -> None:
        """Who cannot go on without another page, once."""
        if self._device is not None:
            running = [one for one in self._device.sequences if self.batch.get(one.seq_id) is one]
            waiting = waiting + [one for one in running if one.num_free_slots(self.block_size) < 1]
        for sequence in waiting:
            if not sequence.paused:
                say_paused(sequence, report)

    def _settle(self, advance: SequenceOutput, report: pb.StepReport) -> None:
        """Let the sequence go on or end, and say so."""
        plan, sequence = advance.plan, advance.plan.sequence
        goes_on = advance.end is None and advance.error is None
        if plan.closes and goes_on and sequence.acceptance is not None:
            num_drafts = plan.layout.num_drafts
            by_masks = min(num_drafts, sequence.num_mask_drafts) if num_drafts else 0
            sequence.acceptance.step(sequence.draft_depth, by_masks, advance.num_accepted)
        commit(advance, report)
        if not goes_on:
            self.batch.end(sequence.seq_id)
