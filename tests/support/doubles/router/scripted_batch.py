"""The running batch of a scripted worker: commands in, one report per step out. No sockets, no clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from space_proto import worker_pb2

from doubles.router.page_ledger import PageLedger, Violation
from doubles.router.script import Script
from doubles.router.scripted_sequence import ScriptedSequence


@dataclass
class Figures:
    """What a scripted worker has seen, over all its lives."""

    num_steps: int = 0
    num_messages: int = 0  # of commands
    num_admits: int = 0
    num_extends: int = 0
    num_releases: int = 0
    num_cached_ids: int = 0  # over all admits
    num_computed_prompt_ids: int = 0  # rows of prefill
    num_admits_by_adapter: Counter[str] = field(default_factory=Counter)


class ScriptedBatch:
    """Sequences that step together; raises Violation where the router breaks the contract."""

    def __init__(self, script: Script, figures: Figures | None = None) -> None:
        self.script = script
        self.figures = figures or Figures()
        self.sequences: dict[int, ScriptedSequence] = {}
        self.draining = False
        self.is_dead = False  # a sequence has killed the worker
        self._ledger = PageLedger(script.num_blocks, script.block_size)
        self._seen: set[int] = set()
        self._start: worker_pb2.Start | None = None
        self._released: list[int] = []
        self._failed: list[worker_pb2.SequenceReport] = []
        self._report_no = 0

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return any(
            sequence.releasing is not None or not (sequence.ended or sequence.paused)
            for sequence in self.sequences.values()
        )

    def apply(self, command: worker_pb2.Command) -> None:
        """Heed one command."""
        kind = command.WhichOneof("command")
        if (self._start is None) != (kind == "start"):
            raise Violation(f"{kind} came {'before' if self._start is None else 'after'} Start")
        match kind:
            case "start":
                self._start = command.start
            case "admit":
                self._admit(command.admit)
            case "extend":
                self.figures.num_extends += 1
                if sequence := self.sequences.get(command.extend.seq_id):
                    sequence.extend(list(command.extend.pages))
            case "release":
                self.figures.num_releases += 1
                if sequence := self.sequences.get(command.release.seq_id):
                    sequence.releasing = self.script.release_steps
                else:
                    self._released.append(command.release.seq_id)
            case "drain":
                self.draining = True

    def _admit(self, admit: worker_pb2.Admit) -> None:
        assert self._start is not None
        if admit.seq_id in self._seen:
            raise Violation(f"seq_id {admit.seq_id} is used again")
        self._seen.add(admit.seq_id)
        if self.draining:
            report = worker_pb2.SequenceReport(seq_id=admit.seq_id, finish=worker_pb2.FINISH_RETURNED)
            self._failed.append(report)
            return
        if len(self.sequences) >= self.script.max_sequences:
            raise Violation(f"{len(self.sequences) + 1} sequences; the worker runs {self.script.max_sequences}")
        if admit.adapter and admit.adapter not in self.script.adapters:
            raise Violation(f"seq_id {admit.seq_id} asks for the adapter {admit.adapter}")
        self.figures.num_admits_by_adapter[admit.adapter] += 1
        bound = self._start.max_draft_length
        self.sequences[admit.seq_id] = ScriptedSequence(admit, self.script, self._ledger, bound)
        self.figures.num_admits += 1
        self.figures.num_cached_ids += admit.num_cached

    @property
    def has_news(self) -> bool:
        """There is something to report even without a step."""
        return bool(self._released or self._failed)

    def step(self) -> worker_pb2.StepReport:
        """One step of everything that can go on, or a report without one."""
        assert self._start is not None
        stats = worker_pb2.StepStats(plain_step_seconds=self.script.plain_step_seconds)
        reports, self._failed = self._failed, []
        rows_left = self._start.max_prefill_rows
        lengths = [0] * (self.script.draft_length + 1)
        stepped = False
        for sequence in list(self.sequences.values()):
            if sequence.releasing is not None:
                self._step_released(sequence)
                continue
            report, num_rows = sequence.step(rows_left)
            self.is_dead = self.is_dead or sequence.is_deadly
            rows_left -= num_rows
            if report is None:
                continue
            reports.append(report)
            stepped = stepped or not report.paused
            stats.num_sequences += 1
            stats.prefill_rows += num_rows
            self.figures.num_computed_prompt_ids += num_rows
            if report.decoded:
                stats.chain_rows += 1 + report.num_drafted
                stats.mask_rows += report.num_drafted
                lengths[report.num_drafted] += 1
        self._report_no += 1
        self.figures.num_steps += stepped
        result = worker_pb2.StepReport(
            report_no=self._report_no, stepped=stepped, sequences=reports, released=self._released
        )
        self._released = []
        if stepped:
            stats.draft_length_counts.extend(lengths)
            stats.forward_seconds, stats.sample_seconds, stats.draft_seconds = 0.001, 0.0001, 0.0001
            stats.host_seconds = 0.0002
            result.stats.CopyFrom(stats)
        self._spoil(result)
        return result

    def heartbeat(self) -> worker_pb2.StepReport:
        """A report that says nothing."""
        self._report_no += 1
        return worker_pb2.StepReport(report_no=self._report_no)

    def _step_released(self, sequence: ScriptedSequence) -> None:
        assert sequence.releasing is not None
        if sequence.releasing == 0:
            del self.sequences[sequence.seq_id]
            self._ledger.release(sequence.seq_id)
            self._released.append(sequence.seq_id)
        else:
            sequence.releasing -= 1
            sequence.write_stale()

    def _spoil(self, report: worker_pb2.StepReport) -> None:
        """Contradict the contract once, if the script says so and there is something to contradict with."""
        emitting = next((sequence for sequence in report.sequences if sequence.tokens), None)
        if self.script.garbage is None or emitting is None:
            return
        match self.script.garbage:
            case "report_no":
                report.report_no += 1
            case "unknown_sequence":
                emitting.seq_id = 1 << 40
            case "too_many_tokens":
                emitting.tokens.extend([4] * 10_000)
            case "computed":
                emitting.num_computed = 1 << 30
            case "vocabulary":
                emitting.tokens[0] = self.script.vocab_size
        self.script.garbage = None
