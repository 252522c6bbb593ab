"""Selects a sequence's drafts among its masks', its own past, its grammar's and the client's prediction. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

RUNS = (4, 2)
"""Lengths of the runs that are indexed, longest first; a match is then extended id by id.

The pair alone did as well on 60 HumanEval-X prompts of up to 200 tokens (3.15 tokens per step greedy, 1.16 at
temperature 0.8, with 8 drafts; a run of 8 besides, the same). Long texts repeat pairs by chance, so four ids decide.
"""

LONGEST = 32  # longest match measured: beyond it acceptance did not differ
MOST_IDS = 1 << 15  # ids indexed when a text is first read, from its end: 0.3 µs and 300 bytes each


class SuffixIndex:
    """A growing text, with the latest position after each run of 2 and of 4 of its ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        known = self.ids[-MOST_IDS:]
        end = len(self.ids)
        first = end - len(known)
        # Excludes the last run: nothing follows it yet.
        fours = zip(known, known[1:], known[2:], known[3:-1], strict=False)
        self._fours: dict[Sequence[int], int] = dict(zip(fours, range(first + 4, end), strict=True))
        pairs = zip(known, known[1:-1], strict=False)  # noqa: RUF007
        self._pairs: dict[Sequence[int], int] = dict(zip(pairs, range(first + 2, end), strict=True))

    def push(self, id_: int) -> None:
        """Append an id, and index the run that ended before it."""
        ids = self.ids
        num_ids = len(ids)
        if num_ids > 3:
            self._fours[tuple(ids[-4:])] = num_ids
            self._pairs[ids[-2], ids[-1]] = num_ids
        elif num_ids > 1:
            self._pairs[ids[-2], ids[-1]] = num_ids
        ids.append(id_)

    def find(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """Return the position after the longest indexed run that ends `tail`, and the length of the match; None if
        there is none. At least one id follows the position. Of equally long indexed runs the latest is used."""
        place = self._pairs.get(tuple(tail[-2:]))
        if place is None:
            return None
        place = self._fours.get(tuple(tail[-4:]), place)
        return place, match_length(self.ids, place, tail)

    def find_end(self) -> tuple[int, int] | None:
        """Return the same for the end of the text itself."""
        return self.find(self.ids)


def match_length(ids: Sequence[int], place: int, tail: Sequence[int]) -> int:
    """Return how many ids before `place` equal the last ones of `tail`, up to LONGEST."""
    most = min(place, len(tail), LONGEST)
    length = 0
    while length < most and ids[place - 1 - length] == tail[-1 - length]:
        length += 1
    return length


SHORTEST_MATCH = RUNS[-1]
"""Ids that must have occurred before, in this order.

Measured with the embedded model on 40 HumanEval-X prompts of 160 tokens, longest match, the latest where there are
several. The chance that the id behind the match is right, greedy (0.40 of the 4-grams distinct) / temperature 0.8
(0.85 distinct): after 1 id .39/.32, 2 ids .50/.44, 3 ids .81/.67, 4 to 7 ids .87/.71, 12 and more 1.00/.90. A match of
one id is worth less than any mask, and is found at every third token.
"""


class Lookup:
    """Follows a text and, where it repeats itself, predicts what comes next. A match is followed while the text
    agrees."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._index = SuffixIndex(ids)
        self._place = 0  # index of the id that may come next
        self._length = 0  # length of the match before it

    @property
    def num_ids(self) -> int:
        """Ids of the text."""
        return len(self._index.ids)

    @property
    def match_length(self) -> int:
        """Length of the match before the proposal; valid after `propose`."""
        return self._length

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        ids = self._index.ids
        for id_ in tokens:
            if self._length and ids[self._place] == id_:
                self._place += 1
                self._length = min(self._length + 1, LONGEST)
            else:
                self._length = 0
            self._index.push(id_)

    def propose(self, max_drafts: int) -> list[int]:
        """Return `max_drafts` ids that followed the longest match; none without a match of SHORTEST_MATCH ids.
        If the match reaches the end of the text, it repeats from its own start, as a periodic text would."""
        ids = self._index.ids
        if self._length < RUNS[0]:
            found = self._index.find_end()
            if found is not None and found[1] >= self._length:
                self._place, self._length = found
        if self._length < SHORTEST_MATCH:
            return []
        return _repeated(ids, self._place, max_drafts)

    def propose_behind(self, drafts: Sequence[int], max_drafts: int) -> tuple[list[int], int]:
        """Return ids that followed the longest match of the text with `drafts` behind it, and the match's length; none
        without a match of SHORTEST_MATCH ids. Valid after `propose`."""
        known, place, length = [*self._index.ids, *drafts], self._place, self._length
        for id_ in drafts:
            agrees = length > 0 and known[place] == id_
            place, length = place + agrees, min(length + 1, LONGEST) if agrees else 0
        if length < RUNS[0]:
            found = self._index.find(known[-LONGEST:])
            if found is not None and found[1] >= length:
                place, length = found
        return (_repeated(known, place, max_drafts), length) if length >= SHORTEST_MATCH else ([], 0)


def _repeated(ids: list[int], place: int, count: int) -> list[int]:
    """Return `count` ids from `place` on, which go on behind the end as a periodic text would."""
    found = ids[place : place + count]
    period = len(ids) - place
    while len(found) < count:
        found.append(found[-period])
    return found


BEHIND, AHEAD = 8, 48
"""Where the output is searched first after it has diverged, in ids before and after: most edits are small."""

AT_ONCE = 4  # within so many ids one matching id is enough; elsewhere it takes two


class Prediction:
    """A predicted text, and the position in it that the output has reached.
    Nothing here depends on how many ids a step emits, so the counts of predicted ids are the same with any drafts."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._index = SuffixIndex(ids)
        self._tail: list[int] = []  # the output's last ids
        self._place = 0  # index of the id that may come next; len(ids): none
        self._length = 1  # matching ids before it; the beginning of both counts as one
        self._strayed_at = 0  # the last known position of the output
        self._appeared = bytearray(len(ids))
        self.num_appeared = 0  # ids of the prediction found in the output, in runs of two or more

    @property
    def match_length(self) -> int:
        """Matching ids before the proposal; 0 after what looks like one replaced id."""
        return self._length

    def extend(self, tokens: Iterable[int]) -> list[int]:
        """Append tokens to the output; return how many ids of the prediction appeared with each."""
        appeared = []
        for id_ in tokens:
            before = self.num_appeared
            self._tail.append(id_)
            self._advance(id_)
            appeared.append(self.num_appeared - before)
        if len(self._tail) > 4 * LONGEST:
            del self._tail[:-LONGEST]
        return appeared

    def propose(self, max_drafts: int) -> list[int]:
        """Return how the prediction continues."""
        return self._index.ids[self._place : self._place + max_drafts]

    def _advance(self, id_: int) -> None:
        ids = self._index.ids
        if self._place < len(ids) and ids[self._place] == id_:
            self._place += 1
            self._length += 1
        else:
            has_just_strayed = self._length >= 2
            if has_just_strayed:
                self._strayed_at = self._place
            found = self._find(id_)
            if found is not None:
                self._place, self._length = found
            else:
                self._length = 0
                self._place = self._strayed_at + 1 if has_just_strayed else len(ids)
        if self._length >= 2:
            self._strayed_at = self._place
            self._mark()

    def _find(self, id_: int) -> tuple[int, int] | None:
        """Return the position after the longest match of the output's end; near the divergence, the nearest of the
        longest."""
        ids, here = self._index.ids, self._strayed_at
        begin, end = max(0, here - BEHIND), min(len(ids), here + AHEAD)
        near: list[tuple[int, int]] = []  # length of the match, and how far away
        places: list[int] = []
        while begin < end:
            try:
                begin = ids.index(id_, begin, end) + 1
            except ValueError:
                break
            length = match_length(ids, begin, self._tail)
            if length >= 2 or 0 < begin - here <= AT_ONCE:
                near.append((length, -abs(begin - here)))
                places.append(begin)
        best = max(range(len(near)), key=near.__getitem__, default=None)
        anywhere = self._index.find(self._tail[-LONGEST:])
        if anywhere is not None and (best is None or anywhere[1] > near[best][0]):
            return anywhere
        return None if best is None else (places[best], near[best][0])

    def _mark(self) -> None:
        """Count the ids of the current run as appeared."""
        for place in range(self._place - 1, max(0, self._place - self._length) - 1, -1):
            if self._appeared[place]:
                break
            self._appeared[place] = 1
            self.num_appeared += 1


if TYPE_CHECKING:
    from space_model.model_facts import HeadKind, ModelFacts

TYPICAL = (0.70, 0.65, 0.62, 0.60, 0.58, 0.57, 0.56, 0.55)
"""p_1, p_2, … of an unknown checkpoint; deeper drafts use the last."""

PRIOR_WEIGHT = 40.0  # verified drafts that the prior counts for
SHAPE_MEMORY = 0.998  # decay per verified draft: the shape follows about the last 500
STEP = 0.06  # change of a sequence's log-odds per verified draft and unit of surprise
FORGET = 0.004
"""Share of a sequence's shift forgotten at each of its steps, so that a sequence without drafts is tried again."""

LEVELS_PER_UNIT = 2
MOST_LEVEL = 8  # shifts are rounded to halves of a unit of log-odds, up to 4 either way
SNAPSHOT_EVERY, EARLY = 200, (16, 48, 100)
"""Verified drafts between two snapshots of the shape, and the counts of the first ones, while the prior fades."""

_LEAST, _MOST = 0.02, 0.98


class AcceptanceShape:
    """p_1, p_2, … of a model's masks, or of another draft source, over all sequences.

    p_j is the probability that draft j is accepted, given that those before it are: decayed averages over all verified
    drafts. A sequence differs from them by one number (`Acceptance`), a shift of all log-odds that follows its own
    verified drafts; with few of them it stays near the average.
    """

    def __init__(
        self, prior: Sequence[float] = TYPICAL, num_drafts: int = len(TYPICAL), *, may_take_turns: bool = False
    ) -> None:
        """`prior`: p_1, p_2, … from the checkpoint's card; `may_take_turns`: see AdapterFacts."""
        self.prior, self.may_take_turns = prior, may_take_turns
        filled = [prior[min(j, len(prior) - 1)] for j in range(num_drafts)]
        self._accepted = [PRIOR_WEIGHT * min(max(p, _LEAST), _MOST) for p in filled]
        self._verified = [PRIOR_WEIGHT] * num_drafts
        self._num_learnt = 0
        self._take_snapshot()

    @property
    def num_drafts(self) -> int:
        """Depths with a probability of their own."""
        return len(self._verified)

    @property
    def snapshot(self) -> tuple[float, ...]:
        """Log-odds of p_1, p_2, … rounded to a quarter and at most `SNAPSHOT_EVERY` drafts old, so that results
        computed from them can be cached."""
        return self._snapshot

    def log_odds(self, depth: int) -> float:
        """Return the log-odds of p_depth; depths count from 1, and those beyond the last equal it."""
        p = self.mean(depth)
        return math.log(p / (1.0 - p))

    def mean(self, depth: int) -> float:
        """Return p_depth over all sequences, kept away from 0 and 1."""
        at = min(depth, len(self._verified)) - 1
        p = self._accepted[at] / self._verified[at]
        return _LEAST if p < _LEAST else min(p, _MOST)

    def learn(self, depth: int, accepted: bool) -> float:
        """Record one verified draft; return p_depth as it was before, kept away from 0 and 1."""
        at = min(depth, len(self._verified)) - 1
        num_accepted, num_verified = self._accepted[at], self._verified[at]
        self._accepted[at] = SHAPE_MEMORY * num_accepted + accepted
        self._verified[at] = SHAPE_MEMORY * num_verified + 1.0
        self._num_learnt += 1
        if self._num_learnt % SNAPSHOT_EVERY == 0 or self._num_learnt in EARLY:
            self._take_snapshot()
        p = num_accepted / num_verified
        return _LEAST if p < _LEAST else min(p, _MOST)

    def _take_snapshot(self) -> None:
        self._snapshot = tuple(round(4 * self.log_odds(j)) / 4 for j in range(1, self.num_drafts + 1))


class Acceptance:
    """Acceptance probabilities of one sequence's drafts from one source."""

    __slots__ = ("shape", "shift")

    def __init__(self, shape: AcceptanceShape) -> None:
        self.shape = shape
        self.shift = 0.0  # of all log-odds

    @property
    def level(self) -> int:
        """The rounded shift: sequences of one level are treated alike."""
        return max(-MOST_LEVEL, min(MOST_LEVEL, round(LEVELS_PER_UNIT * self.shift)))

    def step(self, first_depth: int, num_verified: int, num_accepted: int) -> None:
        """Record one step's drafts of depth first_depth, first_depth+1, …, of which `num_accepted` were accepted."""
        shift = (1.0 - FORGET) * self.shift
        if num_verified:
            against = math.exp(-shift)  # what the odds of a rejection are multiplied by
            for number in range(min(num_accepted + 1, num_verified)):
                accepted = number < num_accepted
                p = self.shape.learn(first_depth + number, accepted)
                shift += STEP * (accepted - p / (p + (1.0 - p) * against))
        self.shift = shift


def shapes_by_adapter(facts: ModelFacts) -> dict[int | None, AcceptanceShape]:
    """Return a shape for the checkpoint's own masks (None) and for each adapter's, with the priors of their cards."""
    shapes: dict[int | None, AcceptanceShape] = {
        number: AcceptanceShape(
            adapter.acceptance or TYPICAL, max(1, adapter.num_masks), may_take_turns=adapter.may_take_turns
        )
        for number, adapter in enumerate(facts.adapters)
    }
    return {None: AcceptanceShape(facts.acceptance or TYPICAL, max(1, facts.num_masks))} | shapes


def head_shapes_by_adapter(facts: ModelFacts) -> dict[int | None, AcceptanceShape]:
    """Return a shape for the drafts of each recurrent head: the checkpoint's own (None), and each adapter's. A draft
    network has as many: acceptance may differ by adapter."""
    heads = {None: facts.head} | {number: adapter.head for number, adapter in enumerate(facts.adapters)}
    return {
        number: AcceptanceShape(head.acceptance or TYPICAL, max(1, head.num_drafts)) for number, head in heads.items()
    }


class DraftSource(Protocol):
    """Proposes tokens that may come next."""

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int] | None:
        """Return up to `max_drafts` ids that may follow `ids` (everything known of the sequence).
        None leaves the drafts to the model's masks; an empty sequence means no drafts."""


