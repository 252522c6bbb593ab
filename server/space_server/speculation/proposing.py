"""Proposals from a sequence's past, its client's prediction or its grammar, as far as they can be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from space_model.model_facts import ModelFacts

from space_server.batch.sequence import RunningSequence
from space_server.drafts.drafts import NOT_FORCED, Proposal


class Proposing:
    """Asks drafters, and cuts what they propose at the first id that could never be sampled."""

    def __init__(self, facts: ModelFacts, *, in_grammars: bool = True) -> None:
        """`in_grammars`: also propose what a grammar forces."""
        self._not_drafted, self._vocab_size = frozenset(facts.mask_ids), facts.vocab_size
        self._in_grammars = in_grammars

    def proposal(self, sequence: RunningSequence, tokens: Sequence[int], wanted: int) -> Proposal | None:
        """Return at most `wanted` ids to follow the sequence's and `tokens`, which its drafter has read; None if there
        are none.
        """
        assert sequence.drafter is not None
        if sequence.num_forced_drafts:  # all of them from masks
            return None
        grammar = sequence.grammar if self._in_grammars else None
        if grammar is None and not sequence.drafter.reads:
            return None
        forced = NOT_FORCED if grammar is None else grammar.forced(tokens, wanted)
        proposal = sequence.drafter.propose(wanted, forced)
        if proposal is None:
            return None
        ids = self.valid(sequence, tokens, proposal.ids)
        if not ids:
            return None
        return proposal if len(ids) == len(proposal.ids) else replace(proposal, ids=ids)

    def valid(self, sequence: RunningSequence, tokens: Sequence[int], drafts: list[int]) -> list[int]:
        """Return the drafts after `tokens` up to the first that could never be sampled."""
        grammar = sequence.grammar
        if not self.are_ids(drafts):
            drafts = drafts[: [self.are_ids([id_]) for id_ in drafts].index(False)]
        return drafts if grammar is None else drafts[: grammar.num_possible(tokens, drafts)]

    def are_ids(self, drafts: list[int]) -> bool:
        """Whether all are ids of the vocabulary and none is a mask."""
        if not drafts:
            return True
        return min(drafts) >= 0 and max(drafts) < self._vocab_size and self._not_drafted.isdisjoint(drafts)
