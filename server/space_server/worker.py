"""The worker without its sockets: commands in, steps, reports out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from space_kernels.sampling import IdLogprobs
from space_proto import worker_pb2 as pb

from space_server.admission import AdmissionError, admit, check_pages
from space_server.controller import Controller, RowBudget
from space_server.draft_source import DraftSource
from space_server.limits import End
from space_server.plan import Plan, plan_step
from space_server.running_batch import RunningBatch
from space_server.step import Advance, Stepper, StepTimes
from space_server.step_model import StepModel
from space_server.synthetic import SyntheticAcceptance

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1
SOURCE_DRAFTS = 8
"""Drafts per step where a draft source proposes and nobody says how many."""

_log = logging.getLogger(__name__)

_FINISH = {
    None: pb.FINISH_NONE,
    End.EOS: pb.FINISH_EOS,
    End.STOP_ID: pb.FINISH_STOP_ID,
    End.LENGTH: pb.FINISH_LENGTH,
}


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
        max_prefill_rows: int = 512,
        controller: Controller | None = None,
        draft_source: DraftSource | None = None,
        synthetic: SyntheticAcceptance | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_draft_length`: most drafts per sequence and step; None: as many as the checkpoint has masks.

        `max_prefill_rows`: prompt rows per step until a Start says otherwise.
        """
        facts = model.facts
        self.facts = facts
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_sequences = max_sequences
        by_source = SOURCE_DRAFTS if draft_source is not None else 0
        most = max(facts.most_masks, by_source) if max_draft_length is None else max_draft_length
        self.max_draft_length = most if draft_source is not None else min(most, facts.most_masks)
        self.kv = model.allocate_kv(num_blocks, block_size)
        self.stepper = Stepper(model, self.kv, draft_source=draft_source, synthetic=synthetic, clock=clock)
        self.synthetic = synthetic
        self.draining = False
        self._controller = controller or RowBudget.for_device(facts.device.type)
        self._clock = clock
        self._default_prefill_rows = max_prefill_rows
        self._plain_seconds: dict[int, float] = {}  # by number of sequences: moving average of a plain step
        self.reset()

    def reset(self) -> None:
        """Forget every sequence: a router has gone, or another one comes."""
        self.batch = RunningBatch()
        self._started = False
        self._max_prefill_rows = self._default_prefill_rows
        self._draft_bound = self.max_draft_length

    def hello(self, incarnation: str) -> pb.Hello:
        """Who this worker is."""
        facts = self.facts
        return pb.Hello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            incarnation=incarnation,
            model_hash=facts.model_hash,
            tokenizer_hash=facts.tokenizer_hash,
            vocab_size=facts.vocab_size,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            window=facts.window,
            max_draft_length=self.max_draft_length,
            num_masks=facts.num_masks,
            mask_ids=sorted(set(facts.mask_ids)),
            dtype=str(facts.dtype).removeprefix("torch."),
            device=str(facts.device),
            has_draft_head=facts.has_draft_head,
            model_name=facts.name,
            max_sequences=self.max_sequences,
            attention=facts.attention,
            eos_ids=facts.eos_ids,
            synthetic_acceptance=self.synthetic.chances if self.synthetic is not None else (),
            adapters=[
                pb.Adapter(name=adapter.name, num_masks=adapter.num_masks, has_draft_head=adapter.has_draft_head)
                for adapter in facts.adapters
                if adapter.name
            ],
        )

    # ------------------------------------------------------------------------------------------ commands

    def apply(self, command: pb.Command) -> None:
        """Carry out one order. Raises ProtocolError if the router breaks the contract."""
        match command.WhichOneof("command"):
            case "start":
                self._start(command.start)
            case "admit":
                self._admit(command.admit)
            case "extend":
                self._extend(command.extend)
            case "release":
                self.batch.release(command.release.seq_id)
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

    def _admit(self, message: pb.Admit) -> None:
        if message.seq_id in self.batch:
            raise ProtocolError(f"The router used the sequence number {message.seq_id} twice.")
        if self.draining:
            self.batch.fail(message.seq_id, "The worker is draining and takes no new sequences.")
        elif len(self.batch) >= self.max_sequences:
            self.batch.fail(message.seq_id, f"The worker runs {self.max_sequences} sequences already, its most.")
        else:
            try:
                sequence = admit(
                    message,
                    self.facts,
                    num_blocks=self.num_blocks,
                    block_size=self.block_size,
                    max_drafts=self._draft_bound,
                )
            except AdmissionError as error:
                self.batch.fail(message.seq_id, str(error))
            else:
                self.batch.add(sequence)

    def _extend(self, extend: pb.Extend) -> None:
        sequence = self.batch.get(extend.seq_id)
        if sequence is None:
            return
        try:
            check_pages([*sequence.pages, *extend.pages], self.num_blocks)
        except AdmissionError as error:
            self.batch.fail(extend.seq_id, str(error))
            return
        sequence.pages += extend.pages
        sequence.paused = sequence.paused and not extend.pages

    # ------------------------------------------------------------------------------------------ steps

    @property
    def num_forwards(self) -> int:
        """Forward passes run in this process."""
        return self.stepper.num_forwards

    @property
    def has_work(self) -> bool:
        """`step` would do or say something."""
        return self.batch.has_news or any(not sequence.paused for sequence in self.batch)

    @property
    def drained(self) -> bool:
        """Draining, and nothing runs or is left to say."""
        return self.draining and len(self.batch) == 0 and not self.batch.has_news

    def step(self) -> pb.StepReport | None:
        """One step of every sequence that can run, and what there is to say; None if that is nothing.

        The report is not numbered: its sender does that.
        """
        started = self._clock()
        plan = plan_step(
            self.batch,
            self._controller,
            block_size=self.block_size,
            max_prefill_rows=self._max_prefill_rows,
        )
        times = StepTimes()
        advances = self._run(plan.plans, times) if plan.plans else []
        report = pb.StepReport(stepped=bool(advances))
        report.sequences.extend(self._settle(advance) for advance in advances)
        for sequence in plan.out_of_slots:
            if not sequence.paused:
                sequence.paused = True
                report.sequences.append(
                    pb.SequenceReport(seq_id=sequence.seq_id, num_computed=sequence.num_computed, paused=True)
                )
        released, failed = self.batch.take_news()
        report.released.extend(released)
        report.sequences.extend(failed)
        if advances:
            self._measure(report.stats, plan.plans, times, self._clock() - started)
        return report if advances or report.sequences or report.released else None

    def _run(self, plans: list[Plan], times: StepTimes) -> list[Advance]:
        """The step; if it fails, each sequence by itself, so that only the culprit is harmed."""
        try:
            return self.stepper.run(plans, times)
        except Exception as error:
            if len(plans) == 1:
                _log.exception("sequence %d failed", plans[0].sequence.seq_id)
                return [Advance(plans[0], error=f"The step failed: {type(error).__name__}: {_first_line(error)}")]
            _log.warning("a step of %d sequences failed (%s); they are stepped one by one", len(plans), error)
        return [advance for plan in plans for advance in self._run([plan], times)]

    def _settle(self, advance: Advance) -> pb.SequenceReport:
        """Let the sequence go on or end, and say so."""
        plan, sequence = advance.plan, advance.plan.sequence
        decoded = sequence.num_emitted > 0
        advance.commit()
        report = pb.SequenceReport(
            seq_id=sequence.seq_id,
            tokens=advance.tokens,
            logprobs=[_logprobs(entry) for entry in advance.logprobs],
            num_drafted=plan.layout.num_drafts,
            num_accepted=advance.num_accepted,
            num_computed=sequence.num_computed,
            finish=pb.FINISH_ERROR if advance.error is not None else _FINISH[advance.end],
            error=advance.error or "",
            decoded=decoded,
            prompt_logprobs=[_logprobs(entry) for entry in advance.prompt_logprobs],
        )
        if report.finish != pb.FINISH_NONE:
            self.batch.end(sequence.seq_id)
        return report

    def _measure(self, stats: pb.StepStats, plans: list[Plan], times: StepTimes, seconds: float) -> None:
        """What the step cost. `plans` were made before it, their sequences have moved on."""
        drafted = [plan.layout.num_drafts for plan in plans if plan.closes]
        stats.chain_rows = sum(drafted) + len(drafted)
        stats.mask_rows = sum(plan.layout.num_masks for plan in plans)
        stats.prefill_rows = sum(plan.num_pending - plan.closes for plan in plans)
        stats.forward_seconds, stats.sample_seconds, stats.draft_seconds = times.forward, times.sample, times.draft
        stats.host_seconds = max(0.0, seconds - times.forward - times.sample - times.draft)
        stats.num_sequences = len(plans)
        decoding = [plan.layout.num_drafts for plan in plans if plan.closes and plan.num_pending == 1]
        stats.draft_length_counts.extend(decoding.count(d) for d in range(max(decoding, default=-1) + 1))
        known = self._plain_seconds.get(len(plans))
        if stats.chain_rows == len(plans) and not stats.mask_rows and not stats.prefill_rows:
            known = seconds if known is None else 0.9 * known + 0.1 * seconds
            self._plain_seconds[len(plans)] = known
        stats.plain_step_seconds = known or 0.0


def _logprobs(entry: IdLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(id=entry.id, logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
