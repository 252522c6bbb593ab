"""Chooses the draft layouts of a step with the most expected tokens per measured second. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol, Self

from space_model.geometry.draft_layout import DraftLayout

from space_server.drafts import LEVELS_PER_UNIT, Acceptance
from space_server.step_cost import OUTLIER, StepCost, StepShape


@dataclass(slots=True)  # not frozen, which would double the cost of making one per sequence and step
class DraftLimits:
    """Bounds on what one sequence can lay out in this step."""

    seq_id: int
    num_drafts: int  # drafts that its slots and limits allow
    max_masks: int  # masks per group that its bound and the checkpoint allow
    num_left: int  # tokens it may still emit, this step's included
    is_noisy: bool = False  # not greedy, so sampling adds noise
    acceptance: Acceptance | None = None  # of drafts from its masks
    chances: Sequence[float] = ()  # acceptance of each draft, given those before; only of drafts from no mask
    offered: Sequence[float] = ()  # chances of the drafts that its text offered, whether taken or not
    is_read: bool = False  # has a drafter that reads its text
    num_forced: int = 0  # drafts that the request commands; 0: the controller chooses
    max_head_drafts: int = 0  # drafts of the recurrent head that its bound and the checkpoint allow
    head_acceptance: Acceptance | None = None  # of drafts from that head

    @property
    def live_chances(self) -> Sequence[float]:
        """The chances of those drafts that its slots and limits allow."""
        return self.chances if self.num_drafts >= len(self.chances) else self.chances[: self.num_drafts]

    @property
    def forced_layout(self) -> DraftLayout:
        """The layout that the request commands: of masks where there are some, else of the recurrent head."""
        num_drafts = min(self.num_drafts, self.num_forced)
        return DraftLayout.forced(num_drafts, self.num_forced, by_masks=self.max_masks > 0)

    def fit(self, layout: DraftLayout) -> DraftLayout:
        """Return the layout reduced to the drafts and masks that this sequence has and can use. With g drafts accepted
        this step emits g+1 tokens, and the next one verifies at most num_left - (g+1) - 1 drafts."""
        if layout.in_turns:
            layout = layout.with_drafts(self.num_drafts)
        drafts = min(layout.num_drafts, self.num_drafts)
        if layout.head_drafts:
            made = min(layout.head_drafts, self.max_head_drafts, self.num_left - 2)
            return DraftLayout.by_head(drafts, max(0, made))
        most = max(layout.masks)
        if drafts == layout.num_drafts and (not most or most <= min(self.max_masks, self.num_left - drafts - 2)):
            return layout
        masks = (min(layout.masks[g], self.max_masks, self.num_left - g - 2) for g in range(drafts + 1))
        return DraftLayout.of(drafts, tuple(max(0, count) for count in masks))


class StepLoad(NamedTuple):
    """The step's work besides the layouts to choose: prompts, and sequences with forced drafts."""

    num_other_rows: int = 0
    num_other_pairs: int = 0  # (such a row, previously computed id) pairs
    num_context: int = 0  # computed ids, summed over the sequences to lay out

    def beside(self, forced: Sequence[DraftLayout], num_sequences: int) -> StepLoad:
        """Return the load for the others of `num_sequences` sequences, where some have these layouts in any case."""
        num_rows = sum(1 + layout.num_drafts + layout.num_masks for layout in forced)
        context = self.num_context // num_sequences  # of each, on average
        return StepLoad(
            self.num_other_rows + num_rows,
            self.num_other_pairs + num_rows * context,
            self.num_context - len(forced) * context,
        )


