"""The least router there can be: it gives pages, admits, extends, releases, and writes down what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from space_proto import worker_pb2 as pb


class Steps(Protocol):
    """What a desk needs of a worker."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def apply(self, command: pb.Command) -> object: ...

    def step(self) -> pb.StepReport | None: ...


class DeskError(AssertionError):
    """The worker broke the contract, or ran out of steps."""


@dataclass(frozen=True)
class Request:
    """What a client would ask."""

    prompt: tuple[int, ...]
    sampling: pb.Sampling
    limits: pb.Limits
    max_draft_length: int = 8
    want_logprobs: bool = False
    num_logprobs: int = 0
    adapter: str = ""  # that drafts
    prediction: tuple[int, ...] = ()  # what the output is expected to be
    slots_ahead: int = 10  # granted behind the known ids: few of them shorten the chain, none would pause it


@dataclass
class Record:
    """One request's answer so far, over all its lives."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    verifications: list[tuple[int, int]] = field(default_factory=list)  # (drafted, accepted) of every decode step
    drafted_by: list[pb.DraftSource.ValueType] = field(default_factory=list)  # of each of these steps
    finish: pb.Finish.ValueType = pb.FINISH_NONE
    num_computed: int = 0  # of its present life
    seq_id: int | None = None  # None while it has no life in a worker

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt, *self.tokens]


class Desk:
    """One worker's pages and sequences. Every page is free, or held by those it was given to and not yet released."""

    def __init__(self, worker: Steps, *, max_prefill_rows: int = 4096, max_draft_length: int = 8) -> None:
        self.worker = worker
        self.free = list(range(worker.num_blocks))  # taken from the front, given back at the end: new lives, new pages
        self.holders: Counter[int] = Counter()
        self.pages: dict[int, list[int]] = {}
        self.records: dict[int, Record] = {}
        self.released: set[int] = set()
        self.num_steps = 0
        self.after_step: Callable[[Desk, pb.StepReport], None] | None = None
        self._last_seq_id = 0
        start = pb.Start(protocol_major=1, max_prefill_rows=max_prefill_rows, max_draft_length=max_draft_length)
        worker.apply(pb.Command(start=start))

    def admit(self, record: Record, *, shared: Sequence[int] = ()) -> int:
        """Give `record` a life: with everything it emitted so far, `shared` pages computed already, and fresh ones."""
        self._last_seq_id += 1
        seq_id = record.seq_id = self._last_seq_id
        record.num_computed = len(shared) * self.worker.block_size
        self.records[seq_id] = record
        self.pages[seq_id] = list(shared)
        self.holders.update(shared)
        pages = [*shared, *self._take(seq_id, self._wanted(record))]
        request = record.request
        self.worker.apply(
            pb.Command(
                admit=pb.Admit(
                    seq_id=seq_id,
                    ids=record.ids,
                    num_prompt=len(request.prompt),
                    num_cached=record.num_computed,
                    pages=pages,
                    sampling=request.sampling,
                    limits=request.limits,
                    max_draft_length=request.max_draft_length,
                    want_logprobs=request.want_logprobs,
                    num_logprobs=request.num_logprobs,
                    adapter=request.adapter,
                    prediction=request.prediction,
                )
            )
        )
        return seq_id

    def release(self, seq_id: int) -> None:
        """Stop a sequence; its pages come back with the acknowledgement."""
        self.worker.apply(pb.Command(release=pb.Release(seq_id=seq_id)))

    def step(self) -> pb.StepReport:
        """Extend who needs it, let the worker take one step, write down what it says, release who ended."""
        for seq_id, record in self.records.items():
            if record.finish == pb.FINISH_NONE and (new := self._take(seq_id, self._wanted(record))):
                self.worker.apply(pb.Command(extend=pb.Extend(seq_id=seq_id, pages=new)))
        report = self.worker.step() or pb.StepReport()
        self.num_steps += report.stepped
        for sequence in report.sequences:
            self._write_down(sequence)
        for seq_id in report.released:
            self._give_back(seq_id)
        if self.after_step is not None:
            self.after_step(self, report)
        return report

    def keep(self, pages: Sequence[int]) -> None:
        """Hold pages beyond the sequence that computed them, as a prefix cache does."""
        self.holders.update(pages)

    def drop(self, pages: Sequence[int]) -> None:
        """The end of `keep`, or of a sequence's hold."""
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                del self.holders[page]
                self.free.append(page)

    def release_and_wait(self, seq_id: int) -> Record:
        """Release, and step until it is acknowledged: every token reported until then counts."""
        self.release(seq_id)
        record = self.records[seq_id]
        for _ in range(8):
            if seq_id in self.released:
                record.seq_id = None
                return record
            self.step()
        raise DeskError(f"Sequence {seq_id} was released, and 8 steps later there is no acknowledgement.")

    def run(self, until: Callable[[], bool], *, most_steps: int = 2000) -> None:
        """Step until `until`."""
        for _ in range(most_steps):
            if until():
                return
            self.step()
        raise DeskError(f"Nothing came of {most_steps} steps.")

    def check_all_free(self) -> None:
        """Every page is free again, once."""
        if sorted(self.free) != list(range(self.worker.num_blocks)) or self.records:
            raise DeskError(f"Sequences {sorted(self.records)} still hold pages: {dict(self.holders)}.")

    def held_slots(self, seq_id: int) -> list[tuple[int, int]]:
        """(block, offset) of every computed position of a sequence."""
        size, pages = self.worker.block_size, self.pages[seq_id]
        return [(pages[p // size], p % size) for p in range(self.records[seq_id].num_computed)]

    def _wanted(self, record: Record) -> int:
        return -(-(len(record.ids) + record.request.slots_ahead) // self.worker.block_size)

    def _take(self, seq_id: int, wanted: int) -> list[int]:
        held = self.pages[seq_id]
        missing = max(0, wanted - len(held))
        if missing > len(self.free):
            raise DeskError(f"{missing} pages are missing, {len(self.free)} are free: give the worker more.")
        new, self.free = self.free[:missing], self.free[missing:]
        held.extend(new)
        self.holders.update(new)
        return new

    def _write_down(self, sequence: pb.SequenceReport) -> None:
        record = self.records.get(sequence.seq_id)
        if record is None:
            raise DeskError(f"A report about sequence {sequence.seq_id}, which does not live.")
        if sequence.finish == pb.FINISH_ERROR:
            raise DeskError(f"Sequence {sequence.seq_id} failed: {sequence.error}")
        record.tokens.extend(sequence.tokens)
        record.logprobs.extend(sequence.logprobs)
        record.num_computed = sequence.num_computed
        if record.tokens and sequence.num_computed > len(record.ids) - 1:
            raise DeskError(f"{sequence.num_computed} ids computed, {len(record.ids)} known: the last never is.")
        if sequence.decoded:
            record.verifications.append((sequence.num_drafted, sequence.num_accepted))
            record.drafted_by.append(sequence.draft_source)
        if sequence.finish != pb.FINISH_NONE:
            record.finish = sequence.finish
            self.release(sequence.seq_id)

    def _give_back(self, seq_id: int) -> None:
        if seq_id not in self.records:
            raise DeskError(f"Sequence {seq_id} is acknowledged, and was not there.")
        self.released.add(seq_id)
        del self.records[seq_id]
        self.drop(self.pages.pop(seq_id))
