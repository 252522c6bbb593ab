"""Whose drafts a sequence takes: its masks', what its own past says, or what the client predicts. Torch-free.

All are verified by the same rule: the choice changes how many steps a text takes, never the text.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Run
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from space_server.drafts.acceptance import (
    FORGET,
    LEVELS_PER_UNIT,
    MOST_LEVEL,
    STEP,
    TYPICAL,
    Acceptance,
    AcceptanceShape,
)
from space_server.drafts.lookup import Lookup
from space_server.drafts.prediction import Prediction


class DraftOrigin(Enum):
    """Who proposed a draft."""

    MASKS = "masks"
    LOOKUP = "lookup"
    PREDICTION = "prediction"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sequence's drafts came from."""

    source: DraftOrigin
    num_mask_drafts: int = 0  # leading drafts that came from masks all the same, and that the source goes on behind
    match_length: int = 0  # ids before the drafts on which the source's text and the sequence's agree
    chances: tuple[float, ...] = ()  # of each draft, given those before it; none where all came from masks


BY_MASKS = Origin(DraftOrigin.MASKS)

LENGTHS = (0, 1, 2, 3, 4, 8, 16)
"""Match lengths that are told apart: each of these up to the next."""

PRIORS = {
    DraftOrigin.LOOKUP: (
        (0.30, 0.50),
        (0.35, 0.50),
        (0.47, 0.70, 0.72),
        (0.72, 0.72, 0.78),
        (0.75, 0.77, 0.80),
        (0.80, 0.82, 0.85),
        (0.93, 0.94, 0.95),
    ),
    DraftOrigin.PREDICTION: (
        (0.30, 0.60, 0.80),
        (0.60, 0.75, 0.85),
        (0.75, 0.85, 0.90),
        (0.80, 0.85, 0.90),
        (0.85, 0.90, 0.90),
        (0.90, 0.92, 0.92),
        (0.95, 0.95, 0.95),
    ),
    DraftOrigin.GRAMMAR: (*((0.70, 0.80, 0.80),) * 6, (0.98, 0.98, 0.98)),
}
"""Chances of the first drafts, by match length, until verdicts say better; missing ones repeat the last.

Lookup: between greedy decoding and temperature 0.8 of the embedded model on HumanEval-X (see lookup.py), where an id
behind a right one is right more often than the first. Predictions: assumed, from the same law. Grammars: the text is
certain where they force it, its cut into ids is not; ids without another way count as a long match."""

NUM_DEPTHS = 8

MOST_SHIFT = MOST_LEVEL / LEVELS_PER_UNIT
"""Of log-odds, either way."""

JUDGED_EVERY = 8
"""Of proposals that cannot pay at the present price, one in so many is judged all the same: prices change."""

ASLEEP_ABOVE, AWAKE_BELOW = 1.0, 0.8
"""Prices: no draft is accepted more often than always, so above the first the past is not even read; below the second
it is read again, from where that ended."""


@dataclass(frozen=True, slots=True)
class Forced:
    """Ids that a grammar forces."""

    ids: tuple[int, ...] = ()
    certain: bool = False  # no other ids could stand there; else the same text might be cut in another way


NOT_FORCED = Forced()


@lru_cache(maxsize=4096)
def _chances(log_odds: tuple[float, ...], level: int) -> tuple[float, ...]:
    return tuple(1.0 / (1.0 + math.exp(-odds - level / LEVELS_PER_UNIT)) for odds in log_odds)


@lru_cache(maxsize=4096)
def _expected(chances: tuple[float, ...], count: int) -> float:
    """Drafts accepted of `count` with these chances; missing ones repeat the last."""
    total, reached = 0.0, 1.0
    for number in range(count):
        reached *= chances[min(number, len(chances) - 1)]
        total += reached
    return total


class DraftSources:
    """What all sequences of a worker share: who may draft, and how often whose drafts come true."""

    def __init__(self, *, lookup: bool = False, masks: bool = True) -> None:
        """`lookup`: a sequence's past is searched for its last ids; `masks`: its masks draft."""
        self.lookup, self.masks = lookup, masks
        self._price = 0.0
        self.naps = False  # reading has not paid for itself: the worker's to set
        self._is_too_dear = False
        self.shapes = {
            source: tuple(AcceptanceShape(prior, NUM_DEPTHS) for prior in priors) for source, priors in PRIORS.items()
        }

    @property
    def price(self) -> float:
        """Accepted drafts that a chain row must bring in a step, as things stand: the worker's to set."""
        return self._price

    @price.setter
    def price(self, price: float) -> None:
        self._price = price
        self._is_too_dear = price > (AWAKE_BELOW if self._is_too_dear else ASLEEP_ABOVE)

    @property
    def asleep(self) -> bool:
        """No draft can pay, or few do: nothing need be known of what might be drafted."""
        return self.naps or self._is_too_dear

    def drafter(self, num_prompt: int, prediction: Run[int], *, in_grammar: bool = False) -> Drafter | None:
        """Of a new sequence; None where only its masks can draft."""
        return Drafter(self, num_prompt, prediction) if self.lookup or prediction or in_grammar else None


