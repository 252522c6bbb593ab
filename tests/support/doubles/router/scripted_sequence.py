"""One sequence inside a scripted worker: the arithmetic of a SPACE step without a model."""

from __future__ import annotations

from space_proto import worker_pb2

from doubles.router.page_ledger import PageLedger, Violation, prefix_hashes
from doubles.router.script import Script


class ScriptedSequence:
    """Ids, pages and computed length; advances by chunks of prompt and then by steps of up to d+1 ids."""

    def __init__(self, admit: worker_pb2.Admit, script: Script, ledger: PageLedger, max_draft_length: int) -> None:
        self.seq_id = admit.seq_id
        self.ids = list(admit.ids)
        self.pages = list(admit.pages)
        self.computed = admit.num_cached
        self.ended = False
        self.paused = False
        self.releasing: int | None = None  # steps until the release is acknowledged
        self._admit = admit
        self._script = script
        self._ledger = ledger
        self._max_draft_length = min(max_draft_length, admit.max_draft_length, script.draft_length)
        self._num_steps = 0
        self._num_times = 0  # it was stepped in, in whatever way
        self._hashes = prefix_hashes(self.ids, [])

        size = script.block_size
        if not self.ids or not 1 <= admit.num_prompt <= len(self.ids):
            raise Violation(f"sequence {self.seq_id}: num_prompt {admit.num_prompt} of {len(self.ids)} ids")
        if admit.num_cached % size or admit.num_cached > (len(self.ids) - 1) // size * size:
            raise Violation(f"sequence {self.seq_id}: num_cached {admit.num_cached} of {len(self.ids)} ids")
        if admit.HasField("num_prompt_logprobs") and admit.num_cached:
            raise Violation(f"sequence {self.seq_id}: prompt logprobs with cached ids")
        num_shared = admit.num_cached // size
        if len(self.pages) < num_shared:
            raise Violation(f"sequence {self.seq_id}: {admit.num_cached} cached ids in {len(self.pages)} pages")
        ledger.share(self.seq_id, self.pages[:num_shared])
        ledger.grant(self.seq_id, self.pages[num_shared:])
        ledger.attend(self.seq_id, self.pages, self._hashes[: self.computed])

    @property
    def num_slots(self) -> int:
        return len(self.pages) * self._script.block_size

    def extend(self, pages: list[int]) -> None:
        """More pages at the end."""
        self._ledger.grant(self.seq_id, pages)
        self.pages += pages
        self.paused = False

    def step(self, prefill_rows: int) -> tuple[worker_pb2.SequenceReport | None, int]:
        """One step with at most `prefill_rows` prompt rows: the report, if there is anything to say, and rows used."""
        if self.ended or self.paused or self.releasing is not None:
            return None, 0
        self._num_times += 1
        if self._script.failing_id is not None and self._script.failing_id in self.ids[: self._admit.num_prompt]:
            self.ended = True
            return self._report(finish=worker_pb2.FINISH_ERROR, error="the script says this one fails"), 0
        free = self.num_slots - self.computed
        if free <= 0:
            self.paused = True
            return self._report(paused=True), 0
        if len(self.ids) == len(self._admit.ids):
            return self._prefill(min(len(self.ids) - self.computed, prefill_rows, free))
        return self._decode(free), 0

    @property
    def is_deadly(self) -> bool:
        """The worker dies of the step that was just taken."""
        marked = self._script.deadly_id is not None and self._script.deadly_id in self.ids[: self._admit.num_prompt]
        return marked and self._num_times >= self._script.deadly_steps

    def write_stale(self) -> None:
        """What a launched step still does to a sequence that the router has released."""
        for position in range(self.computed, min(self.computed + self._max_draft_length + 1, self.num_slots)):
            self._ledger.write(self.seq_id, self.pages, position, None)

    def _prefill(self, num_rows: int) -> tuple[worker_pb2.SequenceReport | None, int]:
        if num_rows == 0:
            return None, 0
        start, self.computed = self.computed, self.computed + num_rows
        self._write_and_attend(start)
        report = self._report(num_computed=self.computed)
        if self._admit.HasField("num_prompt_logprobs"):
            num_top = self._admit.num_prompt_logprobs
            # row i predicts id i+1
            foreseen = self.ids[start + 1 : min(self.computed + 1, self._admit.num_prompt)]
            report.prompt_logprobs.extend(self._logprobs(token, num_top) for token in foreseen)
        if self.computed == len(self.ids):
            self._emit(report, num_ids=1)
        return report, num_rows

    def _decode(self, free: int) -> worker_pb2.SequenceReport:
        num_left = self._admit.limits.max_tokens - (len(self.ids) - self._admit.num_prompt)
        num_drafts = max(
            0, min(self._max_draft_length, free - 1, num_left - 1, self._script.window - len(self.ids) - 1)
        )
        accepted = self._script.accepts(self.seq_id, self._num_steps, num_drafts)
        self._num_steps += 1
        report = self._report(decoded=True, num_drafted=num_drafts)
        start = self.computed
        num_before = len(self.ids)
        self._emit(report, num_ids=accepted + 1)
        self.computed = min(num_before + accepted, len(self.ids) - 1)
        report.num_accepted = min(accepted, len(self.ids) - num_before)
        report.num_computed = self.computed
        self._write_and_attend(start)
        for position in range(self.computed, start + num_drafts + 1):  # rejected drafts leave stale slots
            self._ledger.write(self.seq_id, self.pages, position, None)
        return report

    def _emit(self, report: worker_pb2.SequenceReport, num_ids: int) -> None:
        """Up to `num_ids` ids, cut at the first EOS, stop id or limit."""
        limits, sampling = self._admit.limits, self._admit.sampling
        for _ in range(num_ids):
            token = self._script.language.next_id(self.ids, self._admit.num_prompt, sampling)
            place = len(self.ids) - self._admit.num_prompt
            if self._admit.prediction:
                report.num_predicted.append(int(self._admit.prediction[place : place + 1] == [token]))
            self.ids.append(token)
            report.tokens.append(token)
            if self._admit.want_logprobs:
                report.logprobs.append(self._logprobs(token, self._admit.num_logprobs))
            num_generated = len(self.ids) - self._admit.num_prompt
            if num_generated > sampling.min_tokens and token in limits.eos_ids:
                report.finish = worker_pb2.FINISH_EOS
            elif num_generated > sampling.min_tokens and token in limits.stop_ids:
                report.finish = worker_pb2.FINISH_STOP_ID
            elif num_generated >= limits.max_tokens or len(self.ids) >= self._script.window:
                report.finish = worker_pb2.FINISH_LENGTH
            if report.finish != worker_pb2.FINISH_NONE:
                self.ended = True
                break
        prefix_hashes(self.ids, self._hashes)

    def _write_and_attend(self, start: int) -> None:
        for position in range(start, self.computed):
            self._ledger.write(self.seq_id, self.pages, position, self._hashes[position])
        self._ledger.attend(self.seq_id, self.pages, self._hashes[: self.computed])

    def _report(
        self,
        *,
        finish: worker_pb2.Finish.ValueType = worker_pb2.FINISH_NONE,
        error: str = "",
        paused: bool = False,
        decoded: bool = False,
        num_drafted: int = 0,
        num_computed: int | None = None,
    ) -> worker_pb2.SequenceReport:
        return worker_pb2.SequenceReport(
            seq_id=self.seq_id,
            finish=finish,
            error=error,
            paused=paused,
            decoded=decoded,
            num_drafted=num_drafted,
            num_computed=self.computed if num_computed is None else num_computed,
        )

    def _logprobs(self, token: int, num_top: int) -> worker_pb2.TokenLogprobs:
        """A made-up law: log-probability -(1 + id mod 7), the next ids as alternatives."""
        top = [token + i for i in range(num_top)]
        return worker_pb2.TokenLogprobs(
            id=token,
            logprob=-(1.0 + token % 7),
            top_ids=[i % self._script.vocab_size for i in top],
            top_logprobs=[-(1.0 + token % 7 + i) for i in range(num_top)],
        )
