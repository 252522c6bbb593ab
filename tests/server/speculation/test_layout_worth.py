"""A layout's worth is what drafting with it yields in the long run."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from space_model.geometry.draft_layout import DraftLayout
from space_server.speculation.controller import LayoutYield, layout_yields

chances_of = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4).map(tuple)


def simulated(layout: DraftLayout, chances: tuple[float, ...], steps: int) -> tuple[float, float, float]:
    """Tokens, chain rows, mask rows per step, by throwing dice."""
    rng = random.Random(1)
    num_drafts, first = 0, 1
    tokens = chain = masks = 0
    for _ in range(steps):
        step = layout.with_drafts(num_drafts)
        accepted = 0
        while accepted < num_drafts and rng.random() < chances[min(first + accepted, len(chances)) - 1]:
            accepted += 1
        tokens, chain, masks = tokens + accepted + 1, chain + 1 + num_drafts, masks + step.num_masks
        choice = step.next_drafts(accepted)
        num_drafts, first = (0, 1) if choice is None else (min(choice.num_drafts, layout.num_drafts), choice.first_mask)
    return tokens / steps, chain / steps, masks / steps


@given(chances_of)
def test_a_full_layout_yields_what_the_paper_says(chances: tuple[float, ...]) -> None:
    k = len(chances)
    reach, total = 1.0, 1.0
    for chance in chances:
        reach *= chance
        total += reach
    layout_yield = LayoutYield.of(DraftLayout.full(k, k), chances)
    assert layout_yield.tokens == pytest.approx(total)
    assert (layout_yield.chain_rows, layout_yield.mask_rows) == pytest.approx((k + 1, k * (k + 1)))


@pytest.mark.parametrize("num_kept", [3, 6, 9])
def test_a_pruned_layout_yields_what_dice_say(num_kept: int) -> None:
    chances = (0.7, 0.6, 0.5)
    layout = DraftLayout.pruned(3, 3, num_kept, (1.0, 0.7, 0.42, 0.21))
    layout_yield = LayoutYield.of(layout, chances)
    assert (layout_yield.tokens, layout_yield.chain_rows, layout_yield.mask_rows) == pytest.approx(
        simulated(layout, chances, 40_000), rel=0.03
    )


@given(chances_of)
def test_of_the_layouts_considered_more_rows_bring_more_tokens(chances: tuple[float, ...]) -> None:
    found = layout_yields(chances, len(chances))
    assert found[0].layout == DraftLayout.plain()
    rows = [layout_yield.chain_rows + layout_yield.mask_rows for layout_yield in found]
    assert rows == sorted(rows)
    assert [layout_yield.tokens for layout_yield in found] == sorted(layout_yield.tokens for layout_yield in found)
