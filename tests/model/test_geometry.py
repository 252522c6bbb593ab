"""The integers of a step: its layout, packed rows and attention plan, against rows taken one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from space_kernels.paging.attention_plan import KEY_BLOCK, AttentionPlan, Bucket, PlanKey
from space_model.geometry.draft_layout import DraftLayout, GroupChoice
from space_model.geometry.forward_batch import ForwardBatch, Segment


@pytest.mark.parametrize("k", range(9))
def test_a_full_layout_has_the_papers_rows(k: int) -> None:
    assert DraftLayout.full(k, k).num_rows == (k + 1) ** 2


def test_masks_stand_where_the_worked_example_puts_them() -> None:
    assert DraftLayout.full(2, 2).mask_positions(root_position=2) == [3, 4, 4, 5, 5, 6]


@pytest.mark.parametrize("k", range(1, 9))
def test_the_accepted_group_gives_the_next_drafts(k: int) -> None:
    layout = DraftLayout.full(k, k)
    for accepted in range(k + 1):
        assert layout.next_drafts(accepted) == GroupChoice(group=accepted, first_mask=1, num_drafts=k)


def test_an_earlier_group_stands_in_where_it_reaches_behind_the_bonus() -> None:
    layout = DraftLayout(num_drafts=3, masks=(5, 0, 4, 0))
    assert layout.next_drafts(1) == GroupChoice(group=0, first_mask=2, num_drafts=4)
    assert layout.next_drafts(2) == GroupChoice(group=2, first_mask=1, num_drafts=4)
    assert layout.next_drafts(3) == GroupChoice(group=2, first_mask=2, num_drafts=3)
    assert list(layout.next_drafts(3).masks) == [2, 3, 4]  # type: ignore[union-attr]
    assert DraftLayout(3, (2, 0, 0, 0)).next_drafts(1) == GroupChoice(group=0, first_mask=2, num_drafts=1)
    assert DraftLayout(3, (2, 0, 0, 0)).next_drafts(2) is None
    assert DraftLayout.plain().next_drafts(0) is None


@pytest.mark.parametrize("k", range(1, 9))
def test_every_choice_predicts_the_positions_behind_the_bonus(k: int) -> None:
    """Mask j of group g predicts n+g+j; the bonus stands at n+a, so the first mask used must predict n+a+1."""
    for num_kept in range(k * (k + 1) + 1):
        layout = DraftLayout.pruned(k, k, num_kept, [0.7**j for j in range(k + 1)])
        assert layout.num_masks == num_kept
        for accepted in range(k + 1):
            choice = layout.next_drafts(accepted)
            if choice is not None:
                assert choice.group + choice.first_mask == accepted + 1
                assert choice.masks[-1] == layout.masks[choice.group]
                assert choice.num_drafts >= 1


def test_the_window_and_fewer_live_drafts_cut_a_layout() -> None:
    # Root at 7 of a window of 10: positions 8 and 9 are left.
    assert DraftLayout.full(3, 3).within(7, 10) == DraftLayout(2, (2, 1, 0))
    assert DraftLayout.full(3, 3).within(9, 10) == DraftLayout.plain()
    assert DraftLayout.full(3, 3).within(3, 10) == DraftLayout.full(3, 3)
    for root in range(10):
        cut = DraftLayout.full(4, 4).within(root, 10)
        assert all(position < 10 for position in cut.mask_positions(root))
        assert root + cut.num_drafts < 10
    assert DraftLayout(3, (5, 0, 2, 4)).with_drafts(1) == DraftLayout(1, (5, 0))
    assert DraftLayout.full(1, 1).with_drafts(4) == DraftLayout.full(1, 1)


def test_pruning_keeps_the_masks_worth_most_and_odd_groups_are_refused() -> None:
    # Drafts that are nearly always refused: group 0 is the one that will be drafted from.
    assert DraftLayout.pruned(2, 2, 2, [1.0, 0.1, 0.01]).masks == (2, 0, 0)
    assert DraftLayout.pruned(2, 2, 3, [1.0, 0.9, 0.81]).masks == (1, 0, 2)
    with pytest.raises(ValueError, match="A layout of 2 drafts has 3 groups"):
        DraftLayout(2, (1, 1))


MASKS = (100, 101, 102)


def build(*segments: Segment) -> ForwardBatch:
    return ForwardBatch.build(segments, block_size=4, mask_ids=MASKS)


def test_chain_rows_come_first_then_masks_then_padding() -> None:
    batch = build(Segment([7, 8, 9], 5, [0, 3], DraftLayout(2, (2, 0, 1))), Segment([4], 0, [1], DraftLayout(0, (1,))))
    assert batch.chain_rows == [range(3), range(3, 4)]
    assert batch.mask_rows == [[range(4, 6), range(6, 6), range(6, 7)], [range(7, 8)]]
    assert batch.ids.tolist() == [7, 8, 9, 4, 100, 101, 100, 100]
    assert batch.positions.tolist() == [5, 6, 7, 0, 6, 7, 8, 1]
    assert batch.rows.pattern.reach.tolist() == [1, 2, 3, 1, 1, 1, 3, 1]
    assert (batch.num_chain_rows, batch.num_mask_rows, batch.num_rows) == (4, 4, 8)
    batch = build(Segment([1, 2, 3, 4, 5], 0, [0, 1]))
    assert (batch.num_rows, len(batch.ids)) == (5, 8)
    # The last chunk of a prompt: two pending ids, of which the second is the root of one draft.
    batch = build(Segment([1, 2, 3], 6, [0, 1, 2], DraftLayout.full(1, 1)))
    assert batch.positions.tolist()[:5] == [6, 7, 8, 8, 9]
    assert batch.mask_rows == [[range(3, 4), range(4, 5)]]
    batch = build(Segment([1, 2, 3], 3, [5, 2]), Segment([1], 0, [7]))
    assert batch.rows.chain_slots().tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 7 * 4]


def test_segments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="Segment 1 has 2 chain rows from position 3, 0 drafts and 1 pages of 4"):
        build(Segment([1], 0, [0]), Segment([1, 2], 3, [1]))
    with pytest.raises(ValueError, match="more chain rows than drafts"):
        build(Segment([1, 2], 0, [0], DraftLayout.full(2, 1)))
    with pytest.raises(ValueError, match="Segment 0 lays out 4 masks; the checkpoint has 3"):
        build(Segment([1], 0, [0], DraftLayout(0, (4,))))


BLOCK_SIZE, MASKS, ADAPTER_MASKS = 16, (100, 101, 102), (2, 3)
Seen = frozenset[tuple[str, int]]


def random_segments(generator: np.random.Generator, *, adapters: bool) -> list[Segment]:
    """Prefill chunks, plain roots and speculating ones, of any length, on pages in any order."""
    pages = generator.permutation(400).tolist()
    segments = []
    for number in range(int(generator.integers(1, 8))):
        num_drafts = int(generator.integers(0, 4)) if generator.random() < 0.7 else 0
        num_pending = 1 if generator.random() < 0.6 else int(generator.integers(1, 30))
        layout = DraftLayout(num_drafts, tuple(generator.integers(0, 3, num_drafts + 1).tolist()))
        start = int(generator.integers(0, 5)) if generator.random() < 0.2 else int(generator.integers(0, 500))
        ids = generator.integers(200, 300, num_pending + num_drafts).tolist()
        adapter = int(generator.integers(0, 2)) if adapters and generator.random() < 0.5 else None
        segments.append(Segment(ids, start, pages[number * 40 : number * 40 + 40], layout, adapter))
    return segments


def rows_one_by_one(segments: Sequence[Segment]) -> list[tuple[int, int, int, int]]:
    """(segment, id, position, slots seen) of each row: chains first, then masks by adapter."""
    chain = [(n, id_, s.start + i, s.start + i + 1) for n, s in enumerate(segments) for i, id_ in enumerate(s.ids)]
    masks = []
    for adapter in (None, 0, 1):
        for n, s in enumerate(segments):
            root = s.start + len(s.ids) - 1 - s.layout.num_drafts
            for g, count in enumerate(s.layout.masks if s.adapter == adapter else ()):
                masks += [(n, MASKS[j] if adapter is None else 0, root + g + 1 + j, root + g + 1) for j in range(count)]
    return chain + masks


@pytest.mark.parametrize("seed", range(40))
def test_packed_arrays_are_those_of_rows_taken_one_by_one(seed: int) -> None:
    segments = random_segments(np.random.default_rng(seed), adapters=True)
    batch = ForwardBatch.build(segments, block_size=BLOCK_SIZE, mask_ids=MASKS, adapter_masks=ADAPTER_MASKS)
    rows = rows_one_by_one(segments)
    padding = [0] * (-len(rows) % 4)
    assert batch.ids.tolist() == [id_ for _, id_, _, _ in rows] + padding
    assert batch.positions.tolist() == [position for _, _, position, _ in rows] + padding
    assert batch.rows.positions.tolist() == [position for _, _, position, _ in rows]
    assert batch.rows.pattern.reach.tolist() == [visible - segments[n].start for n, _, _, visible in rows]
    assert batch.rows.pattern.owner.tolist() == [number for number, _, _, _ in rows]
    assert batch.num_chain_rows == sum(len(segment.ids) for segment in segments)
    slots = [segments[n].pages[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for n, _, p, _ in rows]
    assert batch.rows.chain_slots().tolist() == slots[: batch.num_chain_rows]
    for number, segment in enumerate(segments):
        assert [len(group) for group in batch.mask_rows[number]] == list(segment.layout.masks)
        assert batch.ids[list(batch.chain_rows[number])].tolist() == list(segment.ids)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("seed", range(15))
def test_a_plan_lets_every_row_see_exactly_what_it_may(seed: int, window: int | None) -> None:
    segments = random_segments(np.random.default_rng(seed), adapters=False)
    elsewhere = [Segment(s.ids, s.start + 129, s.pages, s.layout) for s in segments]
    assert_sees(segments, window)
    assert_sees(elsewhere, window)  # the same pattern


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("seed", range(8))
def test_plans_of_steps_behind_each_other_do_too(seed: int, window: int | None) -> None:
    """Sequences move on by a few positions, over the edges of key blocks, and get pages as they need them or ahead."""
    generator = np.random.default_rng(seed)
    layout = [DraftLayout.plain(), DraftLayout(2, (2, 0, 1))][seed % 2]
    ids = [1] * (layout.num_drafts + 1)
    starts = [int(generator.integers(114, 127)) + behind for behind in (0, 0, KEY_BLOCK)]
    free = iter(generator.permutation(400).tolist())
    pages = [np.empty(0, dtype=np.int64)] * 3
    for _ in range(12):
        for n, start in enumerate(starts):
            missing = -(-(start + len(ids)) // BLOCK_SIZE) - len(pages[n])
            if missing > 0:
                missing += 2 * n
                pages[n] = np.append(pages[n], [next(free) for _ in range(missing)])
        assert_sees([Segment(ids, start, held, layout) for start, held in zip(starts, pages, strict=True)], window)
        starts = [start + int(generator.integers(0, 4)) for start in starts]


def assert_sees(segments: Sequence[Segment], window: int | None) -> None:
    batch = ForwardBatch.build(segments, block_size=BLOCK_SIZE, mask_ids=MASKS)
    plan = AttentionPlan.of(batch.rows, PlanKey(num_heads=2, kv_heads=2, head_dim=16, window=window))
    found = {}
    where = 0
    for bucket in plan.buckets:
        found.update(seen_by(bucket, where))
        where += len(bucket.queries)
    slots = batch.rows.chain_slots()
    for row in range(batch.num_rows):
        for head in range(2):
            query, seen = found[int(plan.outputs[row * 2 + head])]
            assert query == row * 2 + head
            assert seen == may_see(segments, batch, row, head, window)
            if row < batch.num_chain_rows:
                block, offset = divmod(int(slots[row]), BLOCK_SIZE)
                assert int(plan.writes[row * 2 + head]) == (block * 2 + head) * BLOCK_SIZE + offset


def may_see(segments: Sequence[Segment], batch: ForwardBatch, row: int, head: int, window: int | None) -> Seen:
    """Slots of the pages and masks of the step, one by one."""
    number, _, position, visible = rows_one_by_one(segments)[row]
    oldest = 0 if window is None else position - window + 1
    pages = segments[number].pages
    slots = [(pages[p // BLOCK_SIZE] * 2 + head) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(max(oldest, 0), visible)]
    group = next((group for group in batch.mask_rows[number] if row in group), range(0))
    masks = [other * 2 + head for other in group if other <= row and int(batch.positions[other]) >= oldest]
    return frozenset([("page", slot) for slot in slots] + [("mask", mask) for mask in masks])


def seen_by(bucket: Bucket, where: int) -> dict[int, tuple[int, Seen]]:
    """Per output of a bucket: the query, and what the bounds let it attend."""
    S, G, P, Q = bucket.shape
    seen: dict[tuple[int, int, int], set[tuple[str, int]]] = {
        (s, g, p): set() for s in range(S) for g in range(G) for p in range(P)
    }

    def add(kind: str, index: torch.Tensor, bound: torch.Tensor | None, num_sequences: int) -> None:
        """index [n, G, N], bound [m, 1, P, 1, N] of the last m sequences."""
        for s in range(num_sequences):
            at = None if bound is None else s - (num_sequences - len(bound))
            for g in range(G):
                for p in range(P):
                    free = bound is None or at is None or at < 0
                    may = torch.ones(index.shape[2]) if free or bound is None else bound[at, 0, p, 0]
                    assert set(may.tolist()) <= {1.0, float("inf"), float("-inf")}
                    new = index[s, g][may > 0].tolist()
                    assert seen[s, g, p].isdisjoint((kind, slot) for slot in new)
                    seen[s, g, p].update((kind, slot) for slot in new)

    for block in bucket.blocks:
        n = block.num_sequences
        index = block.index.view(n, G, -1, 1) * block.run + torch.arange(block.run)
        add("page", index.view(n, G, KEY_BLOCK), block.bound, n)
    if bucket.step_keys is not None:
        add("mask", bucket.step_keys.view(S, G, -1), bucket.step_bound, S)
    queries = bucket.queries.view(S, G, P, Q)
    return {
        where + ((s * G + g) * P + p) * Q + q: (int(queries[s, g, p, q]), frozenset(seen[s, g, p]))
        for s, g, p in seen
        for q in range(Q)
    }
