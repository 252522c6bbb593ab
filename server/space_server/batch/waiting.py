"""Admitted sequences whose grammar is still compiling: they hold their pages and are not stepped."""

from __future__ import annotations

from collections.abc import Callable

from space_proto import worker_pb2 as pb

from space_server.batch.running_batch import RunningBatch
from space_server.batch.sequence import RunningSequence
from space_server.grammar.grammars import Grammars, Preparation


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