class DraftOrigin(Enum):
    """The source of a draft."""

    MASKS = "masks"
    HEAD = "head"
    MODEL = "model"
    MTP = "mtp"
    EAGLE = "eagle"
    LOOKUP = "lookup"
    PREDICTION = "prediction"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a sequence's drafts, with their acceptance probabilities."""

    source: DraftOrigin
    num_mask_drafts: int = 0  # leading drafts from masks, which the source continues
    match_length: int = 0  # matching ids before the drafts
    chances: tuple[float, ...] = ()  # of each draft, given those before it; empty if all came from masks

    @property
    def is_by_head(self) -> bool:
        """Whether a recurrent head or a draft network made the drafts."""
        return self.source in (DraftOrigin.HEAD, DraftOrigin.MODEL, DraftOrigin.MTP, DraftOrigin.EAGLE)


BY_MASKS = Origin(DraftOrigin.MASKS)
BY_HEAD = Origin(DraftOrigin.HEAD)
HEAD_ORIGINS: Mapping[HeadKind, Origin] = {
    "recurrent": BY_HEAD,
    "model": Origin(DraftOrigin.MODEL),
    "mtp": Origin(DraftOrigin.MTP),
    "eagle": Origin(DraftOrigin.EAGLE),
}

LENGTHS = (0, 1, 2, 3, 4, 8, 16)  # lower bounds of the classes of match length
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
"""Prior acceptance probabilities of the first drafts, by match length; missing ones repeat the last.

Lookup: between greedy decoding and temperature 0.8 of the embedded model on HumanEval-X (see lookup.py), where an id
after a right one is right more often than the first. Predictions: assumed, at the same sampling. Grammars: a forced
text is certain, its tokenization is not; ids without an alternative count as a long match.
"""

