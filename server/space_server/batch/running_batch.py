"""The sequences of one router stream: waiting for a grammar, running, ended, and what is still to be reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from space_proto import worker_pb2 as pb

from space_server.batch.sequence import RunningSequence
from space_server.grammar.grammars import Grammars, Preparation


class RunningBatch:
    """Sequences by seq_id, oldest first."""

    def __init__(self) -> None:
        self._running: dict[int, RunningSequence] = {}
        self._ended: set[int] = set()  # reported as ended, not released yet
        self._released: list[int] = []  # to be acknowledged
        self._failed: list[pb.SequenceReport] = []  # to be reported

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(self._running.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._running or seq_id in self._ended

    def add(self, sequence: RunningSequence) -> None:
        """Add a sequence as the youngest."""
        self._running[sequence.seq_id] = sequence

    def get(self, seq_id: int) -> RunningSequence | None:
        """Return the running sequence, or None."""
        return self._running.get(seq_id)

    def end(self, seq_id: int) -> None:
        """Stop running this sequence. The router keeps its pages until it releases it."""
        self._running.pop(seq_id, None)
        self._ended.add(seq_id)

    def hand_back(self, seq_id: int) -> None:
        """Return a sequence that was never admitted, for the router to run elsewhere."""
        self.end(seq_id)
        self._failed.append(pb.SequenceReport(seq_id=seq_id, finish=pb.FINISH_RETURNED))

    def fail(self, seq_id: int, error: str) -> None:
        """End this sequence, running or never admitted, with an error."""
        sequence = self._running.get(seq_id)
        self.end(seq_id)
        self._failed.append(
            pb.SequenceReport(
                seq_id=seq_id,
                finish=pb.FINISH_ERROR,
                error=error,
                num_computed=sequence.num_computed if sequence is not None else 0,
            )
        )

    def forget(self, seq_id: int) -> None:
        """Drop this sequence without acknowledging: a step in flight may still use its pages."""
        self._running.pop(seq_id, None)
        self._ended.discard(seq_id)
        self._failed = [report for report in self._failed if report.seq_id != seq_id]

    def acknowledge(self, seq_id: int) -> None:
        """Acknowledge the release of a forgotten sequence whose pages are no longer used."""
        self._released.append(seq_id)

    @property
    def has_news(self) -> bool:
        """Whether something is to be reported without a step."""
        return bool(self._released or self._failed)

    def take_news(self) -> tuple[list[int], list[pb.SequenceReport]]:
        """Return the releases to acknowledge and the failures to report; each is returned once."""
        released, self._released = self._released, []
        failed, self._failed = self._failed, []
        return released, failed


class Waiting:
    """Starts each sequence once its grammar is compiled, or fails that sequence alone."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._preparing: dict[int, Preparation] = {}  # by sequence number
        self.woken: Callable[[], None] = lambda: None  # called from any thread when a compilation ends

    @property
    def why_none(self) -> str | None:
        """Why this worker supports no grammars; None: it does."""
        return "it was started without them" if self._grammars is None else self._grammars.why_none

    @property
    def is_over_for_some(self) -> bool:
        """Whether a compilation has ended, so that `take` would do something."""
        return any(preparation.is_over for preparation in self._preparing.values())

    def why_refused(self, sequence: RunningSequence) -> str | None:
        """Why this sequence's grammar cannot be used; None: it can be tried."""
        if self.why_none is not None:
            return f"This worker takes no grammars: {self.why_none}."
        if not sequence.limits.eos_ids | sequence.limits.stop_ids:
            return "The text of a grammar has to end, and this checkpoint has no EOS id. Set stop ids."
        return None

    def add(self, sequence: RunningSequence, grammar: pb.Grammar, *, ignores_eos: bool) -> None:
        """Start compiling the grammar of a sequence that was not refused."""
        if self._grammars is not None:
            self._preparing[sequence.seq_id] = self._grammars.prepare(
                grammar,
                eos_ids=sequence.limits.eos_ids,
                stop_ids=sequence.limits.stop_ids,
                ignores_eos=ignores_eos,
                output=sequence.ids[sequence.num_prompt :],
                done=lambda: self.woken(),
            )

    def take(self, batch: RunningBatch) -> None:
        """Start the sequences whose grammar is ready, and fail those whose grammar did not compile."""
        for seq_id, preparation in list(self._preparing.items()):
            sequence = batch.get(seq_id)
            if sequence is None:
                del self._preparing[seq_id]
                preparation.cancel()
            elif preparation.is_over:
                del self._preparing[seq_id]
                if preparation.state is None:
                    batch.fail(seq_id, preparation.error or "The grammar cannot be used.")
                else:
                    sequence.grammar, sequence.waits = preparation.state, False

    def clear(self) -> None:
        """Cancel every compilation."""
        for preparation in self._preparing.values():
            preparation.cancel()
        self._preparing.clear()
