"""Chooses the layouts that bring the most expected tokens per measured second. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from space_model.geometry.draft_layout import DraftLayout

from space_server.drafts.acceptance import LEVELS_PER_UNIT
from space_server.speculation.controller import DraftLimits, StepLoad
from space_server.speculation.layout_yield import PLAIN, LayoutYield, layout_yields
from space_server.speculation.lookup_policy import LookupPolicy, Offer
from space_server.speculation.realized_speedup import RealizedSpeedup
from space_server.speculation.speculation_probe import SpeculationProbe
from space_server.step_costs.step_cost import StepCost, StepShape

MASK_PRICE = 0.8
"""Of a row's price, what a mask row's is: it is neither sampled nor written."""

TAKE_UP, LEAVE, CHANGE = 0.08, 0.0, 0.02
"""By how much speculating must be expected to beat plain decoding to be taken up, and to go on; and another rule the
one that is followed. What is expected leaves out what ends and beginnings cost, some hundredths; between the first two
nothing changes, so that a crowd at the threshold does not swing.
"""

PROPOSED_ROWS = (8, 16)
"""Drafts of one sequence's past, and of two: the rows that come with them."""

PROPOSAL_MARGIN = 1.5
"""How many times the price of its row a draft that no mask made must bring: prices are differences of noisy figures,
and who looks best is often lucky."""

EVERY, SELDOM = 16, 64
"""Steps after which the choice is looked at again, where the crowd keeps its size to an eighth; while decoding stays
plain, ever more of them, up to the second, and a crowd of another size waits for the first.
"""

HOPELESS = 0.9
"""The share of plain decoding below which drafting is known not to pay in a larger crowd either: rows of more sequences
cost more. Under load every crowd is of another size than the last, and a look costs a tenth of such a step. Where the
first rules fall so far short the others are not asked.
"""

PATIENCE = 24
"""Steps of plain decoding before speculation is taken up again: taking it up costs a step of masks alone."""

PROBE_EVERY, PROBE_WITHIN, PROBE_SELDOM = 256, 0.15, 1024
"""A plain step is measured once in so many, where speculation is expected to win by less than this share; and where by
more, for what plain decoding costs may be what is mistaken, once in so many.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceClass:
    """Sequences that are treated alike: they have the same one, by which it is looked up what they lay out."""

    chances: tuple[float, ...]  # that a draft of mask depth 1, 2, … is accepted
    max_masks: int


@dataclass(frozen=True, slots=True)
class BatchMix:
    """Those who reach their root in a step."""

    kinds: Counter[SequenceClass]
    size: int
    num_noisy: int  # that are not greedy

    @classmethod
    def of(cls, rooms: Sequence[DraftLimits], kinds: Sequence[SequenceClass]) -> BatchMix:
        return cls(Counter(kinds), len(rooms), sum(limits.is_noisy for limits in rooms))


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """How a kind's layout follows from its worths: what is worth the price of its rows, or the most within a bound."""

    price: float | None  # tokens that a row must bring
    most_rows: int | None = None  # of a sequence's step, where no price is given


RULES = (
    *(Rule(price) for price in (0.6, 0.45, 0.34, 0.26, 0.2, 0.15, 0.11, 0.08, 0.06, 0.045, 0.03, 0.0)),
    *(Rule(None, rows) for rows in (3, 4, 6, 8, 9, 11, 14, 16, 20, 24, 30)),
)
"""Those tried. Prices treat different sequences best; bounds find what lies below a machine's ridge."""

FIRST_RULES = RULES[::4]
"""Of all sizes: none of the others is far better than all of these."""


@lru_cache(maxsize=8192)
def chosen(kind: SequenceClass, rule: Rule) -> LayoutYield:
    """The layout of a kind by a rule."""
    found = layout_yields(kind.chances, kind.max_masks)
    if rule.price is None:
        assert rule.most_rows is not None
        return max(
            (
                layout_yield
                for layout_yield in found
                if layout_yield.chain_rows + layout_yield.mask_rows <= rule.most_rows
            ),
            key=lambda w: w.tokens,
        )
    price = rule.price
    return max(found, key=lambda w: w.tokens - price * (w.chain_rows + MASK_PRICE * w.mask_rows))


