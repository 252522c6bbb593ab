"""The geometry of one sequence's step: its drafts and mask tokens, and their positions.

Letters as in the SPACE reference: the root is at position n-1, draft i at n-1+i, mask j of group g at n-1+g+j. Group g
assumes that exactly g drafts are accepted; its mask j predicts position n+g+j, the j-th token after the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

MOST_HEAD_DRAFTS = 16  # drafts of a recurrent head in one step


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The masks to draft from after verification: masks `first_mask`, `first_mask`+1, … of group `group`."""

    group: int
    first_mask: int  # counts from 1, as masks do; > 1 if an earlier group replaces one that was not laid out
    num_drafts: int  # masks from `first_mask` on: the most drafts of the next step

    @property
    def masks(self) -> range:
        """Return the mask numbers (from 1), in the order of the drafts they predict."""
        return range(self.first_mask, self.first_mask + self.num_drafts)


@dataclass(frozen=True)
class DraftLayout:
    """The drafts and mask tokens that one sequence has in one step. There are few distinct layouts but thousands of
    uses: `of` caches the objects, which cache what is derived from them."""

    num_drafts: int  # drafts in the chain after the root
    masks: tuple[int, ...]  # masks[g]: mask tokens in group g, for g = 0 .. num_drafts; 0 is a group not laid out
    head_drafts: int = 0  # drafts that the recurrent head makes behind the step; such a step has no masks
    in_turns: bool = False  # a step without drafts lays out the masks of group 0, and one with drafts no masks

    def __post_init__(self) -> None:
        if self.head_drafts and any(self.masks):
            raise ValueError(f"Masks and the recurrent head do not draft in one step; got {self.masks} masks.")
        if self.num_drafts < 0 or len(self.masks) != self.num_drafts + 1 or min(self.masks) < 0:
            raise ValueError(
                f"A layout of {self.num_drafts} drafts has {self.num_drafts + 1} groups of 0 or more masks; "
                f"got masks={self.masks}."
            )

    @staticmethod
    def of(num_drafts: int, masks: tuple[int, ...], *, head_drafts: int = 0) -> DraftLayout:
        """Return the cached layout with these values."""
        return _layout(num_drafts, masks, head_drafts)

    @classmethod
    def plain(cls) -> DraftLayout:
        """Return the layout of the root alone: plain decoding, or a prefill chunk."""
        return _PLAIN

    @classmethod
    def full(cls, num_drafts: int, num_masks: int) -> DraftLayout:
        """Return the layout with all groups complete; for num_drafts == num_masks == k, the paper's (k+1)² rows."""
        return _layout(num_drafts, (num_masks,) * (num_drafts + 1))

    @staticmethod
    def by_head(num_drafts: int, head_drafts: int) -> DraftLayout:
        """Return the layout of a chain alone, behind which the recurrent head makes `head_drafts` drafts."""
        return _layout(num_drafts, (0,) * (num_drafts + 1), head_drafts)

    @classmethod
    def forced(cls, num_drafts: int, count: int, *, by_masks: bool) -> DraftLayout:
        """Return the layout of a request that commands `count` drafts a step, of which it verifies `num_drafts` now."""
        return cls.full(num_drafts, count) if by_masks else cls.by_head(num_drafts, count)

    @staticmethod
    def turns(num_drafts: int) -> DraftLayout:
        """Return the layout that drafts in one step and verifies in the next: two passes with 2·num_drafts + 2 rows in
        all. It is a choice for both; `with_drafts` gives the layout of one step."""
        return _layout(num_drafts, (num_drafts, *(0,) * num_drafts), in_turns=True)

    @classmethod
    def pruned(cls, num_drafts: int, num_masks: int, num_kept: int, reach: Sequence[float]) -> DraftLayout:
        """Return the `num_kept` most valuable masks of the full layout.

        `reach[j]` is A_j, the chance that the first j drafts are all accepted (A_0 = 1; missing ones repeat the last).
        Mask (g, j) is worth P(a=g)·A_j tokens of the next step (SPACE §5), which falls with j, so each group keeps a
        leading run. Ties go to the earlier group, then the earlier mask.
        """

        def reached(j: int) -> float:
            return 1.0 if j == 0 or not reach else reach[min(j, len(reach) - 1)]

        def ends(g: int) -> float:
            return reached(g) - (reached(g + 1) if g < num_drafts else 0.0)

        ranked = sorted((-ends(g) * reached(j), g, j) for g in range(num_drafts + 1) for j in range(1, num_masks + 1))
        counts = [0] * (num_drafts + 1)
        for _, group, _ in ranked[:num_kept]:
            counts[group] += 1
        return _layout(num_drafts, tuple(counts))

    def within(self, root_position: int, window: int) -> DraftLayout:
        """Return this layout without the drafts and masks whose positions would exceed the window."""
        room = window - 1 - root_position  # positions left after the root
        if room >= self.num_drafts + max(self.masks):
            return self
        num_drafts = min(self.num_drafts, max(room, 0))
        masks = tuple(max(0, min(self.masks[g], room - g)) for g in range(num_drafts + 1))
        return _layout(num_drafts, masks, self.head_drafts)

    def with_drafts(self, num_drafts: int) -> DraftLayout:
        """Return this layout for fewer drafts: the groups after the last draft are dropped."""
        if self.in_turns:
            drafts = min(num_drafts, self.num_drafts)
            return _layout(drafts, (0,) * (drafts + 1)) if drafts else _layout(0, self.masks[:1])
        if num_drafts >= self.num_drafts:
            return self
        return _layout(num_drafts, self.masks[: num_drafts + 1], self.head_drafts)

    @property
    def makes_drafts(self) -> bool:
        """Return whether the step makes drafts for the next one, by masks or by the recurrent head."""
        return self.head_drafts > 0 or self.num_masks > 0

    @cached_property
    def num_masks(self) -> int:
        """Return the number of mask rows in all groups."""
        return sum(self.masks)

    @property
    def num_rows(self) -> int:
        """Return the number of rows: root, drafts and masks."""
        return 1 + self.num_drafts + self.num_masks

    def mask_positions(self, root_position: int) -> list[int]:
        """Return each mask row's absolute position, group after group."""
        return [root_position + g + j for g, count in enumerate(self.masks) for j in range(1, count + 1)]

    def next_drafts(self, accepted: int) -> GroupChoice | None:
        """Return the masks to draft from after `accepted` accepted drafts; None if none predicts beyond the bonus. Uses
        the largest group g <= accepted with masks left: its masks from accepted-g+1 on predict the positions after the
        bonus. An earlier group than `accepted` gives fewer drafts, but for the right positions."""
        return self._choices[accepted]

    @cached_property
    def _choices(self) -> tuple[GroupChoice | None, ...]:
        """Return the choices by number of accepted drafts."""
        found: list[GroupChoice | None] = []
        for accepted in range(self.num_drafts + 1):
            groups = (group for group in range(accepted, -1, -1) if self.masks[group] > accepted - group)
            group = next(groups, None)
            first = 0 if group is None else accepted - group + 1
            found.append(None if group is None else GroupChoice(group, first, self.masks[group] - first + 1))
        return tuple(found)


@lru_cache(maxsize=4096)
def _layout(num_drafts: int, masks: tuple[int, ...], head_drafts: int = 0, *, in_turns: bool = False) -> DraftLayout:
    return DraftLayout(num_drafts, masks, head_drafts, in_turns)


_PLAIN = _layout(0, (0,))
