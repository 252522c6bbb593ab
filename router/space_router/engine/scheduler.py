"""The scheduler of one worker. It does no I/O: requests and reports go in, commands come out."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from space_proto import worker_pb2

from space_router.engine.errors import ProtocolViolation
from space_router.engine.kv_offload import KVOffload, PrefixBlock
from space_router.engine.pages import PagePool
from space_router.engine.request import worker_messages
from space_router.engine.request.encoding import Chunk, EncodedPart, Encoding
from space_router.engine.request.request import Delta, Grammar, ServedLora
from space_router.engine.request.request_state import (
    MAX_BLOCKS_AHEAD,
    Phase,
    ReportResult,
    RequestState,
    SequenceStep,
    SequenceUpdate,
    WorkerSequence,
)
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.state_cache import StateCache


@dataclass(frozen=True)
class Placement:
    """The blocks of a possible admission."""

    prefix: list[PrefixBlock]  # known blocks of its prefix
    shared: list[int]  # of them, those in the KV cache
    num_fresh: int  # further blocks that it needs, also for what is restored from host memory


MAX_KNOWN_GRAMMARS = 64  # remembered, most recently used last; the worker's own cache is bounded too


def check_sequence(
    part: worker_pb2.SequenceReport, delta: Delta, sequence: WorkerSequence | None, facts: WorkerModelFacts
) -> WorkerSequence:
    """Return the sequence that a part of a report is about. Raises ProtocolViolation if the part is impossible for it.

    `delta`: the part as read by `worker_messages.delta`.
    """
    if sequence is None:
        raise ProtocolViolation(f"a report about sequence {part.seq_id}, which does not run")
    live, num_tokens = sequence.live, len(delta.tokens)
    num_ids, num_computed = len(live.ids) + num_tokens, part.num_computed
    bound = min(num_ids - 1, sequence.num_slots)
    wrong = None
    if sequence.finished and (num_tokens or part.finish):
        wrong = "goes on after its end"
    elif num_ids > live.num_prompt + live.max_tokens:
        wrong = f"emitted {num_ids - live.num_prompt} ids, {live.max_tokens} are allowed"
    elif num_tokens and max(delta.tokens) >= facts.vocab_size:
        wrong = f"emitted id {max(delta.tokens)}; there are {facts.vocab_size}"
    elif num_computed > bound:
        wrong = f"has computed {num_computed} ids; at most {bound} are possible"
    elif num_computed < sequence.computed and (num_tokens or delta.decoded):
        wrong = f"has computed {num_computed} ids after {sequence.computed}"
    elif delta.accepted > delta.drafted or (delta.decoded and num_tokens > delta.accepted + 1):
        wrong = f"emitted {num_tokens} ids where {delta.accepted} of {delta.drafted} drafts were accepted"
    elif (live.request.pooling is not None and part.finish == worker_pb2.FINISH_LENGTH) != bool(delta.embedding):
        wrong = "has an embedding" if delta.embedding else "has no embedding"
    elif live.request.want_logprobs and len(delta.logprobs) != num_tokens:
        wrong = f"has {len(delta.logprobs)} logprobs for {num_tokens} ids"
    if wrong is not None:
        raise ProtocolViolation(f"sequence {part.seq_id} {wrong}")
    return sequence


@dataclass(frozen=True)
class PendingPrefix:
    """A prefix that a running request is computing and another request could share."""

    leader: RequestState
    num_ids: int  # common leading ids, in full blocks


class PendingPrefixes:
    """The full blocks of admitted prompts until they are in the prefix cache."""

    def __init__(self, cache: KVOffload, facts: WorkerModelFacts) -> None:
        self._cache = cache
        self._block_size, self._rope_switch = facts.block_size, facts.rope_switch
        self._may_share = not facts.is_recurrent
        self._by_key: dict[bytes, WorkerSequence] = {}  # key of a block -> sequence whose prefill computes it

    def find(self, live: RequestState) -> PendingPrefix | None:
        """Return the pending prefix that `live` could share beyond the cached one, or None."""
        if not self._by_key or not live.request.share_prefix or live.reads_whole_prompt:
            return None
        num_whole = (len(live.ids) - 1) // self._block_size
        live.choose_angles(self._rope_switch)
        keys = live.keys(self._block_size, num_whole)
        start = num_pending = len(self._cache.lookup_prefix(keys[:num_whole]))
        leader = self._by_key.get(keys[start]) if start < num_whole else None
        while leader and num_pending < num_whole and self._by_key.get(keys[num_pending]) is leader:
            num_pending += 1
        return PendingPrefix(leader.live, num_pending * self._block_size) if leader else None

    def add(self, sequence: WorkerSequence) -> None:
        """Add the full blocks of an admitted prompt."""
        live = sequence.live
        if not self._may_share or not live.request.share_prefix or sequence.awaits_grammar:
            return
        sequence.num_pending = sequence.num_admitted // self._block_size
        for key in live.keys(self._block_size, sequence.num_pending)[sequence.num_published : sequence.num_pending]:
            self._by_key.setdefault(key, sequence)

    def discard(self, sequence: WorkerSequence, num_blocks: int) -> None:
        """Remove a sequence's first `num_blocks` blocks: they are cached now, or will not be computed."""
        num_blocks = min(num_blocks, sequence.num_pending)
        if num_blocks <= sequence.num_published:
            return
        keys = sequence.live.keys(self._block_size, num_blocks)
        for key in keys[sequence.num_published : num_blocks]:
            if self._by_key.get(key) is sequence:
                del self._by_key[key]

    def check(self) -> None:
        """Raise ValueError if a released sequence has pending blocks. For tests."""
        if any(sequence.step is SequenceStep.RELEASED for sequence in self._by_key.values()):
            raise ValueError("a released sequence still has pending blocks")


