"""Chooses the draft layouts with the most expected tokens per measured second. Torch-free."""

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
"""Cost of a mask row relative to a chain row: it is neither sampled nor written."""

TAKE_UP, LEAVE, CHANGE = 0.08, 0.0, 0.02
"""Expected gain over plain decoding needed to start speculating, and to continue; and over the current rule to change
it. The expectation ignores some hundredths for starts and ends. The gap between the first two keeps a batch at the
threshold from switching back and forth.
"""

PROPOSED_ROWS = (8, 16)
"""Extra rows of one sequence's lookup drafts, and of two sequences'."""

PROPOSAL_MARGIN = 1.5
"""A draft from no mask must bring so many times the price of its row: prices are differences of noisy figures, and the
best estimate is often too good.
"""

EVERY, SELDOM = 16, 64
"""Steps between two looks at the choice while the batch keeps its size to an eighth. While decoding stays plain the
interval doubles up to the second; a batch of another size waits for the first.
"""

HOPELESS = 0.9
"""If drafting reaches less than this share of plain decoding, it is not tried in a larger batch either: rows of more
sequences cost more. Under load every batch differs in size, and a look costs a tenth of such a step. If the first
rules fall this short, the others are not evaluated.
"""

PATIENCE = 24
"""Plain steps before speculation starts again: starting costs a step of masks alone."""

PROBE_EVERY, PROBE_WITHIN, PROBE_SELDOM = 256, 0.15, 1024
"""While speculating, one in so many steps is plain, to measure its cost, where the expected gain is below the share;
one in PROBE_SELDOM where it is above, since the plain cost may be wrong.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceClass:
    """Sequences treated alike share one object, the key for looking up their layout."""

    chances: tuple[float, ...]  # acceptance probability by mask depth 1, 2, …
    max_masks: int


@dataclass(frozen=True, slots=True)
class BatchMix:
    """The sequences that reach their root in a step, by class."""

    kinds: Counter[SequenceClass]
    size: int
    num_noisy: int  # sequences that are not greedy

    @classmethod
    def of(cls, limits: Sequence[DraftLimits], kinds: Sequence[SequenceClass]) -> BatchMix:
        return cls(Counter(kinds), len(limits), sum(one.is_noisy for one in limits))


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Selects a class's layout: by the price of a row in tokens, or the best within a bound on rows."""

    price: float | None  # tokens that a row must bring
    most_rows: int | None = None  # of a sequence's step, where no price is given


RULES = (
    *(Rule(price) for price in (0.6, 0.45, 0.34, 0.26, 0.2, 0.15, 0.11, 0.08, 0.06, 0.045, 0.03, 0.0)),
    *(Rule(None, rows) for rows in (3, 4, 6, 8, 9, 11, 14, 16, 20, 24, 30)),
)
"""All rules tried. Prices suit mixed batches; row bounds find layouts below a machine's roofline ridge."""

FIRST_RULES = RULES[::4]
"""A sample of all sizes: no other rule is far better than all of these."""