NUM_DEPTHS = 8

MOST_SHIFT = MOST_LEVEL / LEVELS_PER_UNIT  # bound on the shift of log-odds, either way
JUDGED_EVERY = 8
"""One in so many proposals too weak for the present row price is evaluated anyway, because prices change."""

ASLEEP_ABOVE, AWAKE_BELOW = 1.0, 0.8
"""Row prices: above the first, no draft can be worth its row and texts are not read; below the second, reading resumes
where it ended."""


@dataclass(frozen=True, slots=True)
class Forced:
    """Ids that a grammar forces."""

    ids: tuple[int, ...] = ()
    certain: bool = False  # no other ids are possible; else the same text may be tokenized otherwise


NOT_FORCED = Forced()


@lru_cache(maxsize=4096)
def _chances(log_odds: tuple[float, ...], level: int) -> tuple[float, ...]:
    return tuple(1.0 / (1.0 + math.exp(-odds - level / LEVELS_PER_UNIT)) for odds in log_odds)


@lru_cache(maxsize=4096)
def _expected(chances: tuple[float, ...], count: int) -> float:
    """Return how many of `count` drafts are accepted on average; missing probabilities repeat the last."""
    total, reached = 0.0, 1.0
    for number in range(count):
        reached *= chances[min(number, len(chances) - 1)]
        total += reached
    return total