FORGETTING = 0.02  # weight of one decode step in the moving average of drafts
PREFILL_STEPS_AHEAD = 2  # steps' worth of prompt that may wait in the worker, so that it never idles


class Scheduler:
    """The sequences and pages of one incarnation of one worker.

    Commands are collected until `take_commands`. "Oldest" and "youngest" refer to the request's arrival, not to its
    admission, so a preempted request keeps its rank.
    """

    def __init__(self, facts: WorkerModelFacts, *, max_prefill_rows: int, max_draft_length: int | None) -> None:
        """`max_prefill_rows`: prompt rows per step; `max_draft_length`: the server's limit, None for the worker's."""
        self.facts = facts
        self.pool = PagePool(facts.num_blocks)
        self.offload = KVOffload(self.pool, facts.num_host_blocks)
        self.pending_prefixes = PendingPrefixes(self.offload, facts)
        self.states = StateCache(facts.num_state_slots)
        self.sequences: dict[int, WorkerSequence] = {}  # by seq_id, until their release is acknowledged
        self.num_running = 0  # sequences that are not released
        self.num_prefill_ahead = 0  # prompt ids that wait in the worker: sum of `_prefill_share`
        self.num_preemptions = 0
        self.closing = False  # the worker finishes its sequences and accepts no more
        bound = facts.max_draft_length if max_draft_length is None else max_draft_length
        self.max_draft_length = min(bound, facts.max_draft_length)
        self._max_prefill_rows = max_prefill_rows
        self._num_expected = 0  # blocks that unacknowledged releases will free
        self._next_seq_id = 1
        self._last_report_no = 0
        self._needs_pages: dict[int, WorkerSequence] = {}  # want more pages than they have
        self._by_request: dict[RequestState, WorkerSequence] = {}
        self._num_drafted = float(self.max_draft_length)  # per sequence and decode step, moving average
        self._blocked: RequestState | None = None  # found no room; no resources were freed since
        self._grammars: OrderedDict[Grammar | None, None] = OrderedDict()  # of sequences that have begun to compute
        self._commands: list[worker_pb2.Command] = []
        self.encodings: dict[int, Chunk] = {}  # texts at the encoder, by encode_id
        self._last_encode_id = 0
        self.loras = {digest for _, digest in facts.loras}  # loaded, or being loaded, by hash
        self.lora_answers = dict.fromkeys(self.loras, "")  # by hash: why it could not be loaded; "": it is

    def take_commands(self) -> list[worker_pb2.Command]:
        commands, self._commands = self._commands, []
        return commands

    # Admission.

    def fits(self, live: RequestState) -> bool:
        """Whether this request could finish here if it ran alone."""
        num_ids = live.num_prompt + live.max_tokens  # workers may have windows of different lengths
        return live.final_slots <= self.facts.num_slots and num_ids <= self.facts.window

    def is_blocked(self, live: RequestState) -> bool:
        """Whether this request found no room here and nothing was freed since."""
        return live is self._blocked

    def placement(self, live: RequestState) -> Placement | None:
        """Return the blocks that `live` would use if admitted now, or None if there is no room yet."""
        if live is self._blocked or len(self.sequences) >= self.facts.max_sequences or not self.fits(live):
            return None
        if self.closing or self.runs_suspect or (live.is_suspect and self.sequences):
            return None
        placement = self._placement(live)
        if placement is None:
            self._blocked = live
        return placement

    @property
    def runs_suspect(self) -> bool:
        """Whether a quarantined request runs here, beside which no other may run."""
        return self.num_running == 1 and self.running[0].live.is_suspect

    def _shares(self, live: RequestState) -> bool:
        """Whether blocks of the request may come from the prefix cache, and go there."""
        return live.request.share_prefix and self.facts.shares_prefixes

    def _placement(self, live: RequestState) -> Placement | None:
        size, num_ids = self.facts.block_size, len(live.ids)
        live.choose_angles(self.facts.rope_switch)
        prefix: list[PrefixBlock] = []
        if self._shares(live) and not live.reads_whole_prompt:
            # The last id is always computed, into an unshared block: its row gives the next token.
            num_whole = (num_ids - 1) // size
            keys = live.keys(size, num_whole)[:num_whole]
            prefix = self.offload.lookup_prefix(keys)
            if self.facts.is_recurrent:
                prefix = prefix[: self.states.num_usable(keys[: len(prefix)])]
        # A long prompt counts at most one step's rows, so that it does not keep short ones out.
        room = PREFILL_STEPS_AHEAD * self._max_prefill_rows - self.num_prefill_ahead
        if self.num_prefill_ahead and num_ids - len(prefix) * size > room:
            return None
        shared = [known.block for known in prefix if not known.is_offloaded]
        num_fresh = _blocks(min(num_ids + 1, self._most_slots(live)), size) - len(shared)
        # Keep one block per running sequence free, so that the new one is not preempted at once. An empty worker has
        # room for every request that `fits`.
        reserve = self.num_running if self.sequences else 0
        if num_fresh + self.pool.num_unheld(shared) + reserve > self.pool.num_available:
            return None
        return Placement(prefix, shared, num_fresh)

    def num_ids(self, placement: Placement) -> int:
        """Return the number of ids whose keys and values are already cached."""
        return len(placement.prefix) * self.facts.block_size

    def admit(self, live: RequestState, placement: Placement) -> WorkerSequence:
        """Admit a request with a placement that `placement` has just returned."""
        pages = self._take(live, placement)
        num_cached = self.num_ids(placement)
        # Another worker may draft less than the one that the request was checked against.
        num_forced = min(live.request.num_forced_drafts, self._max_forced_drafts(live))
        sequence = WorkerSequence(
            self._next_seq_id,
            live,
            pages,
            num_cached,
            block_size=self.facts.block_size,
            num_drafted=num_forced or min(self._draft_bound(live), math.ceil(self._num_drafted - 0.1)),
            most_slots=self._most_slots(live),
        )
        grammar = live.request.sampling.grammar
        sequence.awaits_grammar = grammar is not None and grammar not in self._grammars
        self._next_seq_id += 1
        self.sequences[sequence.seq_id] = sequence
        self._by_request[live] = sequence
        self.num_running += 1
        self.num_prefill_ahead += self._prefill_share(sequence)
        self.pending_prefixes.add(sequence)
        if live.request.lora is not None:
            self.load_lora(live.request.lora)
        live.phase = Phase.RUNNING
        if not live.num_generated:
            live.instruction_set = self.facts.instruction_set
        load_state = self._hold_states(sequence, len(placement.prefix))
        self._commands.append(
            worker_messages.admit(
                live,
                sequence.seq_id,
                pages,
                num_cached,
                load_state=load_state,
                keep_states=sequence.held_states,
                max_draft_length=self._draft_bound(live),
                num_forced_drafts=num_forced,
            )
        )
        self._request_pages(sequence)
        return sequence

    def _hold_states(self, sequence: WorkerSequence, num_shared: int) -> int | None:
        """Hold slots for the recurrent states that a sequence is to keep; return that of the one behind its shared
        blocks."""
        live, size = sequence.live, self.facts.block_size
        if not self.facts.is_recurrent or not self._shares(live):
            return None
        num_whole = (len(live.ids) - 1) // size
        keys = live.keys(size, num_whole)[:num_whole]
        load_state = self.states.use(keys[num_shared - 1]) if num_shared else None
        sequence.held_states = self.states.hold(keys, begun=num_shared, block_size=size)
        return load_state

    def _take(self, live: RequestState, placement: Placement) -> list[int]:
        """Return the held pages of a placement, in order of position; what host memory has is restored."""
        self.pool.hold(placement.shared)
        keys = live.keys(self.facts.block_size, len(placement.prefix)) if placement.prefix else []
        offloaded = [key for known, key in zip(placement.prefix, keys, strict=False) if known.is_offloaded]
        fresh = self.offload.take(placement.num_fresh, self._commands, frozenset(offloaded))
        if not offloaded:
            return placement.shared + fresh
        self.offload.restore(fresh[: len(offloaded)], offloaded, self._commands)
        blocks = iter(fresh)
        return [next(blocks) if known.is_offloaded else known.block for known in placement.prefix] + list(blocks)

    def load_lora(self, lora: ServedLora) -> None:
        """Have the worker load a LoRA, unless it has."""
        if lora.digest not in self.loras:
            self.loras.add(lora.digest)
            self.lora_answers.pop(lora.digest, None)
            self._commands.append(worker_messages.load_lora(lora))

    def unload_lora(self, digest: str) -> None:
        """Have the worker forget a LoRA that no request uses any more."""
        if digest in self.loras:
            self.loras.remove(digest)
            self.lora_answers.pop(digest, None)
            self._commands.append(worker_messages.unload_lora(digest))

    def encode(self, chunk: Chunk) -> None:
        """Have the worker's encoder encode texts."""
        self._last_encode_id += 1
        self.encodings[self._last_encode_id] = chunk
        self._commands.append(worker_messages.encode(self._last_encode_id, chunk))

    def stop_encoding(self, encoding: Encoding) -> None:
        """Have the worker forget the texts of an encoding that has ended."""
        for encode_id in [one for one, chunk in self.encodings.items() if chunk.encoding is encoding]:
            del self.encodings[encode_id]
            self._commands.append(worker_messages.stop_encoding(encode_id))

    def _encoded(self, part: worker_pb2.Encoded) -> EncodedPart | None:
        """Return what is news of an encoding here; None: it was stopped. Raises ProtocolViolation."""
        chunk = self.encodings.get(part.encode_id)
        if chunk is None and not 1 <= part.encode_id <= self._last_encode_id:
            raise ProtocolViolation(f"texts are encoded that were not sent: {part.encode_id}")
        if chunk is None:
            return None
        num_values = 0 if self.facts.encoder is None else self.facts.encoder.num_values
        if len(part.numbers) != len(part.values) or any(number >= len(chunk.numbers) for number in part.numbers):
            raise ProtocolViolation(f"encoding {part.encode_id} has no texts {list(part.numbers)[:20]}")
        vectors = [worker_messages.vector(one) for one in part.values]
        if any(len(one) != num_values for one in vectors):
            raise ProtocolViolation(f"encoding {part.encode_id} has other than {num_values} values")
        return EncodedPart(chunk, part, vectors)

    # Reports.

    def report(self, report: worker_pb2.StepReport) -> ReportResult:
        """Apply a worker's report. Raises ProtocolViolation, after which this scheduler must not be used."""
        if report.report_no != self._last_report_no + 1:
            raise ProtocolViolation(f"report {report.report_no} came after report {self._last_report_no}")
        for seq_ids in ([part.seq_id for part in report.sequences], report.released):
            if len(set(seq_ids)) < len(seq_ids):
                raise ProtocolViolation(f"report {report.report_no} names a sequence twice: {list(seq_ids)[:20]}")
        self._last_report_no = report.report_no
        for answer in report.loras:
            self.lora_answers[answer.hash] = answer.error
            if answer.error:
                self.loras.discard(answer.hash)
        # The whole report is checked before any part is applied: ids that a request keeps must also reach its reader,
        # and nothing of a violating report does.
        parts = []
        for part in report.sequences:
            delta = worker_messages.delta(part)
            parts.append((check_sequence(part, delta, self.sequences.get(part.seq_id), self.facts), delta, part))
        for seq_id in report.released:
            if seq_id not in self.sequences or self.sequences[seq_id].step is not SequenceStep.RELEASED:
                raise ProtocolViolation(f"sequence {seq_id} is acknowledged as released, but was not to be")
        outcome = ReportResult()
        outcome.encoded = [found for part in report.encoded if (found := self._encoded(part)) is not None]
        for chunk, encoded, _ in outcome.encoded:
            chunk.num_reported += len(encoded.numbers)
            if encoded.error or encoded.returned or chunk.num_reported >= len(chunk.numbers):
                self.encodings.pop(encoded.encode_id, None)
            self.closing = self.closing or encoded.returned
        for sequence, delta, part in parts:
            if part.finish == worker_pb2.FINISH_RETURNED:
                self.closing = True
                self.recall(sequence.live)
            else:
                outcome.updates.append(self._apply(sequence, delta, part))
                if delta.decoded:
                    outcome.decoded.append(len(delta.tokens))
        for seq_id in report.released:
            self._released(self.sequences[seq_id], outcome)
        self.grant_pages()
        return outcome

    def _apply(self, sequence: WorkerSequence, delta: Delta, part: worker_pb2.SequenceReport) -> SequenceUpdate:
        live = sequence.live
        live.ids.extend(delta.tokens)
        if sequence.step is SequenceStep.DECODE:
            sequence.computed = max(sequence.computed, part.num_computed)
        else:
            self._computed(sequence, part.num_computed, decodes=bool(delta.tokens))
        num_whole = sequence.computed // self.facts.block_size
        if num_whole > sequence.num_published and self._shares(live):
            self._publish(sequence, num_whole)
        while sequence.held_states and sequence.held_states[0].position <= sequence.computed:
            self.states.written([sequence.held_states.pop(0)])
        if delta.decoded:
            sequence.drafted(delta.drafted)
        if delta.decoded and not live.request.num_forced_drafts:
            self._num_drafted += (delta.drafted - self._num_drafted) * FORGETTING
        if part.finish == worker_pb2.FINISH_READMIT:
            sequence.finished = True
            self.recall(live)
        elif part.finish:
            sequence.finished = True
            self._release(sequence)
            live.phase = Phase.ENDED
        else:
            self._request_pages(sequence)
        if delta.prompt_logprobs:
            known = max(0, live.num_prompt_logprobs - sequence.num_prompt_logprobs)
            sequence.num_prompt_logprobs += len(delta.prompt_logprobs)
            live.num_prompt_logprobs = max(live.num_prompt_logprobs, sequence.num_prompt_logprobs)
            delta = delta._replace(prompt_logprobs=delta.prompt_logprobs[known:])
        return SequenceUpdate(live, delta, part)

    def _computed(self, sequence: WorkerSequence, num_computed: int, *, decodes: bool) -> None:
        """Update a prefilling sequence: more of its prompt is computed; `decodes`: all of it."""
        num_prefill_left, share = sequence.num_prefill_left, self._prefill_share(sequence)
        if sequence.awaits_grammar and (decodes or num_computed > sequence.computed):
            sequence.awaits_grammar = False
            self._grammars[sequence.live.request.sampling.grammar] = None
            self._grammars.move_to_end(sequence.live.request.sampling.grammar)
            if len(self._grammars) > MAX_KNOWN_GRAMMARS:
                self._grammars.popitem(last=False)
        sequence.computed = max(sequence.computed, num_computed)
        if decodes and sequence.step is SequenceStep.PREFILL:
            sequence.step = SequenceStep.DECODE
        if sequence.num_prefill_left < num_prefill_left:  # rows were freed for other prompts
            self.num_prefill_ahead += self._prefill_share(sequence) - share
            self._blocked = None

    def _publish(self, sequence: WorkerSequence, num_whole: int) -> None:
        """Put the first `num_whole` blocks, which are computed, into the prefix cache."""
        keys = sequence.live.keys(self.facts.block_size, num_whole)
        for i in range(sequence.num_published, num_whole):
            self.pool.publish(sequence.pages[i], keys[i])
        self.pending_prefixes.discard(sequence, num_whole)
        sequence.num_published = num_whole

    def _released(self, sequence: WorkerSequence, outcome: ReportResult) -> None:
        """Free the pages of an acknowledged release: no launched step refers to them any more."""
        del self.sequences[sequence.seq_id]
        self.pool.give_back(sequence.pages)
        self._num_expected -= sequence.num_expected
        self._blocked = None
        del self._by_request[sequence.live]
        if sequence.live.phase is Phase.LEAVING:
            outcome.readmit.append(sequence.live)

    # Pages ahead of need.

    def caught_up(self, live: RequestState) -> None:
        """Grant pages to a request, if it runs here, whose reader has caught up."""
        if sequence := self._by_request.get(live):
            self._request_pages(sequence)
            self.grant_pages()

    def grant_pages(self) -> None:
        """Extend sequences that need pages, those without free slots first; preempt if some stay without."""
        if not self._needs_pages:
            return
        out_of_slots_first = sorted(self._needs_pages.values(), key=lambda s: (not s.out_of_slots, s.live.age))
        for sequence in out_of_slots_first:
            num_wanted = sequence.num_wanted(scarce=self._scarce)
            num_given = min(num_wanted, self.pool.num_available)
            if num_given:
                pages = self.offload.take(num_given, self._commands)
                sequence.pages += pages
                self._commands.append(worker_messages.extend(sequence.seq_id, pages))
            if num_given == num_wanted:
                del self._needs_pages[sequence.seq_id]
            elif not num_given and not sequence.out_of_slots:
                break  # no page is left, and all that follow still have slots
        self._preempt_for(
            sum(sequence.out_of_slots for sequence in out_of_slots_first if sequence.seq_id in self._needs_pages)
        )

    def _request_pages(self, sequence: WorkerSequence) -> None:
        """Note that a sequence needs pages beyond its ids: not before its next step may be the last of its prompt."""
        if (
            sequence.has_enough_slots
            or sequence.step is SequenceStep.RELEASED
            or sequence.num_prefill_left > self._max_prefill_rows
        ):
            return
        if sequence.num_wanted(scarce=self._scarce):
            self._needs_pages[sequence.seq_id] = sequence

    @property
    def _scarce(self) -> bool:
        """Whether free pages are too few to grant every sequence its slots ahead."""
        return self.pool.num_available < MAX_BLOCKS_AHEAD * self.num_running

    # Release and preemption.

    def release(self, live: RequestState) -> bool:
        """End a request here; its pages are freed once the worker acknowledges. False if it does not run here."""
        sequence = self._by_request.get(live)
        if sequence is None:
            return False
        self._release(sequence)
        live.phase = Phase.ENDED
        self.grant_pages()
        return True

    def recall(self, live: RequestState) -> bool:
        """Take a request off this worker; it is queued again once the worker acknowledges. False if it does not run."""
        sequence = self._by_request.get(live)
        if sequence is None or sequence.step is SequenceStep.RELEASED:
            return False
        self._release(sequence)
        live.phase = Phase.LEAVING
        return True

    def preempt_stalled(self) -> None:
        """Preempt the youngest sequence that only waits for its reader, unless blocks are being freed already."""
        stalled = [s for s in self.running if s.out_of_slots and s.live.lagging]
        if stalled and not self._num_expected:
            self._preempt(max(stalled, key=lambda s: s.live.age))

    def _preempt_for(self, num_out_of_slots: int) -> None:
        """Preempt the youngest sequences until one block is expected for each sequence that is out of slots."""
        shortage = num_out_of_slots - self._num_expected
        while shortage > 0 and (victim := self._victim()) is not None:
            shortage -= victim.out_of_slots and victim.seq_id in self._needs_pages
            self._preempt(victim)
            shortage -= victim.num_expected

    def _victim(self) -> WorkerSequence | None:
        """Return the youngest running sequence, but never the oldest that can continue, so that one always finishes."""
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
        self.num_prefill_ahead -= self._prefill_share(sequence)
        self.pending_prefixes.discard(sequence, sequence.num_pending)
        self.states.give_back(sequence.held_states)
        sequence.held_states = []
        sequence.step = SequenceStep.RELEASED
        sequence.num_expected = self.pool.num_sole(sequence.pages)
        self._num_expected += sequence.num_expected
        self.num_running -= 1
        self._needs_pages.pop(sequence.seq_id, None)
        self._commands.append(worker_messages.release(sequence.seq_id))

    @property
    def is_step_due(self) -> bool:
        """Whether the worker must report soon: a sequence can run a step, a release is unacknowledged, or texts are
        encoded."""
        running = (s for s in self.sequences.values() if s.step is not SequenceStep.RELEASED)
        waits = (s.out_of_slots or s.awaits_grammar for s in running)
        return not all(waits) or self.num_running < len(self.sequences) or bool(self.encodings)

    @property
    def awaits_grammar(self) -> bool:
        """Whether a sequence waits for the worker to compile its grammar."""
        return any(s.awaits_grammar and s.step is not SequenceStep.RELEASED for s in self.sequences.values())

    @property
    def running(self) -> list[WorkerSequence]:
        """The sequences that are not released."""
        return [sequence for sequence in self.sequences.values() if sequence.step is not SequenceStep.RELEASED]

    def num_given(self, live: RequestState) -> int:
        """Return the tokens that this worker has generated for a request since its admission."""
        sequence = self._by_request.get(live)
        return 0 if sequence is None else len(live.ids) - sequence.num_admitted

    def unfinished(self) -> list[RequestState]:
        """Return the unfinished requests of a lost worker, oldest first."""
        lives = [live for live in self._by_request if live.phase in (Phase.RUNNING, Phase.LEAVING)]
        return sorted(lives, key=lambda live: live.age)

    def check(self) -> None:
        """Raise ValueError if the invariants are violated. For tests."""
        self.pool.check()
        self.offload.check()
        self.states.check()
        held = {page for sequence in self.sequences.values() for page in sequence.pages}
        if len(held) != self.pool.num_held:
            raise ValueError(f"{self.pool.num_held} blocks are held, the sequences hold {len(held)}")
        running = self.running
        if self.num_running != len(running) or self.num_prefill_ahead != sum(self._prefill_share(s) for s in running):
            raise ValueError("the counts of running sequences or of their prompts are wrong")
        self.pending_prefixes.check()

    def _prefill_share(self, sequence: WorkerSequence) -> int:
        """Return the prompt rows of a sequence in the next step; 0 while its grammar may still be compiling."""
        return 0 if sequence.awaits_grammar else min(sequence.num_prefill_left, self._max_prefill_rows)

    def _max_forced_drafts(self, live: RequestState) -> int:
        return min(self.max_draft_length, self.facts.max_forced_drafts(live.request.adapter))

    def _draft_bound(self, live: RequestState) -> int:
        wanted = live.request.max_draft_length
        return self.max_draft_length if wanted is None else min(self.max_draft_length, wanted)

    def _most_slots(self, live: RequestState) -> int:
        return min(live.final_slots, self.facts.window)


def _blocks(num_slots: int, block_size: int) -> int:
    return -(-num_slots // block_size)