class SourceAcceptance:
    """How far one sequence's drafts of one source come true more often, or less, than all sequences' do.

    What was proposed is judged whether it was taken or not: the text shows what would have come true.
    """

    def __init__(self, source: DraftOrigin, shapes: tuple[AcceptanceShape, ...]) -> None:
        self.source = source
        self._shapes = shapes
        self._shift = 0.0  # of all log-odds

    def chances(self, match_length: int) -> tuple[float, ...]:
        """Of the first, second, … draft behind a match of so many ids, given those before it."""
        return _chances(self._shape(match_length).snapshot, round(LEVELS_PER_UNIT * self._shift))

    def verify_sequences(self, proposal: Proposal, tokens: Run[int]) -> None:
        """The text went on with `tokens`. What was is forgotten little by little, and the shift stays where levels are:
        a source that has been wrong for long is believed again as soon as one that is wrong now and then.
        """
        self._shift *= 1.0 - FORGET
        shape = self._shape(proposal.match_length)
        for depth, (draft, id_) in enumerate(zip(proposal.ids, tokens, strict=False), start=1):
            accepted = draft == id_
            shape.learn(depth, accepted)
            self._shift += STEP * (accepted - proposal.chances[min(depth, len(proposal.chances)) - 1])
            if not accepted:
                break
        self._shift = max(-MOST_SHIFT, min(MOST_SHIFT, self._shift))

    def _shape(self, match_length: int) -> AcceptanceShape:
        return self._shapes[bisect_right(LENGTHS, match_length) - 1]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts that a source would take, and what they are worth."""

    trust: SourceAcceptance
    ids: list[int]  # at least one
    match_length: int
    chances: tuple[float, ...]  # by depth; missing ones repeat the last

    @property
    def expected(self) -> float:
        """Drafts that will be accepted, on average."""
        return _expected(self.chances, len(self.ids))

    def beats(self, mask_chances: tuple[float, ...]) -> bool:
        """It is worth more than drafts from masks with these chances."""
        return self.expected > _expected(mask_chances, len(mask_chances))

    def goes_on_behind(self, drafts: Run[int]) -> bool:
        """It says what they say, and more."""
        return 0 < _agreeing(drafts, self.ids) == len(drafts) < len(self.ids)

    def origin(self, num_drafts: int, behind: tuple[float, ...] = ()) -> Origin:
        """Of a chain of `num_drafts` of these drafts, the first of which are masks' too, with chances `behind`."""
        known = self.chances + self.chances[-1:] * (num_drafts - len(self.chances))
        return Origin(self.trust.source, len(behind), self.match_length, (*behind, *known[len(behind) : num_drafts]))


class Drafter:
    """Reads one sequence's text and says what may follow it."""

    def __init__(self, sources: DraftSources, num_prompt: int, prediction: Run[int]) -> None:
        self._sources, self._num_prompt, self._predicted = sources, num_prompt, tuple(prediction)
        self._looking_up, self._predicting, self._forcing = (
            SourceAcceptance(source, sources.shapes[source])
            for source in (DraftOrigin.LOOKUP, DraftOrigin.PREDICTION, DraftOrigin.GRAMMAR)
        )
        self._lookup: Lookup | None = None
        self._prediction: Prediction | None = None
        self._num_known: int | None = None  # ids read; None: nothing yet, or it sleeps
        self._proposals: list[Proposal] = []  # what was proposed to follow them

    @property
    def reads(self) -> bool:
        """It may propose something now: a client predicts the text, or it pays to read it."""
        return bool(self._predicted) or not self._sources.asleep

    def extend(self, ids: Run[int], tokens: Run[int]) -> Run[int]:
        """`tokens` follow `ids`, which is all that was known before; how many ids of the prediction appeared with each.

        Read once from the start: at first, and where a step is taken again. After a sleep only what came meanwhile is.
        """
        if not self.reads:
            if self._num_known is not None or self._proposals:
                self._num_known, self._proposals = None, []
            return ()
        if self._num_known != len(ids):
            if self._lookup is not None and self._lookup.num_ids <= len(ids):
                self._lookup.extend(ids[self._lookup.num_ids :])
            else:
                self._lookup = Lookup(ids) if self._sources.lookup else None
            self._prediction = Prediction(self._predicted) if self._predicted else None
            if self._prediction is not None:
                self._prediction.extend(ids[self._num_prompt :])
        else:
            for proposal in self._proposals:
                proposal.trust.verify_sequences(proposal, tokens)
        self._proposals = []
        self._num_known = len(ids) + len(tokens)
        if self._lookup is not None:
            self._lookup.extend(tokens)
        return () if self._prediction is None else self._prediction.extend(tokens)

    def propose(self, max_drafts: int, forced: Forced = NOT_FORCED) -> Proposal | None:
        """The drafts that are worth most; None where nothing is known, or worth its row."""
        for text, trust in ((self._prediction, self._predicting), (self._lookup, self._looking_up)):
            if text is not None and self._num_known is not None and (drafts := text.propose(max_drafts)):
                self._note(trust, drafts, text.match_length)
        if forced.ids:
            self._note(self._forcing, list(forced.ids[:max_drafts]), LENGTHS[-1] if forced.certain else 0)
        if len(self._proposals) < 2:
            return self._proposals[0] if self._proposals else None
        return max(self._proposals, key=lambda proposal: proposal.expected)

    def _note(self, trust: SourceAcceptance, drafts: list[int], length: int) -> None:
        """Propose these, if they are worth their row."""
        chances = trust.chances(length)
        if chances[0] > self._sources.price or (self._num_known or 0) % JUDGED_EVERY == 0:
            self._proposals.append(Proposal(trust, drafts, length, chances))


def mask_chances(acceptance: Acceptance | None, first: int, count: int) -> tuple[float, ...]:
    """Of drafts from masks `first`, `first`+1, …; without `acceptance`, what is typical."""
    if not count:
        return ()
    by_depth = TYPICAL if acceptance is None else _chances(acceptance.shape.snapshot, acceptance.level)
    return tuple(by_depth[min(depth, len(by_depth)) - 1] for depth in range(first, first + count))


def _agreeing(drafts: Run[int], tokens: Run[int]) -> int:
    """Ids at the front that are the same."""
    count = 0
    for draft, id_ in zip(drafts, tokens, strict=False):
        if draft != id_:
            break
        count += 1
    return count
