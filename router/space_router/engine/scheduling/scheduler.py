"""Who runs on one worker, and on which pages. Arithmetic only: reports and requests in, commands out."""

from __future__ import annotations

import math

from space_proto import worker_pb2

from space_router.engine.cache.pages import PagePool
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.request import worker_messages as wire
from space_router.engine.request.report_result import ReportResult, SequenceUpdate
from space_router.engine.request.request import Delta
from space_router.engine.request.request_state import Phase, RequestState
from space_router.engine.request.sequence import MAX_BLOCKS_AHEAD, SequenceStep, WorkerSequence
from space_router.engine.scheduling.known_grammars import KnownGrammars
from space_router.engine.scheduling.pending_prefixes import PendingPrefixes
from space_router.engine.scheduling.placement import Placement
from space_router.engine.scheduling.report_check import check_distinct, check_released, check_report_no, check_sequence

FORGETTING = 0.02  # weight of one decode step in the average of drafts
PREFILL_STEPS_AHEAD = 2  # steps' worth of prompt that may wait in the worker, so that it never idles


class Scheduler:
    """The sequences and pages of one incarnation of one worker.

    Commands collect until `take_commands`. Oldest and youngest are meant by the age of the request, not of the
    admission, so that a preempted request keeps its rights.
    """

    def __init__(self, facts: WorkerModelFacts, *, max_prefill_rows: int, max_draft_length: int | None) -> None:
        """`max_prefill_rows`: prompt rows per step; `max_draft_length`: the server's bound, None for the worker's."""
        self.facts = facts
        self.pool = PagePool(facts.num_blocks)
        self.pending_prefixes = PendingPrefixes(self.pool, facts.block_size)
        self.sequences: dict[int, WorkerSequence] = {}  # by seq_id, until their release is acknowledged
        self.num_running = 0  # those that are not released
        self.num_preemptions = 0
        self.closing = False  # the worker finishes what it runs and takes no more
        bound = facts.max_draft_length if max_draft_length is None else max_draft_length
        self.max_draft_length = min(bound, facts.max_draft_length)
        self._max_prefill_rows = max_prefill_rows
        self._prefill_ahead = 0  # prompt ids that wait in the worker, of each sequence those of one step at most
        self._num_expected = 0  # blocks that come back with the releases under way
        self._next_seq_id = 1
        self._last_report_no = 0
        self._needs_pages: dict[int, WorkerSequence] = {}  # want more pages than they have
        self._by_request: dict[RequestState, WorkerSequence] = {}
        self._num_drafted = float(self.max_draft_length)  # per sequence and decode step, moving average
        self._blocked: RequestState | None = None  # found no room since pages last came back
        self._grammars = KnownGrammars()
        self._commands: list[worker_pb2.Command] = []

    def take_commands(self) -> list[worker_pb2.Command]:
        """Everything to say at this moment, in order."""
        commands, self._commands = self._commands, []
        return commands

    # Admission.

    def fits(self, live: RequestState) -> bool:
        """Could this request finish here, if it were alone?"""
        num_ids = live.num_prompt + live.max_tokens  # workers may have windows of different lengths
        return live.final_slots <= self.facts.num_slots and num_ids <= self.facts.window

    def is_blocked(self, live: RequestState) -> bool:
        """It has found no room here, and nothing has come back since."""
        return live is self._blocked

    def placement(self, live: RequestState) -> Placement | None:
        """Where `live` would stand if it were admitted now; None where there is no room yet."""
        if live is self._blocked or len(self.sequences) >= self.facts.max_sequences or not self.fits(live):
            return None
        if self.closing or self.tries or (live.is_suspect and self.sequences):
            return None
        placement = self._placement(live)
        if placement is None:
            self._blocked = live
        return placement

    @property
    def tries(self) -> bool:
        """A suspect runs here, and nobody may beside it."""
        return self.num_running == 1 and self.running[0].live.is_suspect

    def _placement(self, live: RequestState) -> Placement | None:
        size, num_ids = self.facts.block_size, len(live.ids)
        shared: list[int] = []
        if live.request.share_prefix and not live.wants_prompt_logprobs:
            # The last id is always computed, into a block of its own: its row gives the next token.
            num_whole = (num_ids - 1) // size
            shared = self.pool.known(live.keys(size, num_whole)[:num_whole])
        # A long prompt takes the place of one step's rows only, so that short ones are not kept out by it.
        room = PREFILL_STEPS_AHEAD * self._max_prefill_rows - self._prefill_ahead
        if self._prefill_ahead and num_ids - len(shared) * size > room:
            return None
        num_fresh = _blocks(min(num_ids + 1, self._most_slots(live)), size) - len(shared)
        # A block for each that runs, so that the new one is not the next to be preempted; a worker that is empty
        # has room for every request that `fits`.
        reserve = self.num_running if self.sequences else 0
        if num_fresh + self.pool.num_unheld(shared) + reserve > self.pool.num_available:
            return None
        return Placement(shared, num_fresh)

    def num_ids(self, placement: Placement) -> int:
        """Ids whose keys and values the request would find."""
        return len(placement.shared) * self.facts.block_size

    def admit(self, live: RequestState, placement: Placement) -> WorkerSequence:
        """Run a request where `placement` said just now."""
        self.pool.hold(placement.shared)
        pages = placement.shared + self.pool.take(placement.num_fresh)
        num_cached = len(placement.shared) * self.facts.block_size
        sequence = WorkerSequence(
            self._next_seq_id,
            live,
            pages,
            num_cached,
            block_size=self.facts.block_size,
            num_drafted=min(self._draft_bound(live), math.ceil(self._num_drafted - 0.1)),
            most_slots=self._most_slots(live),
        )
        sequence.awaits_grammar = live.request.sampling.grammar not in self._grammars
        self._next_seq_id += 1
        self.sequences[sequence.seq_id] = sequence
        self._by_request[live] = sequence
        self.num_running += 1
        self._prefill_ahead += self._share(sequence)
        self.pending_prefixes.make(sequence)
        live.phase = Phase.RUNNING
        self._commands.append(wire.admit(live, sequence.seq_id, pages, num_cached, self._draft_bound(live)))
        self._want(sequence)
        return sequence

    # Reports.

    def report(self, report: worker_pb2.StepReport) -> ReportResult:
        """Take in what the worker did. After a ProtocolViolation this scheduler is of no more use."""
        check_report_no(report.report_no, self._last_report_no)
        check_distinct(report)
        self._last_report_no = report.report_no
        # All is checked before anything is taken in: ids that a request keeps must reach its reader, too, and of a
        # report that violates the contract nothing does.
        parts = []
        for part in report.sequences:
            delta = wire.delta(part)
            parts.append((check_sequence(part, delta, self.sequences.get(part.seq_id), self.facts), delta, part))
        released = [check_released(seq_id, self.sequences.get(seq_id)) for seq_id in report.released]
        outcome = ReportResult()
        for sequence, delta, part in parts:
            if part.finish == worker_pb2.FINISH_RETURNED:
                self.closing = True
                self.recall(sequence.live)
            else:
                outcome.advances.append(self._advance(sequence, delta, part))
                if delta.decoded:
                    outcome.decoded.append(len(delta.tokens))
        for sequence in released:
            self._released(sequence, outcome)
        self.feed()
        return outcome

    def _advance(self, sequence: WorkerSequence, delta: Delta, part: worker_pb2.SequenceReport) -> SequenceUpdate:
        live = sequence.live
        live.ids.extend(delta.tokens)
        if sequence.step is SequenceStep.DECODE:
            sequence.computed = max(sequence.computed, part.num_computed)
        else:
            self._computed(sequence, part.num_computed, decodes=bool(delta.tokens))
        num_whole = sequence.computed // self.facts.block_size
        if num_whole > sequence.num_published and live.request.share_prefix:
            self._publish(sequence, num_whole)
        if delta.decoded:
            sequence.drafted(delta.drafted)
            self._num_drafted += (delta.drafted - self._num_drafted) * FORGETTING
        if part.finish:
            sequence.finished = True
            self._release(sequence)
            live.phase = Phase.ENDED
        else:
            self._want(sequence)
        if delta.prompt_logprobs:
            known = max(0, live.num_prompt_logprobs - sequence.num_prompt_logprobs)
            sequence.num_prompt_logprobs += len(delta.prompt_logprobs)
            live.num_prompt_logprobs = max(live.num_prompt_logprobs, sequence.num_prompt_logprobs)
            delta = delta._replace(prompt_logprobs=delta.prompt_logprobs[known:])
        return SequenceUpdate(live, delta, part)

    def _computed(self, sequence: WorkerSequence, num_computed: int, *, decodes: bool) -> None:
        """More of its prompt is computed, perhaps all of it: then it decodes."""
        num_prefill_left, share = sequence.num_prefill_left, self._share(sequence)
        if sequence.awaits_grammar and (decodes or num_computed > sequence.computed):
            sequence.awaits_grammar = False
            self._grammars.add(sequence.live.request.sampling.grammar)
        sequence.computed = max(sequence.computed, num_computed)
        if decodes and sequence.step is SequenceStep.PREFILL:
            sequence.step = SequenceStep.DECODE
        if sequence.num_prefill_left < num_prefill_left:  # it has begun, at the latest
            self._prefill_ahead += self._share(sequence) - share
            self._blocked = None

    def _publish(self, sequence: WorkerSequence, num_whole: int) -> None:
        """So many whole blocks are computed: they become known."""
        keys = sequence.live.keys(self.facts.block_size, num_whole)
        for i in range(sequence.num_published, num_whole):
            self.pool.publish(sequence.pages[i], keys[i])
        self.pending_prefixes.end(sequence, num_whole)
        sequence.num_published = num_whole

    def _released(self, sequence: WorkerSequence, outcome: ReportResult) -> None:
        """No launched step refers to the pages any more: they may be used again."""
        del self.sequences[sequence.seq_id]
        self.pool.give_back(sequence.pages)
        self._num_expected -= sequence.num_expected
        self._blocked = None
        del self._by_request[sequence.live]
        if sequence.live.phase is Phase.LEAVING:
            outcome.readmit.append(sequence.live)

    # Pages ahead of need.

    def caught_up(self, live: RequestState) -> None:
        """The reader of a request that may run here reads again: it gets its pages."""
        if sequence := self._by_request.get(live):
            self._want(sequence)
            self.feed()

    def feed(self) -> None:
        """Give pages to those that want more; where some can go no further without, preempt for them."""
        if not self._needs_pages:
            return
        starving_first = sorted(self._needs_pages.values(), key=lambda s: (not s.out_of_slots, s.live.age))
        for sequence in starving_first:
            num_wanted = sequence.num_wanted(scarce=self._scarce)
            num_given = min(num_wanted, self.pool.num_available)
            if num_given:
                pages = self.pool.take(num_given)
                sequence.pages += pages
                self._commands.append(wire.extend(sequence.seq_id, pages))
            if num_given == num_wanted:
                del self._needs_pages[sequence.seq_id]
            elif not num_given and not sequence.out_of_slots:
                break  # no page is left, and none that follows is starving
        self._preempt_for(
            sum(sequence.out_of_slots for sequence in starving_first if sequence.seq_id in self._needs_pages)
        )

    def _want(self, sequence: WorkerSequence) -> None:
        """Pages beyond its ids are of use once the next step may be the last of its prompt."""
        if (
            sequence.at_ease
            or sequence.step is SequenceStep.RELEASED
            or sequence.num_prefill_left > self._max_prefill_rows
        ):
            return
        if sequence.num_wanted(scarce=self._scarce):
            self._needs_pages[sequence.seq_id] = sequence

    @property
    def _scarce(self) -> bool:
        """Pages ahead of need for one would soon be missing to another."""
        return self.pool.num_available < MAX_BLOCKS_AHEAD * self.num_running

    # Release and preemption.

    def release(self, live: RequestState) -> bool:
        """End a request here; its pages come back once the worker acknowledges. False if it does not run here."""
        sequence = self._by_request.get(live)
        if sequence is None:
            return False
        self._release(sequence)
        live.phase = Phase.ENDED
        self.feed()
        return True

    def recall(self, live: RequestState) -> bool:
        """Take a request off this worker, to be queued again once the worker acknowledges. False if it does not run."""
        sequence = self._by_request.get(live)
        if sequence is None or sequence.step is SequenceStep.RELEASED:
            return False
        self._release(sequence)
        live.phase = Phase.LEAVING
        return True

    def preempt_stalled(self) -> None:
        """Make room by the youngest of those that only wait for their readers, unless room is on its way already."""
        stalled = [s for s in self.running if s.out_of_slots and s.live.lagging]
        if stalled and not self._num_expected:
            self._preempt(max(stalled, key=lambda s: s.live.age))

    def _preempt_for(self, num_starving: int) -> None:
        """Preempt the youngest until as many blocks are expected back as sequences starve."""
        shortage = num_starving - self._num_expected
        while shortage > 0 and (victim := self._victim()) is not None:
            shortage -= victim.out_of_slots and victim.seq_id in self._needs_pages
            self._preempt(victim)
            shortage -= victim.num_expected

    def _victim(self) -> WorkerSequence | None:
        """The youngest that runs, but never the oldest of those that can go on: so somebody always finishes."""
        running = self.running
        going_on = [sequence for sequence in running if not (sequence.out_of_slots and sequence.live.lagging)]
        oldest = min(going_on, key=lambda s: s.live.age, default=None)
        return max((s for s in running if s is not oldest), key=lambda s: s.live.age, default=None)

    def _preempt(self, sequence: WorkerSequence) -> None:
        self.recall(sequence.live)
        sequence.live.statistics.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, sequence: WorkerSequence) -> None:
        if sequence.step is SequenceStep.RELEASED:
            return
        self._prefill_ahead -= self._share(sequence)
        self.pending_prefixes.end(sequence, sequence.num_promised)
        sequence.step = SequenceStep.RELEASED
        sequence.num_expected = self.pool.num_sole(sequence.pages)
        self._num_expected += sequence.num_expected
        self.num_running -= 1
        self._needs_pages.pop(sequence.seq_id, None)
        self._commands.append(wire.release(sequence.seq_id))

    @property
    def num_prefill_ahead(self) -> int:
        """Prompt ids that wait in the worker to be computed, of each sequence those of one step at most."""
        return self._prefill_ahead

    @property
    def awaits(self) -> bool:
        """The worker owes something: a step of a sequence that has all it needs, or pages that were asked back."""
        waits = (
            s.out_of_slots or s.awaits_grammar for s in self.sequences.values() if s.step is not SequenceStep.RELEASED
        )
        return not all(waits) or self.num_running < len(self.sequences)

    @property
    def awaits_grammar(self) -> bool:
        """The worker owes a step, too, once it has compiled a grammar or has given it up."""
        return any(s.awaits_grammar and s.step is not SequenceStep.RELEASED for s in self.sequences.values())

    @property
    def running(self) -> list[WorkerSequence]:
        """Those that are not released."""
        return [sequence for sequence in self.sequences.values() if sequence.step is not SequenceStep.RELEASED]

    def num_given(self, live: RequestState) -> int:
        """Tokens that this worker has given a request since it came to it."""
        sequence = self._by_request.get(live)
        return 0 if sequence is None else len(live.ids) - sequence.num_admitted

    def unfinished(self) -> list[RequestState]:
        """The requests that a lost worker leaves behind, oldest first."""
        lives = [live for live in self._by_request if live.phase in (Phase.RUNNING, Phase.LEAVING)]
        return sorted(lives, key=lambda live: live.age)

    def check(self) -> None:
        """Raise ValueError unless the books balance: for tests."""
        self.pool.check()
        held = {page for sequence in self.sequences.values() for page in sequence.pages}
        if len(held) != self.pool.num_held:
            raise ValueError(f"{self.pool.num_held} blocks are held, the sequences hold {len(held)}")
        running = self.running
        if self.num_running != len(running) or self._prefill_ahead != sum(self._share(s) for s in running):
            raise ValueError("the counts of running sequences or of their prompts are wrong")
        self.pending_prefixes.check()

    def _share(self, sequence: WorkerSequence) -> int:
        """What a sequence's prompt takes of the rows to be computed next: nothing while its grammar may be compiled."""
        return 0 if sequence.awaits_grammar else min(sequence.num_prefill_left, self._max_prefill_rows)

    def _draft_bound(self, live: RequestState) -> int:
        wanted = live.request.max_draft_length
        return self.max_draft_length if wanted is None else min(self.max_draft_length, wanted)

    def _most_slots(self, live: RequestState) -> int:
        return min(live.final_slots, self.facts.window)


def _blocks(num_slots: int, block_size: int) -> int:
    """Blocks that hold so many slots."""
    return -(-num_slots // block_size)
