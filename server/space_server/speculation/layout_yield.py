"""Expected tokens and rows per step of a layout that is used step after step. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from space_model.geometry.draft_layout import DraftLayout

_ROUNDS = 64

_RARE = 0.005
"""States with a smaller share of the steps are ignored."""


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
        for _ in range(_ROUNDS):
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


PLAIN = LayoutYield(DraftLayout.plain(), 1.0, 1.0, 0.0, ((1.0, 1, 0),))


@lru_cache(maxsize=4096)
def layout_yields(chances: tuple[float, ...], max_drafts: int) -> tuple[LayoutYield, ...]:
    """Return the layouts worth considering at these acceptance probabilities, plain decoding first.

    For each k up to `max_drafts` it tries the most valuable masks, from one per draft to all, and keeps the layouts
    that no other beats with fewer rows.
    """
    reach = [1.0]
    for chance in chances:
        reach.append(reach[-1] * chance)
    found = [PLAIN]
    for k in range(1, max_drafts + 1):
        for num_kept in range(k, k * (k + 1) + 1, k):
            found.append(LayoutYield.of(DraftLayout.pruned(k, k, num_kept, reach), chances))
    found.sort(key=lambda layout_yield: (layout_yield.chain_rows + layout_yield.mask_rows, -layout_yield.tokens))
    best: list[LayoutYield] = []
    for layout_yield in found:
        if not best or layout_yield.tokens > best[-1].tokens + 1e-6:
            best.append(layout_yield)
    return tuple(best)