@dataclass(frozen=True, slots=True)
class Expected:
    """What a rule would bring now."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class SpeculationController:
    """Most expected tokens per measured second, over the whole batch.

    Each of a few rules says what every sequence lays out; the one wins whose tokens over the step's measured seconds
    are most. Plain decoding is always among them, and must be beaten by a margin.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._rule: Rule | None = None  # taken; None: plain decoding
        self._num_sequences = 0  # that it was taken for
        self._num_surprises = 0  # of the cost, when it was looked at
        self._num_turns = 0  # of the cost's machine, then
        self._num_since = 0  # steps since it was looked at
        self._num_to_look = EVERY  # steps between two looks
        self._hopeless = math.inf  # sequences from which on drafting is far from paying, as of the last look
        self._nobody = False  # of that crowd may have masks
        self._priced = 0, 0  # sequences, and surprises of the cost, that `row_price` is of
        self._trials = SpeculationProbe()
        self._num_plain = PATIENCE  # steps of plain decoding in a row
        self._num_unprobed = 0  # steps that speculated since plain decoding was measured
        self._advantage = 0.0  # expected, over plain decoding
        self._rate = 0.0  # expected tokens per second of what was taken
        self._promise = RealizedSpeedup()  # of the tokens per second that rules promise
        self._proposals = LookupPolicy()
        self._watched = False  # whether the step that runs is one by the rule, and nothing else
        self.row_price = 0.0  # accepted drafts that a chain row more for each sequence must bring, as things stand

    @property
    def rule(self) -> Rule | None:
        """Taken now; None: plain decoding."""
        return self._rule

    @property
    def naps(self) -> bool:
        """Reading texts for drafts has not paid for itself."""
        return self._proposals.naps

    def layouts(self, rooms: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """The layout of each, before `DraftLimits.fit`."""
        if not rooms:
            return []
        num_read = sum(limits.is_read for limits in rooms)
        self._proposals.stepped(len(rooms), num_read, by_masks=self._rule is not None)
        self._num_since += 1
        surprised = self.cost.num_surprises != self._num_surprises
        has_changed = _differ(len(rooms), self._num_sequences)
        is_hopeless = self._rule is None and len(rooms) >= self._hopeless
        if self._num_since >= EVERY and (self._rule is not None or (has_changed and not is_hopeless)):
            self._num_to_look = EVERY
        has_others = any(limits.chances for limits in rooms)
        # Who drafts must know at once whether that pays in another crowd; plain decoding can wait for its turn.
        is_anew = self._rule is not None or not self._num_sequences  # nothing is known at first
        is_due = (is_anew and (surprised or has_changed)) or self._num_since >= self._num_to_look
        is_due = is_due or (self._nobody and any(_may_have_masks(limits) for limits in rooms))
        if self._rule is None and not is_due and not has_others:  # plain decoding goes on, and costs nothing more
            self._num_plain += 1
            self._watched = False
            return [PLAIN.layout] * len(rooms)
        kinds = [_kind(limits) for limits in rooms]
        if is_due:
            self._choose(BatchMix.of(rooms, kinds), load)
            self._num_sequences, self._num_since = len(rooms), 0
            self._num_surprises = self.cost.num_surprises
        elif has_others:
            self._price(len(rooms), load)
        rule = self._rule
        # Masks of one step alone bring nothing: where the next one decodes plainly, its drafts would be dropped.
        if load.num_prefill_rows and rule is not None:
            rule = self._beside(BatchMix.of(rooms, kinds), load)
        elif rule is not None and self._is_probe():
            rule = None
        begins = self._num_plain > 0  # with masks alone: the margin is for that
        self._num_plain = 0 if rule is not None else self._num_plain + 1
        self._watched = rule is not None and not begins and not load.num_prefill_rows
        found = [self._layout(limits, kind, rule) for limits, kind in zip(rooms, kinds, strict=True)]
        if has_others and self._rule is None:
            offer = self._offer(rooms, found, load)
            if offer is not None and not self._proposals.pays(offer):
                return [PLAIN.layout] * len(rooms)
        elif has_others and self._proposals.asks:
            offer = self._offer(rooms, [self._layout(limits, _NO_MASKS, None) for limits in rooms], load)
            if offer is not None:
                self._proposals.would_pay(offer)
        return found

    def _offer(self, rooms: Sequence[DraftLimits], layouts: Sequence[DraftLayout], load: StepLoad) -> Offer | None:
        """The drafts of these layouts, none of which masks made, beside a plain step; None if there are none."""
        fitting = (min(layout.num_drafts, limits.num_drafts) for limits, layout in zip(rooms, layouts, strict=True))
        drafting = [(limits, count) for limits, count in zip(rooms, fitting, strict=True) if count]
        if not drafting:
            return None
        size, tokens = len(rooms), 0.0
        num_noisy = sum(limits.is_noisy for limits in rooms)
        num_drafts = num_noisy_drafts = 0
        for limits, count in drafting:
            tokens += sum(accumulate(limits.chances[:count], mul))
            num_drafts += count
            num_noisy_drafts += count * limits.is_noisy
        alone = self.cost.seconds(StepShape.plain(size, load.num_context, num_noisy))
        beside = 0, 0, load.num_prefill_rows, load.num_prefill_pairs, load.num_context
        before = self.cost.seconds(StepShape(size, size, *beside, num_noisy)) if load.num_prefill_rows else alone
        after = self.cost.seconds(StepShape(size, size + num_drafts, *beside, num_noisy + num_noisy_drafts))
        return Offer(tokens, after - before, size, alone + self._promise.pause)

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """The step that was chosen last brought so many tokens in so many seconds, `pause` seconds behind the last."""
        if pause is not None:
            self._promise.paused(pause)
        if self._watched:
            self._promise.stepped(num_tokens, seconds)

    def _choose(self, mix: BatchMix, load: StepLoad) -> None:
        if self.cost.num_turns != self._num_turns:
            self._num_turns = self.cost.num_turns
            self._promise.begin_anew()
            self._trials.doubt()
        is_known = self._promise.look_back(self._num_since * self._num_sequences)
        load = StepLoad(num_context=load.num_context)
        self._price(mix.size, load, anew=True)
        plain = (1.0 + self._proposals.gain) * self._expected(None, mix, load).rate
        rates = self._rates(mix, load, FIRST_RULES) if self._rule is None else {}
        if not rates or max(rates.values()) > HOPELESS * plain:
            rates = self._rates(mix, load, RULES)
        best = max(rates, key=rates.__getitem__, default=None)
        most = 0.0 if best is None else rates[best]
        if best is None:  # nobody may draft: nothing is learnt of it, and no trial comes nearer
            self._num_plain = min(self._num_plain, PATIENCE)
        elif self._rule is None and not is_known:
            self._promise.forgive(self._num_since / self._trials.rarity)
        self._advantage = most / plain - 1.0
        self._nobody = not any(kind.max_masks for kind in mix.kinds)
        self._hopeless = mix.size if best is not None and most < HOPELESS * plain else math.inf
        now = 0.0 if self._rule is None else rates.get(self._rule, 0.0)
        if self._rule is None:
            self._num_to_look = min(2 * self._num_to_look, SELDOM)
            if most > (1.0 + TAKE_UP) * plain and self._num_plain >= PATIENCE:
                self._rule = best
            elif self._trials.is_due(most / plain, self._num_plain):
                self._rule = best
                self._trials.begin()
        elif best is None:
            self._rule = None
        elif self._trials.goes_on(self._num_since):
            self._rule = self._rule if now else best
        elif most < (1.0 + LEAVE) * plain:
            self._rule = None
            self._trials.failed()
        else:
            self._rule = best if most > (1.0 + CHANGE) * now else self._rule
            self._trials.paid()
        self._rate = plain if self._rule is None else rates[self._rule]
        self._promise.give(self._rate / self._promise.share, self._expected(self._rule, mix, load).seconds)

    def _rates(self, mix: BatchMix, load: StepLoad, rules: Sequence[Rule]) -> dict[Rule, float]:
        """Tokens per second of each of the rules by which somebody has masks, as far as promises are kept."""
        kinds = [kind for kind in mix.kinds if kind.max_masks]
        if not kinds:
            return {}
        known: dict[tuple[LayoutYield, ...], float] = {}  # several rules choose the same
        rates: dict[Rule, float] = {}
        for rule in rules:
            worths_of = tuple([chosen(kind, rule) for kind in kinds])
            if all(not layout_yield.mask_rows for layout_yield in worths_of):
                continue
            if worths_of not in known:
                known[worths_of] = self._promise.share * self._expected(rule, mix, load).rate
            rates[rule] = known[worths_of]
        return rates

    def _beside(self, mix: BatchMix, load: StepLoad) -> Rule | None:
        """The rule for a step that prompt rows fill: time is worth the tokens that it brings in a step without them."""
        found: dict[Rule | None, float] = {}
        for rule in {None, self._rule, *FIRST_RULES}:
            expected = self._expected(rule, mix, load)
            found[rule] = expected.tokens - self._rate * expected.seconds
        return max(found, key=found.__getitem__)

    def _expected(self, rule: Rule | None, mix: BatchMix, load: StepLoad) -> Expected:
        if mix.size == 1 and rule is not None:
            return self._alone(next(iter(mix.kinds)), rule, mix, load)
        tokens = chain = float(mix.size)
        masks = drafting = 0.0
        for kind, count in mix.kinds.items():
            if rule is None or not kind.max_masks:
                continue
            layout_yield = chosen(kind, rule)
            tokens += count * (layout_yield.tokens - 1.0)
            chain += count * (layout_yield.chain_rows - 1.0)
            masks += count * layout_yield.mask_rows
            drafting += count * (layout_yield.mask_rows > 0)
        shape = StepShape(
            mix.size,
            round(chain),
            round(masks),
            round(drafting),
            load.num_prefill_rows,
            load.num_prefill_pairs,
            load.num_context,
            round(chain * mix.num_noisy / mix.size),
        )
        return Expected(tokens, self.cost.seconds(shape) + self._promise.pause)

    def _alone(self, kind: SequenceClass, rule: Rule, mix: BatchMix, load: StepLoad) -> Expected:
        """Of one sequence: its steps differ in size, and what they cost is no line."""
        layout_yield = chosen(kind, rule) if kind.max_masks else PLAIN
        total = seconds = 0.0
        for share, chain, masks in layout_yield.steps:
            noisy = chain if mix.num_noisy else 0
            shape = StepShape(
                1, chain, masks, int(masks > 0), load.num_prefill_rows, load.num_prefill_pairs, load.num_context, noisy
            )
            total += share
            seconds += share * self.cost.seconds(shape)
        return Expected(layout_yield.tokens, seconds / total + self._promise.pause)

    def _price(self, num_sequences: int, load: StepLoad, *, anew: bool = False) -> None:
        """A row at what a token costs now, with a margin for the host's part in proposing and judging; where nothing
        has changed only `anew`.

        By the dearest of the steps that such drafts make: of one sequence or two, as they come, and of all. What these
        were found to cost is known better than what lies between, for they are taken.
        """
        size, num_surprises = self._priced
        if not (anew or num_surprises != self.cost.num_surprises or _differ(num_sequences, size)):
            return
        self._priced = num_sequences, self.cost.num_surprises
        before = self.cost.seconds(StepShape.plain(num_sequences, load.num_context))
        dearest = 0.0
        for rows in (*PROPOSED_ROWS, 4 * num_sequences):
            more = StepShape(num_sequences, num_sequences + rows, num_context=load.num_context)
            dearest = max(dearest, (self.cost.seconds(more) - before) / rows)
        self.row_price = PROPOSAL_MARGIN * dearest * num_sequences / (before + self._promise.pause)

    def _is_probe(self) -> bool:
        """Once in a while, more often where plain decoding is nearly as good: what it costs must stay known."""
        self._num_unprobed += 1
        if self._num_unprobed < (PROBE_EVERY if self._advantage <= PROBE_WITHIN else PROBE_SELDOM):
            return False
        self._num_unprobed = 0
        return True

    def _layout(self, limits: DraftLimits, kind: SequenceClass, rule: Rule | None) -> DraftLayout:
        layout = PLAIN.layout if rule is None or not kind.max_masks else chosen(kind, rule).layout
        if not limits.chances:
            return layout
        # Drafts that no mask made: each as long as it brings more than its row costs.
        num_drafts, reached = 0, 1.0
        for chance in limits.chances:
            reached *= chance
            if reached <= self.row_price:
                break
            num_drafts += 1
        groups = (*layout.masks[: num_drafts + 1], *(0,) * (num_drafts - layout.num_drafts))
        return DraftLayout.of(num_drafts, groups)


def _differ(size: int, known: int) -> bool:
    """Whether a crowd is of another size than the one something is known of."""
    return 8 * abs(size - known) > known


def _may_have_masks(limits: DraftLimits) -> bool:
    return limits.acceptance is not None and limits.max_masks > 0


def _kind(limits: DraftLimits) -> SequenceClass:
    if limits.acceptance is None or limits.max_masks < 1:
        return _NO_MASKS
    return _kind_of(limits.acceptance.shape.snapshot, limits.acceptance.level, limits.max_masks)


_NO_MASKS = SequenceClass((), 0)


@lru_cache(maxsize=4096)
def _kind_of(snapshot: tuple[float, ...], level: int, max_masks: int) -> SequenceClass:
    """Its chances are from coarse log-odds: few enough that worths are looked up, not computed."""
    return SequenceClass(tuple(1.0 / (1.0 + math.exp(-odds - level / LEVELS_PER_UNIT)) for odds in snapshot), max_masks)