class DraftSources:
    """What all sequences of a worker share: enabled draft sources, and their acceptance."""

    def __init__(self, *, lookup: bool = False, masks: bool = True, head: bool = True) -> None:
        """`lookup`: search a sequence's past for its last ids; `masks`: draft from masks; `head`: draft with the
        recurrent head. Both where the model has them."""
        self.lookup, self.masks, self.head = lookup, masks, head
        self._price = 0.0
        self.is_paused = False  # set by the worker while reading costs more than it saves
        self._is_too_dear = False
        self.shapes = {
            source: tuple(AcceptanceShape(prior, NUM_DEPTHS) for prior in priors) for source, priors in PRIORS.items()
        }
        self.shapes_behind = tuple(AcceptanceShape(prior, NUM_DEPTHS) for prior in PRIORS[DraftOrigin.LOOKUP])

    @property
    def price(self) -> float:
        """Accepted drafts that a chain row must bring. Set by the worker."""
        return self._price

    @price.setter
    def price(self, price: float) -> None:
        self._price = price
        self._is_too_dear = price > (AWAKE_BELOW if self._is_too_dear else ASLEEP_ABOVE)

    @property
    def asleep(self) -> bool:
        """Whether texts need not be read, because drafts are not worth it now."""
        return self.is_paused or self._is_too_dear

    def drafter(self, num_prompt: int, prediction: Sequence[int], *, in_grammar: bool = False) -> Drafter | None:
        """Return the drafter of a new sequence, or None where only masks can draft."""
        return Drafter(self, num_prompt, prediction) if self.lookup or prediction or in_grammar else None