@lru_cache(maxsize=8192)
def chosen(kind: SequenceClass, rule: Rule) -> LayoutYield:
    """Return the layout of a class by a rule."""
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
    """Expected tokens and seconds of a step by a rule."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


class SpeculationController:
    """Maximizes expected tokens per measured second over the whole batch.

    A few rules each give every sequence a layout. The rule with the most expected tokens per measured second is used;
    plain decoding is always a candidate, and must be beaten by a margin.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._rule: Rule | None = None  # in use; None: plain decoding
        self._num_sequences = 0  # batch size at the last look
        self._num_surprises = 0  # of the cost model, at the last look
        self._num_turns = 0  # speed changes of the machine, at the last look
        self._num_since = 0  # steps since the last look
        self._num_to_look = EVERY  # steps between two looks
        self._hopeless_size = math.inf  # batch size from which drafting is far too slow
        self._is_without_masks = False  # at the last look no sequence could have masks
        self._priced = 0, 0  # batch size and cost surprises that `row_price` was computed for
        self._probe = SpeculationProbe()
        self._num_plain = PATIENCE  # steps of plain decoding in a row
        self._num_unprobed = 0  # steps that speculated since plain decoding was measured
        self._advantage = 0.0  # expected gain over plain decoding
        self._rate = 0.0  # expected tokens per second of the choice
        self._realized = RealizedSpeedup()  # share of the predicted rate that is reached
        self._proposals = LookupPolicy()
        self._watched = False  # whether the running step follows the rule and does nothing else
        self.row_price = 0.0  # see Controller.row_price

    @property
    def rule(self) -> Rule | None:
        """The rule in use; None: plain decoding."""
        return self._rule

    @property
    def is_paused(self) -> bool:
        """Whether reading texts for drafts is paused."""
        return self._proposals.is_paused

    def layouts(self, limits: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """Return the layout of each sequence, before `DraftLimits.fit`."""
        if not limits:
            return []
        num_read = sum(one.is_read for one in limits)
        self._proposals.stepped(len(limits), num_read, by_masks=self._rule is not None)
        self._num_since += 1
        surprised = self.cost.num_surprises != self._num_surprises
        has_changed = _differ(len(limits), self._num_sequences)
        is_hopeless = self._rule is None and len(limits) >= self._hopeless_size
        if self._num_since >= EVERY and (self._rule is not None or (has_changed and not is_hopeless)):
            self._num_to_look = EVERY
        has_others = any(one.chances for one in limits)
        # While drafting, a changed batch is evaluated at once; plain decoding can wait for its interval.
        is_anew = self._rule is not None or not self._num_sequences  # the first step
        is_due = (is_anew and (surprised or has_changed)) or self._num_since >= self._num_to_look
        is_due = is_due or (self._is_without_masks and any(_may_have_masks(one) for one in limits))
        if self._rule is None and not is_due and not has_others:  # fast path: plain decoding continues
            self._num_plain += 1
            self._watched = False
            return [PLAIN.layout] * len(limits)
        kinds = [_kind(one) for one in limits]
        if is_due:
            self._choose(BatchMix.of(limits, kinds), load)
            self._num_sequences, self._num_since = len(limits), 0
            self._num_surprises = self.cost.num_surprises
        elif has_others:
            self._price(len(limits), load)
        rule = self._rule
        # Masks in a single step are wasted: if the next step is plain, their drafts are dropped.
        if load.num_prefill_rows and rule is not None:
            rule = self._beside(BatchMix.of(limits, kinds), load)
        elif rule is not None and self._is_probe():
            rule = None
        begins = self._num_plain > 0  # the first step has masks but no drafts; the margin covers it
        self._num_plain = 0 if rule is not None else self._num_plain + 1
        self._watched = rule is not None and not begins and not load.num_prefill_rows
        found = [self._layout(one, kind, rule) for one, kind in zip(limits, kinds, strict=True)]
        if has_others and self._rule is None:
            offer = self._offer(limits, found, load)
            if offer is not None and not self._proposals.pays(offer):
                return [PLAIN.layout] * len(limits)
        elif has_others and self._proposals.asks:
            offer = self._offer(limits, [self._layout(one, _NO_MASKS, None) for one in limits], load)
            if offer is not None:
                self._proposals.would_pay(offer)
        return found

    def _offer(self, limits: Sequence[DraftLimits], layouts: Sequence[DraftLayout], load: StepLoad) -> Offer | None:
        """Return the gain and cost of these layouts' drafts over a plain step; None without drafts."""
        fitting = (min(layout.num_drafts, one.num_drafts) for one, layout in zip(limits, layouts, strict=True))
        drafting = [(one, count) for one, count in zip(limits, fitting, strict=True) if count]
        if not drafting:
            return None
        size, tokens = len(limits), 0.0
        num_noisy = sum(one.is_noisy for one in limits)
        num_drafts = num_noisy_drafts = 0
        for one, count in drafting:
            tokens += sum(accumulate(one.chances[:count], mul))
            num_drafts += count
            num_noisy_drafts += count * one.is_noisy
        alone = self.cost.seconds(StepShape.plain(size, load.num_context, num_noisy))
        beside = 0, 0, load.num_prefill_rows, load.num_prefill_pairs, load.num_context
        before = self.cost.seconds(StepShape(size, size, *beside, num_noisy)) if load.num_prefill_rows else alone
        after = self.cost.seconds(StepShape(size, size + num_drafts, *beside, num_noisy + num_noisy_drafts))
        return Offer(tokens, after - before, size, alone + self._realized.pause)

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """Record the tokens and seconds of the last step, which began `pause` seconds after the one before."""
        if pause is not None:
            self._realized.paused(pause)
        if self._watched:
            self._realized.stepped(num_tokens, seconds)

    def _choose(self, mix: BatchMix, load: StepLoad) -> None:
        if self.cost.num_turns != self._num_turns:
            self._num_turns = self.cost.num_turns
            self._realized.reset()
            self._probe.doubt()
        is_known = self._realized.look_back(self._num_since * self._num_sequences)
        load = StepLoad(num_context=load.num_context)
        self._price(mix.size, load, anew=True)
        plain = (1.0 + self._proposals.gain) * self._expected(None, mix, load).rate
        rates = self._rates(mix, load, FIRST_RULES) if self._rule is None else {}
        if not rates or max(rates.values()) > HOPELESS * plain:
            rates = self._rates(mix, load, RULES)
        best = max(rates, key=rates.__getitem__, default=None)
        most = 0.0 if best is None else rates[best]
        if best is None:  # no sequence may draft: nothing is learnt, and trials come no nearer
            self._num_plain = min(self._num_plain, PATIENCE)
        elif self._rule is None and not is_known:
            self._realized.forgive(self._num_since / self._probe.rarity)
        self._advantage = most / plain - 1.0
        self._is_without_masks = not any(kind.max_masks for kind in mix.kinds)
        self._hopeless_size = mix.size if best is not None and most < HOPELESS * plain else math.inf
        now = 0.0 if self._rule is None else rates.get(self._rule, 0.0)
        if self._rule is None:
            self._num_to_look = min(2 * self._num_to_look, SELDOM)
            if most > (1.0 + TAKE_UP) * plain and self._num_plain >= PATIENCE:
                self._rule = best
            elif self._probe.is_due(most / plain, self._num_plain):
                self._rule = best
                self._probe.begin()
        elif best is None:
            self._rule = None
        elif self._probe.goes_on(self._num_since):
            self._rule = self._rule if now else best
        elif most < (1.0 + LEAVE) * plain:
            self._rule = None
            self._probe.failed()
        else:
            self._rule = best if most > (1.0 + CHANGE) * now else self._rule
            self._probe.paid()
        self._rate = plain if self._rule is None else rates[self._rule]
        self._realized.predict(self._rate / self._realized.share, self._expected(self._rule, mix, load).seconds)

    def _rates(self, mix: BatchMix, load: StepLoad, rules: Sequence[Rule]) -> dict[Rule, float]:
        """Return the expected tokens per second of each rule that gives some sequence masks, scaled by the realized
        share.
        """
        kinds = [kind for kind in mix.kinds if kind.max_masks]
        if not kinds:
            return {}
        known: dict[tuple[LayoutYield, ...], float] = {}  # several rules give the same layouts
        rates: dict[Rule, float] = {}
        for rule in rules:
            yields = tuple([chosen(kind, rule) for kind in kinds])
            if all(not layout_yield.mask_rows for layout_yield in yields):
                continue
            if yields not in known:
                known[yields] = self._realized.share * self._expected(rule, mix, load).rate
            rates[rule] = known[yields]
        return rates

    def _beside(self, mix: BatchMix, load: StepLoad) -> Rule | None:
        """Return the rule for a step with prompt rows: time is valued at the tokens of a step without them."""
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
        return Expected(tokens, self.cost.seconds(shape) + self._realized.pause)

    def _alone(self, kind: SequenceClass, rule: Rule, mix: BatchMix, load: StepLoad) -> Expected:
        """Expectation for one sequence, averaged over step sizes because cost is not linear in them."""
        layout_yield = chosen(kind, rule) if kind.max_masks else PLAIN
        total = seconds = 0.0
        for share, chain, masks in layout_yield.steps:
            noisy = chain if mix.num_noisy else 0
            shape = StepShape(
                1, chain, masks, int(masks > 0), load.num_prefill_rows, load.num_prefill_pairs, load.num_context, noisy
            )
            total += share
            seconds += share * self.cost.seconds(shape)
        return Expected(layout_yield.tokens, seconds / total + self._realized.pause)

    def _price(self, num_sequences: int, load: StepLoad, *, anew: bool = False) -> None:
        """Update `row_price`: a row's cost at the current value of a token, with a margin for the host's work.
        Recomputed only after changes, or if `anew`.

        It uses the most expensive of three step sizes: lookup drafts of one sequence, of two, and of all. Those sizes
        occur, so their measured costs are better known than those in between.
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
        self.row_price = PROPOSAL_MARGIN * dearest * num_sequences / (before + self._realized.pause)

    def _is_probe(self) -> bool:
        """Whether to run a plain step now, to keep its cost known; more often where plain decoding is nearly
        as fast.
        """
        self._num_unprobed += 1
        if self._num_unprobed < (PROBE_EVERY if self._advantage <= PROBE_WITHIN else PROBE_SELDOM):
            return False
        self._num_unprobed = 0
        return True

    def _layout(self, limits: DraftLimits, kind: SequenceClass, rule: Rule | None) -> DraftLayout:
        layout = PLAIN.layout if rule is None or not kind.max_masks else chosen(kind, rule).layout
        if not limits.chances:
            return layout
        # Drafts from no mask are added while each brings more than its row costs.
        num_drafts, reached = 0, 1.0
        for chance in limits.chances:
            reached *= chance
            if reached <= self.row_price:
                break
            num_drafts += 1
        groups = (*layout.masks[: num_drafts + 1], *(0,) * (num_drafts - layout.num_drafts))
        return DraftLayout.of(num_drafts, groups)


def _differ(size: int, known: int) -> bool:
    """Whether the batch size differs from `known` by more than an eighth."""
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
    """Build a class from rounded log-odds, so that few classes exist and layout yields are looked up, not computed."""
    return SequenceClass(tuple(1.0 / (1.0 + math.exp(-odds - level / LEVELS_PER_UNIT)) for odds in snapshot), max_masks)