class Controller(Protocol):
    """Chooses the draft layouts of each step; the scheduler makes them fit."""

    @property
    def row_price(self) -> float:
        """Accepted drafts that one more chain row must bring; sources skip drafts worth less."""

    @property
    def is_paused(self) -> bool:
        """Whether reading texts for drafts is paused because it costs more than it saves; predictions continue."""

    def layouts(self, limits: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """Return one layout per sequence that reaches its root in this step, in their order."""

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """Record the tokens and the duration of the step with these layouts.
        `pause`: seconds since the end of the step before, if there was work all along."""


class FixedLayout:
    """Lays out each sequence by a fixed rule: for tests, measurements, and `--speculation K`."""

    row_price = 0.0
    is_paused = False

    def __init__(self, rule: Callable[[DraftLimits], DraftLayout]) -> None:
        self._rule = rule

    @classmethod
    def full(cls, num_drafts: int) -> Self:
        """All drafts up to num_drafts, with every group whole: (k+1)² rows."""
        return cls(lambda limit: DraftLayout.full(min(limit.num_drafts, num_drafts), num_drafts))

    @classmethod
    def by_head(cls, num_drafts: int) -> Self:
        """All drafts up to num_drafts, made by the recurrent head: k+1 rows."""
        return cls(lambda limit: DraftLayout.by_head(min(limit.num_drafts, num_drafts), num_drafts))

    def layouts(self, limits: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        """Return the rule's layout for each sequence."""
        return [self._rule(limit) for limit in limits]

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        """Do nothing: the rule is fixed."""


def choose_layouts(controller: Controller, limits: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
    """Return one layout per sequence that reaches its root: where drafts are forced those, else the controller's."""
    free = [one for one in limits if not one.num_forced]
    if len(free) == len(limits):
        return controller.layouts(limits, load)
    forced = [one.forced_layout for one in limits if one.num_forced]
    of_forced, of_free = iter(forced), iter(controller.layouts(free, load.beside(forced, len(limits))))
    return [next(of_forced if one.num_forced else of_free) for one in limits]


_STATIONARY_ROUNDS = 64
_RARE = 0.005  # states with a smaller share of the steps are ignored

REFERENCE_REACH = (1.0, 0.7, 0.49, 0.34, 0.24, 0.17)
"""A_j of a trained checkpoint, by which masks are kept where layouts do not follow the acceptance."""


@dataclass(frozen=True, slots=True, eq=False)
class LayoutYield:
    """A layout's long-run means per step."""

    layout: DraftLayout
    tokens: float  # expected tokens emitted
    chain_rows: float
    mask_rows: float
    steps: tuple[tuple[float, int, int], ...] = ()  # (share of steps, chain rows, masks)

    @classmethod
    def of(cls, layout: DraftLayout, chances: Sequence[float]) -> LayoutYield:
        """`chances[j-1]`: probability that a draft of mask depth j is accepted, given those before it are (SPACE §5).

        A step's drafts come from the masks of the step before: fewer, and from deeper masks, where an earlier group
        replaces one that was not laid out. So a step is in one of a few states (drafts, depth of the first); the means
        are over the stationary distribution of that Markov chain.
        """
        states = [(0, 1)]
        moves: list[list[tuple[int, float]]] = []  # per state: the next one's number, and its chance
        rows: list[tuple[float, int, int]] = []
        at = 0
        while at < len(states):
            num_drafts, first = states[at]
            step = layout.with_drafts(num_drafts)
            out, emitted, reached = [], 1.0, 1.0
            for accepted in range(num_drafts + 1):
                depth = min(first + accepted, len(chances)) - 1
                goes_on = reached * chances[depth] if accepted < num_drafts else 0.0
                emitted += goes_on
                choice = step.next_drafts(accepted)
                state = (0, 1) if choice is None else (min(choice.num_drafts, layout.num_drafts), choice.first_mask)
                if state[0] == 0:
                    state = (0, 1)
                if state not in states:
                    states.append(state)
                out.append((states.index(state), reached - goes_on))
                reached = goes_on
            moves.append(out)
            rows.append((emitted, 1 + num_drafts, step.num_masks))
            at += 1
        shares = [1.0 / len(states)] * len(states)
        for _ in range(_STATIONARY_ROUNDS):
            after = [0.0] * len(states)
            for share, out in zip(shares, moves, strict=True):
                for number, chance in out:
                    after[number] += share * chance
            # Averaged with the old shares, so that periodic chains converge too.
            shares = [0.5 * (old + new) for old, new in zip(shares, after, strict=True)]
        tokens, chain, masks = (sum(share * row[n] for share, row in zip(shares, rows, strict=True)) for n in range(3))
        sizes: dict[tuple[int, int], float] = {}
        for share, (_, chain_rows, mask_rows) in zip(shares, rows, strict=True):
            sizes[chain_rows, mask_rows] = sizes.get((chain_rows, mask_rows), 0.0) + share
        steps = ((share, *size) for size, share in sizes.items() if share > _RARE)
        return cls(layout, tokens, chain, masks, tuple(steps))

    @classmethod
    def by_head(cls, num_drafts: int, chances: Sequence[float]) -> LayoutYield:
        """Of drafts from the recurrent head: each step verifies `num_drafts` of them, whatever was accepted before.
        `chances[j-1]`: probability that its j-th draft is accepted, given those before it are."""
        reached = accumulate((chances[min(j, len(chances) - 1)] for j in range(num_drafts)), mul)
        rows = 1 + num_drafts
        return cls(DraftLayout.by_head(num_drafts, num_drafts), 1.0 + sum(reached), rows, 0.0, ((1.0, rows, 0),))


PLAIN = LayoutYield(DraftLayout.plain(), 1.0, 1.0, 0.0, ((1.0, 1, 0),))


@lru_cache(maxsize=64)
def few_layouts(max_drafts: int) -> tuple[DraftLayout, ...]:
    """Return the layouts of masks that steps are captured for, at most six; they do not depend on the acceptance.

    A captured step is of one layout, and its first two runs take 20 to 60 ms. On an H200, layouts that followed every
    change of a sequence's acceptance made SmolLM2 three times slower than plain decoding at one stream.
    """
    found = []
    for k in sorted({1, 2, 3, max_drafts} & set(range(1, max_drafts + 1))):
        if k > 2:
            found.append(DraftLayout.pruned(k, k, k * (k + 1) // 2, REFERENCE_REACH))
        found.append(DraftLayout.full(k, k))
    return tuple(found)


@lru_cache(maxsize=4096)
def head_yield(chances: tuple[float, ...], num_drafts: int) -> LayoutYield:
    """Return `LayoutYield.by_head`, cached."""
    return LayoutYield.by_head(num_drafts, chances)


@lru_cache(maxsize=4096)
def layout_yields(
    chances: tuple[float, ...], max_drafts: int, *, may_take_turns: bool = False, few: bool = False
) -> tuple[LayoutYield, ...]:
    """Return the layouts worth considering at these acceptance probabilities, plain decoding first.

    For each k up to `max_drafts` it tries the most valuable masks, from one per draft to all, and where drafts and
    verification may take turns, those; it keeps the layouts that no other beats with fewer rows. `few`: only those of
    `few_layouts`.
    """
    reach = [1.0]
    for chance in chances:
        reach.append(reach[-1] * chance)
    found = [PLAIN]
    if few:
        found += [LayoutYield.of(layout, chances) for layout in few_layouts(max_drafts)]
    for k in range(1, max_drafts + 1):
        for num_kept in () if few else range(k, k * (k + 1) + 1, k):
            found.append(LayoutYield.of(DraftLayout.pruned(k, k, num_kept, reach), chances))
        if may_take_turns:
            found.append(LayoutYield.of(DraftLayout.turns(k), chances))
    found.sort(key=lambda layout_yield: (layout_yield.chain_rows + layout_yield.mask_rows, -layout_yield.tokens))
    best: list[LayoutYield] = []
    for layout_yield in found:
        if not best or layout_yield.tokens > best[-1].tokens + 1e-6:
            best.append(layout_yield)
    return tuple(best)


SHARE_RATE, SHARE_STEPS = 0.2, 96  # per look the share moves by sequence steps over SHARE_STEPS, at most SHARE_RATE
SHARE_FORGIVEN = 0.002  # part of the shortfall that each plain step forgets, so that drafts are tried again
LEAST_SHARE, MOST_SHARE = 0.4, 1.1
GAP_RATE, LONGEST_GAP = 0.02, 0.005  # moving average of the seconds between steps; longer gaps are not part of stepping


class RealizedSpeedup:
    """Compares a rule's predicted tokens per second with those of its steps since the last look: the cost model ignores
    how speculation starts and ends.

    The share belongs to the batch's size, by doublings: what drafts kept among many, or while the machine slowed down
    under them, says little about a few. A size met for the first time starts with the share of the size before.
    """

    def __init__(self) -> None:
        self.share = 1.0  # measured rate over predicted rate, at the present size
        self._size = 0  # the batch's, by doublings
        self._shares: dict[int, float] = {}  # of the other sizes met
        self.pause = 0.0  # mean seconds between two steps
        self._predicted_rate = 1.0  # predicted tokens per second
        self._predicted_seconds = math.inf  # predicted seconds of a step
        self._tokens, self._seconds = 0, 0.0  # of the steps since then

    def predict(self, rate: float, step_seconds: float) -> None:
        """Set the predicted tokens per second and seconds per step."""
        self._predicted_rate, self._predicted_seconds = rate, step_seconds

    def paused(self, seconds: float) -> None:
        """Record the seconds between two steps."""
        self.pause += GAP_RATE * (min(seconds, LONGEST_GAP) - self.pause)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """Record a step by the rule. Outliers are capped as in the cost model."""
        self._tokens += num_tokens
        self._seconds += min(seconds + self.pause, OUTLIER * self._predicted_seconds)

    def look_back(self, num_steps: int) -> bool:
        """Update the share from the steps since the last look; False if none followed the rule."""
        if not self._seconds:
            return False
        kept = self._tokens / (self._seconds * self._predicted_rate)
        self.share += min(SHARE_RATE, num_steps / SHARE_STEPS) * (min(MOST_SHARE, max(LEAST_SHARE, kept)) - self.share)
        self._tokens, self._seconds = 0, 0.0
        return True

    def resize(self, num_sequences: int) -> None:
        """Go on with a batch of `num_sequences`."""
        size = num_sequences.bit_length()
        if size != self._size:
            self._shares[self._size], self._size = self.share, size
            self.share = self._shares.get(size, self.share)

    def reset(self) -> None:
        """Reset: the machine's speed has changed, so earlier measurements do not apply."""
        self.share = 1.0
        self._shares.clear()
        self._tokens, self._seconds = 0, 0.0

    def forgive(self, num_steps: float) -> None:
        """Move the share towards 1 after `num_steps` plain steps."""
        self.share += (1.0 - self.share) * min(1.0, SHARE_FORGIVEN * num_steps)


TRIAL_STEPS = 16  # steps of a trial
FIRST_TRIAL_AFTER, MOST_TRIAL_WAIT = 192, 6144  # plain steps before a trial: they double after each that failed
TRIAL_WORTH = 0.92  # share of plain decoding that drafting must be expected to bring
TRIAL_FORGOTTEN = 0.9  # shortens the wait at each look at which drafting is faster
DOUBTED_TRIALS = 4  # trials of drafting that looks too slow, after its measured cost became doubtful


class SpeculationProbe:
    """Schedules short trials of drafting where it is expected to be slower: without them one cost measured in a bad
    moment would keep plain decoding for good.

    Each batch size, by doublings, has its own wait: trials that failed among many say little about a few.
    """

    def __init__(self) -> None:
        self._num_left = 0  # steps left of the running trial
        self._wait = FIRST_TRIAL_AFTER  # plain steps before the next trial, at the present size
        self._size = 0  # the batch's, by doublings
        self._waits: dict[int, int] = {}  # of the other sizes met
        self._num_doubted = 0  # trials left that run however slow drafting looks

    @property
    def rarity(self) -> float:
        """How many times the first distance the next trial waits."""
        return self._wait / FIRST_TRIAL_AFTER

    def resize(self, num_sequences: int) -> None:
        """Go on with a batch of `num_sequences`."""
        size = num_sequences.bit_length()
        if size != self._size:
            self._waits[self._size], self._size = self._wait, size
            self._wait = self._waits.get(size, FIRST_TRIAL_AFTER)

    def is_due(self, worth: float, num_plain: int) -> bool:
        """Whether to start a trial after `num_plain` plain steps, if drafting is expected to bring `worth` of plain
        decoding. Where costs are doubted, drafting that looks k times too slow is tried k² times as rarely."""
        if worth > TRIAL_WORTH:
            return num_plain >= self._wait
        return bool(self._num_doubted) and worth > 0.0 and num_plain >= (TRIAL_WORTH / worth) ** 2 * self._wait

    def begin(self) -> None:
        """Start a trial."""
        self._num_left = TRIAL_STEPS
        self._num_doubted = max(0, self._num_doubted - 1)

    def doubt(self) -> None:
        """Discard what trials have shown: the machine's speed changed, or its costs were measured beside other work."""
        self._num_doubted, self._wait = DOUBTED_TRIALS, FIRST_TRIAL_AFTER
        self._waits.clear()

    def goes_on(self, num_steps: int) -> bool:
        """Whether the trial still runs after `num_steps` more steps."""
        self._num_left = max(0, self._num_left - num_steps)
        return self._num_left > 0

    def failed(self) -> None:
        """Record that drafting was slower."""
        self._num_left, self._wait = 0, min(2 * self._wait, MOST_TRIAL_WAIT)

    def paid(self) -> None:
        """Record that drafting is faster."""
        self._num_left, self._wait = 0, max(FIRST_TRIAL_AFTER, int(TRIAL_FORGOTTEN * self._wait))


LOOKUP_MARGIN = 1.1  # worth of the drafts' tokens over the time they take: the best of noisy estimates is too good
LOOKUP_RETRY_EVERY = 64  # one in so many steps that do not save time is run anyway, so that its cost stays known
READING_SECONDS = 40e-6
"""Seconds per step for reading one sequence's text, proposing, and planning with proposals. Measured with the embedded
model, with and without, in turn: 60e-6 to 90e-6 alone, 43e-6 among 8, 24e-6 among 32. Most of it is cache misses after
a pass over the weights; in a loop that does nothing else it is 3.4e-6.
"""
READING_WINDOW, LEAST_READING_STEPS = 64, 8  # readings and steps over which drafts must save what reading costs
PAUSE_STEPS, RETRY_READINGS = 80, 8
"""Steps of a pause, and the readings (over LEAST_READING_STEPS at least) that decide whether another one follows. So
drafts are back within 100 steps of a text that offers them, and reading in vain takes a tenth of its time."""
ESTIMATE_EVERY = 4  # one in so many steps with mask drafts also estimates what drafts without masks would have saved
GAIN_RATE = 1 / 128  # per step, of the moving average of what drafts save


@dataclass(frozen=True, slots=True)
class Offer:
    """Expected gain and cost of a step's drafts that no mask made."""

    tokens: float  # expected, beyond those of a plain step
    seconds: float  # beyond those of a plain step
    plain_tokens: float  # of a plain step
    plain_seconds: float
    num_chains: int  # sequences with such drafts

    @property
    def saved(self) -> float:
        """Seconds of plain decoding that the tokens are worth, less those they take; negative if drafts slow down."""
        return self.tokens * self.plain_seconds / self.plain_tokens - LOOKUP_MARGIN * self.seconds


class ChainTally:
    """How often a sequence's chain is from no mask, and what such chains bring: decayed sums over sequence steps.

    A text offers so many of these chains per token that is emitted without them, however it is drafted there. Where the
    model's own drafts make those steps longer, chains from no mask follow each other sooner.
    """

    def __init__(self) -> None:
        self._other_tokens = 1.0 / GAIN_RATE  # of the steps without such chains
        self._num_chains = 0.0
        self._accepted = 0.0  # expected drafts, of these chains
        self._seconds = 0.0  # beyond those of a step without

    def count(self, other_tokens: float, num_chains: int, accepted: float, seconds: float, weight: int = 1) -> None:
        """Record a step. `weight`: how many steps it stands for."""
        kept = 1.0 - weight * GAIN_RATE
        self._other_tokens = kept * self._other_tokens + weight * other_tokens
        self._num_chains = kept * self._num_chains + weight * num_chains
        self._accepted = kept * self._accepted + weight * accepted
        self._seconds = kept * self._seconds + weight * seconds

    def rate(self, num_sequences: int, tokens: float, seconds: float) -> float:
        """Return the tokens per second with these chains, of steps that without them emit `tokens` in `seconds`."""
        if not self._num_chains:
            return tokens / seconds
        per_sequence = tokens / num_sequences
        odds = per_sequence * self._num_chains / self._other_tokens
        share = odds / (1.0 + odds)  # of the steps of a sequence
        accepted, more = self._accepted / self._num_chains, self._seconds / self._num_chains
        emitted = (1.0 - share) * per_sequence + share * (1.0 + accepted)
        return num_sequences * emitted / (seconds + num_sequences * share * more)


class LookupPolicy:
    """Decides whether drafts from no mask save time, per step, and whether to read texts for them at all.

    A draft's own price ends a chain of drafts. The first extra row is a separate question: a step with one row per
    sequence is the cheapest kernel shape, and the cost of leaving it is shared by all drafts of the step.
    """

    def __init__(self) -> None:
        self._num_refused = 0
        self._alone = ChainTally()  # over plain decoding
        self._beside = ChainTally()  # where the model drafts, too
        self._saved = self._spent = 0.0  # seconds in this window: saved by drafts, spent reading
        self._num_steps = self._num_readings = 0  # of the window
        self._num_left = 0  # steps left of the pause
        self._is_retry = False  # whether nothing was saved before the pause
        self._size = 0  # sequences when the pause began
        self.is_paused = False  # texts are not read while paused
        self._num_by_masks = 0  # steps in which masks drafted

    def rate(self, num_sequences: int, seconds: float) -> float:
        """Return the tokens per second of plain decoding with these drafts, where plain steps take `seconds`."""
        plain = float(num_sequences)
        return plain / seconds if self.is_paused else self._alone.rate(num_sequences, plain, seconds)

    def rate_beside(self, num_sequences: int, expected: Expected) -> float:
        """Return the tokens per second of the model's drafts with these beside them."""
        return self._beside.rate(num_sequences, *expected)

    @property
    def asks(self) -> bool:
        """Whether this step, in which masks draft, should estimate drafts without masks."""
        return self._num_by_masks % ESTIMATE_EVERY == 0

    def stepped(self, num_sequences: int, num_read: int, *, by_masks: bool) -> None:
        """Start a step in which `num_read` texts can be read. `by_masks`: masks draft in it, too."""
        self._num_by_masks += by_masks
        self._num_left = max(0, self._num_left - 1)
        # A batch of half the size resumes: there drafts cost less.
        self.is_paused = not by_masks and self._num_left > 0 and 2 * num_sequences > self._size
        if self.is_paused or by_masks or not num_read:
            return
        self._spent += READING_SECONDS * num_read
        self._num_steps += 1
        self._num_readings += num_read
        # A smaller batch that resumed early is given the whole window.
        window = RETRY_READINGS if self._is_retry and not self._num_left else READING_WINDOW
        if self._num_readings < window or self._num_steps < LEAST_READING_STEPS:
            return
        self._is_retry = self._saved < self._spent
        if self._is_retry:
            self.is_paused, self._size, self._num_left = True, num_sequences, PAUSE_STEPS
        self._saved = self._spent = 0.0
        self._num_steps = self._num_readings = 0

    def pays(self, offer: Offer) -> bool:
        """Whether a step without mask drafts should verify this offer."""
        if offer.saved <= 0.0:
            self._num_refused += 1
            if self._num_refused % LOOKUP_RETRY_EVERY:
                self.none_pays(round(offer.plain_tokens))
                return False
        self._saved += offer.saved
        self._count(offer)
        return True

    def would_pay(self, offer: Offer | None, num_sequences: int) -> None:
        """Record an estimate made because of `asks`; it stands for the steps in between."""
        if offer is None or offer.saved <= 0.0:
            self._alone.count(num_sequences, 0, 0.0, 0.0, ESTIMATE_EVERY)
        else:
            self._count(offer, ESTIMATE_EVERY)

    def none_pays(self, num_sequences: int) -> None:
        """Record a step of plain decoding without such drafts."""
        self._alone.count(num_sequences, 0, 0.0, 0.0)

    def beside(self, other_tokens: float, num_chains: int, accepted: float, seconds: float) -> None:
        """Record an estimate for steps in which the model drafts, as `ChainTally.count` does."""
        self._beside.count(other_tokens, num_chains, accepted, seconds, ESTIMATE_EVERY)

    def _count(self, offer: Offer, weight: int = 1) -> None:
        self._alone.count(offer.plain_tokens - offer.num_chains, offer.num_chains, offer.tokens, offer.seconds, weight)


MASK_PRICE = 0.8  # cost of a mask row relative to a chain row: it is neither sampled nor written

ENABLE_MARGIN = 0.08  # expected gain over plain decoding needed to start speculating: starts and ends are not in it
DISABLE_MARGIN = 0.0  # and to continue, lower so that a batch at the threshold does not switch back and forth
CHANGE_MARGIN = 0.02  # expected gain needed to change the rule

PROPOSED_ROWS = (8, 16)  # extra rows of one sequence's lookup drafts, and of two sequences'
PROPOSAL_MARGIN = 1.5  # tokens that a draft from no mask must bring over the price of its row, a noisy difference

LOOK_EVERY, LOOK_SELDOM = 16, 64
"""Steps between two looks at the choice while the batch keeps its size to an eighth. While decoding stays plain the
interval doubles up to the second; a batch of another size waits for the first."""

HOPELESS = 0.9
"""If drafting reaches less than this share of plain decoding, it is not tried in a larger batch either: rows of more
sequences cost more. Under load every batch differs in size, and a look costs a tenth of such a step. If the first
rules fall this short, the others are not evaluated.
"""

PATIENCE = 24  # plain steps before speculation starts again: starting costs a step of masks alone

PROBE_EVERY, PROBE_WITHIN, PROBE_SELDOM = 256, 0.15, 1024
"""While speculating, one in so many steps is plain, to measure its cost, where the expected gain is below the share;
one in PROBE_SELDOM where it is above, since the plain cost may be wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceClass:
    """Sequences treated alike share one object, the key for looking up their layout."""

    chances: tuple[float, ...]  # acceptance probability by mask depth 1, 2, …
    max_masks: int
    may_take_turns: bool = False
    head_chances: tuple[float, ...] = ()  # of the recurrent head's first, second, … draft
    max_head_drafts: int = 0
    has_few_layouts: bool = False  # see `few_layouts`

    @property
    def can_draft(self) -> bool:
        """Whether there are masks or a recurrent head to draft with."""
        return self.max_masks > 0 or self.max_head_drafts > 0


class BatchMix:
    """The sequences that reach their root in a step, by class."""

    def __init__(self, limits: Sequence[DraftLimits], kinds: Sequence[SequenceClass]) -> None:
        self.kinds = Counter(kinds)
        self.size = len(limits)
        self.num_noisy = sum(one.is_noisy for one in limits)  # sequences that are not greedy


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Selects a class's layout: of masks, by the price of a row in tokens or the best within a bound on rows; or so
    many drafts of the recurrent head."""

    price: float | None  # tokens that a row must bring
    most_rows: int | None = None  # of a sequence's step, where no price is given
    head_drafts: int = 0  # of the recurrent head; 0: masks draft


HEAD_RULES = tuple(Rule(None, head_drafts=count) for count in (3, 1, 5, 2, 4, 6, 8, 10, 12, 16))
MASK_RULES = (
    *(Rule(price) for price in (0.6, 0.45, 0.34, 0.26, 0.2, 0.15, 0.11, 0.08, 0.06, 0.045, 0.03, 0.0)),
    *(Rule(None, rows) for rows in (3, 4, 6, 8, 9, 11, 14, 16, 20, 24, 30)),
)
RULES = (*MASK_RULES, *HEAD_RULES)
"""All rules tried. Prices suit mixed batches; row bounds find layouts below a machine's roofline ridge."""

FIRST_RULES = (*MASK_RULES[::4], *HEAD_RULES[:3])
"""A sample of all sizes: no other rule is far better than all of these."""


@lru_cache(maxsize=8192)
def chosen(kind: SequenceClass, rule: Rule) -> LayoutYield:
    """Return the layout of a class by a rule; plain decoding where it has not what the rule drafts with."""
    if rule.head_drafts:
        count = min(rule.head_drafts, kind.max_head_drafts)
        return head_yield(kind.head_chances, count) if count else PLAIN
    if not kind.max_masks:
        return PLAIN
    turns, few = kind.may_take_turns, kind.has_few_layouts
    found = layout_yields(kind.chances, kind.max_masks, may_take_turns=turns, few=few)
    if rule.price is None:
        assert rule.most_rows is not None
        return max((w for w in found if w.chain_rows + w.mask_rows <= rule.most_rows), key=lambda w: w.tokens)
    price = rule.price
    return max(found, key=lambda w: w.tokens - price * (w.chain_rows + MASK_PRICE * w.mask_rows))


class Expected(NamedTuple):
    """Expected tokens and seconds of a step by a rule."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


class SpeculationController:
    """A Controller that maximizes expected tokens per measured second over the whole batch.

    A few rules each give every sequence a layout. The rule with the most expected tokens per measured second is used;
    plain decoding is always a candidate, and must be beaten by a margin.
    """

    def __init__(self, cost: StepCost, *, has_few_layouts: bool = False, shares_layout: bool = False) -> None:
        """`has_few_layouts`: masks are laid out in the ways of `few_layouts` alone, for steps that are captured.
        `shares_layout`: all sequences of a step have one layout, so masks do not follow the chain of each."""
        self.cost = cost
        self._has_few_layouts = has_few_layouts
        self._places_masks = not (has_few_layouts or shares_layout)
        self._rule: Rule | None = None  # in use; None: plain decoding
        self._best: Rule | None = None  # at the last look, in use or not
        self._tokens_by_best = 1.0  # of a sequence's step
        self._num_uncompared = 0  # steps since drafts from no mask were last compared with its
        self._num_sequences = 0  # batch size at the last look
        self._num_surprises = 0  # of the cost model, at the last look
        self._num_turns = 0  # speed changes of the machine, at the last look
        self._num_since = 0  # steps since the last look
        self._num_to_look = LOOK_EVERY  # steps between two looks
        self._hopeless_size = math.inf  # batch size from which drafting is far too slow
        self._cannot_draft = False  # at the last look no sequence had masks or a recurrent head
        self._priced = 0, 0  # batch size and cost surprises that `row_price` was computed for
        self._probe = SpeculationProbe()
        self._num_plain = PATIENCE  # steps of plain decoding in a row
        self._num_unprobed = 0  # steps that speculated since plain decoding was measured
        self._advantage = 0.0  # expected gain over plain decoding
        self._rate = 0.0  # expected tokens per second of the choice
        self._realized = RealizedSpeedup()  # share of the predicted rate that is reached
        self._paid_at: set[int] = set()  # sizes of batches, by doublings, at which drafts paid when last in use
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
            self._watched = False
            return []
        num_read = sum(one.is_read for one in limits)
        self._proposals.stepped(len(limits), num_read, by_masks=self._rule is not None)
        self._num_since += 1
        surprised = self.cost.num_surprises != self._num_surprises
        has_changed = _differ(len(limits), self._num_sequences)
        is_hopeless = self._rule is None and len(limits) >= self._hopeless_size
        if self._num_since >= LOOK_EVERY and (self._rule is not None or (has_changed and not is_hopeless)):
            self._num_to_look = LOOK_EVERY
        has_others = any(one.chances for one in limits)
        # While drafting, a changed batch is evaluated at once; plain decoding can wait for its interval.
        is_anew = self._rule is not None or not self._num_sequences  # the first step
        is_due = (is_anew and (surprised or has_changed)) or self._num_since >= self._num_to_look
        is_due = is_due or (self._cannot_draft and any(self._class_of(one).can_draft for one in limits))
        if self._rule is None and not is_due and not has_others:  # fast path: plain decoding continues
            self._num_plain += 1
            self._watched = False
            self._proposals.none_pays(len(limits))
            if self._best is not None and self._is_to_compare():
                self._proposals.beside(self._tokens_by_best * len(limits), 0, 0.0, 0.0)
            return [PLAIN.layout] * len(limits)
        kinds = [self._class_of(one) for one in limits]
        if is_due:
            self._choose(BatchMix(limits, kinds), load)
            self._num_sequences, self._num_since = len(limits), 0
            self._num_surprises = self.cost.num_surprises
        elif has_others:
            self._price(len(limits), load)
        rule = self._rule
        # Masks in a single step are wasted: if the next step is plain, their drafts are dropped.
        if load.num_other_rows and rule is not None:
            rule = self._beside(BatchMix(limits, kinds), load)
        elif rule is not None and self._is_probe():
            rule = None
        begins = self._num_plain > 0  # the first step has masks but no drafts; the margin covers it
        self._num_plain = 0 if rule is not None else self._num_plain + 1
        self._watched = rule is not None and not begins and not load.num_other_rows
        found = [self._layout(one, kind, rule) for one, kind in zip(limits, kinds, strict=True)]
        if self._rule is None:
            offer = self._offer(limits, [one.live_chances for one in limits], load) if has_others else None
            if offer is None:
                self._proposals.none_pays(len(limits))
            elif not self._proposals.pays(offer):
                found = [PLAIN.layout] * len(limits)
        elif self._proposals.asks:
            self._proposals.would_pay(self._offer(limits, [one.offered for one in limits], load), len(limits))
        if self._best is not None and self._is_to_compare():
            self._proposals.beside(*self._beside_best(limits, kinds, load))
        return found

    def _is_to_compare(self) -> bool:
        """Whether to estimate in this step what drafts from no mask add to the model's own."""
        self._num_uncompared = (self._num_uncompared + 1) % ESTIMATE_EVERY
        return not self._num_uncompared

    def _class_of(self, limits: DraftLimits) -> SequenceClass:
        masks = _drafting(limits.acceptance, limits.max_masks)
        head = _drafting(limits.head_acceptance, limits.max_head_drafts)
        if masks is _NONE and head is _NONE:
            return _NO_MASKS
        may_take_turns = masks is not _NONE and _may_take_turns(limits.acceptance)
        return _sequence_class(masks, head, may_take_turns, self._has_few_layouts)

    def _offer(self, limits: Sequence[DraftLimits], chances: Sequence[Sequence[float]], load: StepLoad) -> Offer | None:
        """Return the gain and cost of drafts with these chances over a plain step; None without drafts."""
        chains = [self._worth(known) if known else () for known in chances]
        drafting = [(one, chain) for one, chain in zip(limits, chains, strict=True) if chain]
        if not drafting:
            return None
        size = len(limits)
        num_noisy = sum(one.is_noisy for one in limits)
        num_drafts = sum(len(chain) for _, chain in drafting)
        num_noisy_drafts = sum(len(chain) for one, chain in drafting if one.is_noisy)
        tokens = sum(sum(accumulate(chain, mul)) for _, chain in drafting)
        alone = self.cost.seconds(StepShape.plain(size, load.num_context, num_noisy))
        before = self.cost.seconds(StepShape(size, size, 0, 0, *load, num_noisy)) if load.num_other_rows else alone
        after = self.cost.seconds(StepShape(size, size + num_drafts, 0, 0, *load, num_noisy + num_noisy_drafts))
        return Offer(tokens, after - before, size, alone + self._realized.pause, len(drafting))

    def _worth(self, chances: Sequence[float]) -> Sequence[float]:
        """Return the chances of the leading drafts, each of which is expected to bring more than its row costs."""
        reached = 1.0
        for number, chance in enumerate(chances):
            reached *= chance
            if reached <= self.row_price:
                return chances[:number]
        return chances

    def _beside_best(
        self, limits: Sequence[DraftLimits], kinds: Sequence[SequenceClass], load: StepLoad
    ) -> tuple[float, int, float, float]:
        """Return what `LookupPolicy.beside` takes, if the model drafted by the best rule in this step: a chain from no
        mask is used where more of it is expected to be accepted."""
        assert self._best is not None
        other_tokens, num_chains, accepted = 0.0, 0, 0.0
        usual = joined = (0.0, 0.0, 0)  # chain rows, mask rows, sequences with masks
        for one, kind in zip(limits, kinds, strict=True):
            own = chosen(kind, self._best)
            parts = own.chain_rows, own.mask_rows, int(own.mask_rows > 0)
            usual = usual[0] + parts[0], usual[1] + parts[1], usual[2] + parts[2]
            chain = self._worth(one.live_chances) if one.chances else ()
            expected = sum(accumulate(chain, mul))
            if 1.0 + expected > own.tokens:
                layout = self._layout(one, kind, self._best)
                num_chains, accepted = num_chains + 1, accepted + expected
                parts = 1 + layout.num_drafts, layout.num_masks, int(layout.num_masks > 0)
            else:
                other_tokens += own.tokens
            joined = joined[0] + parts[0], joined[1] + parts[1], joined[2] + parts[2]
        if not num_chains:
            return other_tokens, 0, 0.0, 0.0
        before, after = (
            self.cost.seconds(StepShape(len(limits), round(rows), round(masks), drafting, num_context=load.num_context))
            for rows, masks, drafting in (usual, joined)
        )
        return other_tokens, num_chains, accepted, after - before

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
        self._realized.resize(mix.size)
        self._probe.resize(mix.size)
        load = StepLoad(num_context=load.num_context)
        self._price(mix.size, load, anew=True)
        plain = self._proposals.rate(mix.size, self._expected(None, mix, load).seconds)
        rates = self._rates(mix, load, FIRST_RULES) if self._rule is None else {}
        if not rates or max(rates.values()) > HOPELESS * plain:
            rates = self._rates(mix, load, RULES)
        best = max(rates, key=rates.__getitem__, default=None)
        self._best = best
        self._tokens_by_best = 1.0 if best is None else self._expected(best, mix, load).tokens / mix.size
        most = 0.0 if best is None else rates[best]
        if best is None:  # no sequence may draft: nothing is learnt, and trials come no nearer
            self._num_plain = min(self._num_plain, PATIENCE)
        elif self._rule is None and not is_known:
            self._realized.forgive(self._num_since / self._probe.rarity)
        self._advantage = most / plain - 1.0
        self._cannot_draft = not any(kind.can_draft for kind in mix.kinds)
        self._hopeless_size = mix.size if best is not None and most < HOPELESS * plain else math.inf
        now = 0.0 if self._rule is None else rates.get(self._rule, 0.0)
        size = mix.size.bit_length()
        # What was measured among many, on a machine that was busy with them, says little about a few.
        returns = size != self._num_sequences.bit_length() and size in self._paid_at
        returns = returns and best is not None and self._num_plain >= PATIENCE
        if self._rule is None:
            self._num_to_look = min(2 * self._num_to_look, LOOK_SELDOM)
            if most > (1.0 + ENABLE_MARGIN) * plain and self._num_plain >= PATIENCE:
                self._rule = best
            elif returns or self._probe.is_due(most / plain, self._num_plain):
                self._rule = best
                self._probe.begin()
                self._paid_at.discard(size)
        elif best is None:
            self._rule = None
        elif self._probe.goes_on(self._num_since):
            self._rule = self._rule if now else best
        elif most < (1.0 + DISABLE_MARGIN) * plain:
            self._rule = None
            self._probe.failed()
            self._paid_at.discard(size)
        else:
            self._rule = best if most > (1.0 + CHANGE_MARGIN) * now else self._rule
            self._probe.paid()
            self._paid_at.add(size)
        self._rate = plain if self._rule is None else rates[self._rule]
        self._realized.predict(self._rate / self._realized.share, self._expected(self._rule, mix, load).seconds)

    def _rates(self, mix: BatchMix, load: StepLoad, rules: Sequence[Rule]) -> dict[Rule, float]:
        """Return the expected tokens per second of each rule by which some sequence drafts, scaled by the realized
        share."""
        kinds = [kind for kind in mix.kinds if kind.can_draft]
        if not kinds:
            return {}
        known: dict[tuple[LayoutYield, ...], float] = {}  # several rules give the same layouts
        rates: dict[Rule, float] = {}
        for rule in rules:
            yields = tuple([chosen(kind, rule) for kind in kinds])
            if not any(layout_yield.layout.makes_drafts for layout_yield in yields):
                continue
            if yields not in known:
                expected = self._expected(rule, mix, load)
                known[yields] = self._realized.share * self._proposals.rate_beside(mix.size, expected)
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
        head_steps = 0
        for kind, count in mix.kinds.items():
            if rule is None or not kind.can_draft:
                continue
            layout_yield = chosen(kind, rule)
            tokens += count * (layout_yield.tokens - 1.0)
            chain += count * (layout_yield.chain_rows - 1.0)
            masks += count * layout_yield.mask_rows
            head_steps = max(head_steps, layout_yield.layout.head_drafts)
            drafting += count * (0.5 if layout_yield.layout.in_turns else layout_yield.mask_rows > 0)
        noisy = round(chain * mix.num_noisy / mix.size)
        shape = StepShape(mix.size, round(chain), round(masks), round(drafting), *load, noisy, head_steps)
        return Expected(tokens, self.cost.seconds(shape) + self._realized.pause)

    def _alone(self, kind: SequenceClass, rule: Rule, mix: BatchMix, load: StepLoad) -> Expected:
        """Expectation for one sequence, averaged over step sizes because cost is not linear in them."""
        layout_yield = chosen(kind, rule)
        head_steps = layout_yield.layout.head_drafts
        total = seconds = 0.0
        for share, chain, masks in layout_yield.steps:
            noisy = chain if mix.num_noisy else 0
            total += share
            shape = StepShape(1, round(chain), masks, int(masks > 0), *load, noisy, head_steps)
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
        """Whether to run a plain step now, to keep its cost known; more often where plain decoding is nearly as
        fast."""
        self._num_unprobed += 1
        if self._num_unprobed < (PROBE_EVERY if self._advantage <= PROBE_WITHIN else PROBE_SELDOM):
            return False
        self._num_unprobed = 0
        return True

    def _layout(self, limits: DraftLimits, kind: SequenceClass, rule: Rule | None) -> DraftLayout:
        layout = PLAIN.layout if rule is None else chosen(kind, rule).layout
        if self._has_few_layouts and not _has_place(layout, limits.num_left):
            layout = DraftLayout.of(layout.num_drafts, (0,) * (layout.num_drafts + 1))
        if not limits.chances:
            return layout
        chances = self._worth(limits.chances)
        if layout.in_turns or not chances:
            layout = layout.with_drafts(len(chances))
        elif layout.num_masks and self._places_masks:
            return DraftLayout.of(len(chances), _masks_behind(chances, kind, layout))
        groups = (*layout.masks[: len(chances) + 1], *(0,) * (len(chances) - layout.num_drafts))
        return DraftLayout.of(len(chances), groups, head_drafts=layout.head_drafts)


def _masks_behind(chances: Sequence[float], kind: SequenceClass, layout: DraftLayout) -> tuple[int, ...]:
    """Return the masks of each group behind a chain with these chances: those worth as much as the least valuable mask
    that `layout` has behind the masks' own drafts. Where the whole chain is accepted, its source goes on with the
    chance of its last draft, and masks are of no use."""
    reach = [*accumulate(kind.chances[: kind.max_masks], mul)]
    own = _stops(kind.chances[: layout.num_drafts])
    least = min(own[group] * reach[count - 1] for group, count in enumerate(layout.masks) if count)
    *stops, whole = _stops(chances)
    return tuple(
        sum(chance * reached >= (1.0 - 1e-9) * least for reached in reach)
        for chance in (*stops, whole * (1.0 - chances[-1]))
    )


def _stops(chances: Sequence[float]) -> list[float]:
    """Return the probabilities that exactly 0, 1, … of a chain's drafts are accepted."""
    reach = [1.0, *accumulate(chances, mul)]
    return [one - after for one, after in zip(reach, (*reach[1:], 0.0), strict=True)]


def _has_place(layout: DraftLayout, num_left: int) -> bool:
    """Whether every mask can become a draft of the next step, before the last of `num_left` tokens."""
    return all(not count or group + count + 2 <= num_left for group, count in enumerate(layout.masks))


def _differ(size: int, known: int) -> bool:
    """Whether the batch size differs from `known` by more than an eighth."""
    return 8 * abs(size - known) > known


_NONE: ClassOdds = ((), 0, 0)


def _drafting(acceptance: Acceptance | None, most: int) -> ClassOdds:
    return _NONE if acceptance is None or most < 1 else (acceptance.shape.snapshot, acceptance.level, most)


def _may_take_turns(acceptance: Acceptance | None) -> bool:
    return acceptance is not None and acceptance.shape.may_take_turns


_NO_MASKS = SequenceClass((), 0)

ClassOdds = tuple[tuple[float, ...], int, int]
"""Log-odds of a shape, the sequence's level, and the most drafts: of masks, or of a recurrent head."""


@lru_cache(maxsize=4096)
def _sequence_class(masks: ClassOdds, head: ClassOdds, may_take_turns: bool, has_few_layouts: bool) -> SequenceClass:
    """Build a class from rounded log-odds, so that few classes exist and layout yields are looked up, not computed."""

    def chances(drafting: ClassOdds) -> tuple[float, ...]:
        snapshot, level, _ = drafting
        return tuple(1.0 / (1.0 + math.exp(-odds - level / LEVELS_PER_UNIT)) for odds in snapshot)

    return SequenceClass(chances(masks), masks[2], may_take_turns, chances(head), head[2], has_few_layouts)