class SourceAcceptance:
    """Acceptance of one sequence's drafts of one source, relative to all sequences'.
    Proposals count whether they were used or not: the text shows which of them would have been accepted."""

    def __init__(self, source: DraftOrigin, shapes: tuple[AcceptanceShape, ...]) -> None:
        self.source = source
        self._shapes = shapes
        self._shift = 0.0  # of all log-odds

    def chances(self, match_length: int) -> tuple[float, ...]:
        """Return the probabilities of the first, second, … draft after a match of this length, given those before."""
        return _chances(self._shape(match_length).snapshot, round(LEVELS_PER_UNIT * self._shift))

    def observe(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        """Compare a proposal with the text, which continued with `tokens`. The shift decays and is bounded, so that a
        source that was wrong for long recovers as fast as one that was wrong now and then."""
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
    """Drafts that a source proposes, and their acceptance probabilities."""

    acceptance: SourceAcceptance
    ids: list[int]  # at least one
    match_length: int
    chances: tuple[float, ...]  # by depth; missing ones repeat the last

    @property
    def expected(self) -> float:
        """Drafts accepted on average."""
        return _expected(self.chances, len(self.ids))

    @property
    def known_chances(self) -> tuple[float, ...]:
        """The probability of each draft."""
        return self.chances[: len(self.ids)] + self.chances[-1:] * (len(self.ids) - len(self.chances))

    def beats(self, mask_chances: tuple[float, ...]) -> bool:
        """Whether more drafts are expected to be accepted than from masks with these probabilities."""
        return self.expected > _expected(mask_chances, len(mask_chances))

    def goes_on_behind(self, drafts: Sequence[int]) -> bool:
        """Whether it starts with these drafts and continues them."""
        return 0 < _agreeing(drafts, self.ids) == len(drafts) < len(self.ids)

    def origin(self, num_drafts: int, behind: tuple[float, ...] = ()) -> Origin:
        """Return the origin of `num_drafts` of these drafts, the first of which are also masks', with probabilities
        `behind`."""
        known = self.chances + self.chances[-1:] * (num_drafts - len(self.chances))
        return Origin(
            self.acceptance.source, len(behind), self.match_length, (*behind, *known[len(behind) : num_drafts])
        )


class Drafter:
    """Reads one sequence's text and proposes what may follow it."""

    def __init__(self, sources: DraftSources, num_prompt: int, prediction: Sequence[int]) -> None:
        self._sources, self._num_prompt, self._predicted = sources, num_prompt, tuple(prediction)
        self._looking_up, self._predicting, self._forcing = (
            SourceAcceptance(source, sources.shapes[source])
            for source in (DraftOrigin.LOOKUP, DraftOrigin.PREDICTION, DraftOrigin.GRAMMAR)
        )
        self._going_on = SourceAcceptance(DraftOrigin.LOOKUP, sources.shapes_behind)
        self._lookup: Lookup | None = None
        self._prediction: Prediction | None = None
        self._num_known: int | None = None  # ids read; None: none yet, or reading is paused
        self._proposals: list[Proposal] = []  # proposals for the ids that follow
        self._behind: tuple[list[int], Proposal] | None = None  # drafts of masks, and the proposal behind them

    @property
    def reads(self) -> bool:
        """Whether it may propose something now: a client predicts the text, or reading is worth it."""
        return bool(self._predicted) or not self._sources.asleep

    def extend(self, ids: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """Read `tokens`, which follow `ids`; return how many ids of the prediction appeared with each token.
        `ids` are read in full at first, and where a step is repeated; after a pause only the new ones are."""
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
                proposal.acceptance.observe(proposal, tokens)
            if self._behind is not None:
                drafts, proposal = self._behind
                if len(tokens) > len(drafts) == _agreeing(drafts, tokens):
                    proposal.acceptance.observe(proposal, tokens[len(drafts) :])
        self._proposals, self._behind = [], None
        self._num_known = len(ids) + len(tokens)
        if self._lookup is not None:
            self._lookup.extend(tokens)
        return () if self._prediction is None else self._prediction.extend(tokens)

    def propose(self, max_drafts: int, forced: Forced = NOT_FORCED) -> Proposal | None:
        """Return the proposal with the most expected accepted drafts; None if there is none worth its row."""
        for text, acceptance in ((self._prediction, self._predicting), (self._lookup, self._looking_up)):
            if text is not None and self._num_known is not None and (drafts := text.propose(max_drafts)):
                self._add_proposal(acceptance, drafts, text.match_length)
        if forced.ids:
            self._add_proposal(self._forcing, list(forced.ids[:max_drafts]), LENGTHS[-1] if forced.certain else 0)
        if len(self._proposals) < 2:
            return self._proposals[0] if self._proposals else None
        return max(self._proposals, key=lambda proposal: proposal.expected)

    def propose_behind(self, drafts: list[int], max_drafts: int) -> Proposal | None:
        """Return what the text's past proposes behind these drafts of masks; None if that is nothing worth its row.
        After `propose`."""
        if self._lookup is None or self._num_known is None or max_drafts < 1:
            return None
        ids, length = self._lookup.propose_behind(drafts, max_drafts)
        if not ids:
            return None
        proposal = Proposal(self._going_on, ids, length, self._going_on.chances(length))
        self._behind = drafts, proposal
        return proposal if proposal.chances[0] > self._sources.price else None

    def _add_proposal(self, acceptance: SourceAcceptance, drafts: list[int], length: int) -> None:
        """Add a proposal if it is worth its row."""
        chances = acceptance.chances(length)
        if chances[0] > self._sources.price or (self._num_known or 0) % JUDGED_EVERY == 0:
            self._proposals.append(Proposal(acceptance, drafts, length, chances))


def chances_of(acceptance: Acceptance | None, first: int, count: int) -> tuple[float, ...]:
    """Return the acceptance of `count` drafts of depth `first`, `first`+1, …; without `acceptance`, typical values."""
    if not count:
        return ()
    by_depth = TYPICAL if acceptance is None else _chances(acceptance.shape.snapshot, acceptance.level)
    return tuple(by_depth[min(depth, len(by_depth)) - 1] for depth in range(first, first + count))


def _agreeing(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the number of leading ids that are the same."""
    count = 0
    for draft, id_ in zip(drafts, tokens, strict=False):
        if draft != id_:
            break
        count += 1
    return count
