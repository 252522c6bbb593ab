"""The rows of one update: texts and their mask groups, a pure function of the plan and the row numbers (SPACE §4).

Real tokens x_0 .. x_{L-1} come first, then a group of masks for each anchor. Anchor m trains the step whose root
is x_{m-1}: mask (m, j) has position m-1+j, sees the real tokens before m and masks (m, 1..j), and learns x_{m+j}, the
j-th token after the bonus x_m. Real rows never see masks, so the same pass yields the ordinary loss.

    real                              anchor 3, depth 2   anchor 6, depth 1
    x0 x1 x2 x3 x4 x5 x6 x7 ...       (3,1) (3,2)         (6,1)

Letters: `B` texts of a batch, `L` real tokens, `M` masks, each text with its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from space_model.geometry.draft_layout import DraftLayout
from torch import Tensor

from space_train.data.rows import ExampleRows, MixedRows
from space_train.train_plan import Anchors, TrainPlan


@dataclass(frozen=True)
class AnchorRows:
    """The mask rows behind a batch of texts."""

    root: Tensor  # [B, M] m-1: position of the root that the mask's group follows
    depth: Tensor  # [B, M] j, from 1
    group: Tensor  # [B, M] number of the group, from 0; groups are consecutive, each from mask 1 on
    learns: Tensor  # [B, M] bool: the row has a target to learn (otherwise it only pads the shape)

    @property
    def positions(self) -> Tensor:
        """[B, M] m-1+j; the real row there, before the target, is the teacher of the mask."""
        return self.root + self.depth

    @property
    def target(self) -> Tensor:
        """[B, M] m+j: the token the mask learns."""
        return self.positions + 1

    def visible(self, document: Tensor) -> Tensor:
        """[B, M, L+M] bool: which keys each mask sees, real tokens first. `document` [B, L]: the text of each token."""
        length = document.shape[1]
        real = torch.arange(length, device=document.device)
        own = document.gather(1, self.root)[..., None]  # [B, M, 1]
        sees_real = (real <= self.root[..., None]) & (document[:, None] == own)
        same_group = self.group[..., None] == self.group[:, None]
        sees_masks = same_group & (self.depth[:, None] <= self.depth[..., None])
        return torch.cat((sees_real, sees_masks), dim=2)

    def to(self, device: torch.device) -> AnchorRows:
        """Return the same rows on `device`."""
        return AnchorRows(*(part.to(device) for part in (self.root, self.depth, self.group, self.learns)))


def causal(document: Tensor) -> Tensor:
    """[B, L, L] bool: causal visibility of real rows within their own text."""
    real = torch.arange(document.shape[1], device=document.device)
    return (real[:, None] >= real) & (document[:, :, None] == document[:, None])


def keep_counts(num_anchors: int, num_masks: int, keep: float = 0.7, least: float = 0.2) -> list[int]:
    """Return how many anchors keep a mask at depth 1, 2, …: all, then max(keep^i, least) (PARD, arXiv 2504.18583)."""
    return [round(num_anchors * max(keep**depth, least)) for depth in range(num_masks)]


def anchor_rows(anchors: Sequence[Sequence[tuple[int, int]]], learnable: NDArray[np.bool_]) -> AnchorRows:
    """Return the mask rows of each text's anchors (m, depth); all texts have the same total number of rows. `learnable`
    [B, L]: the token may be a mask's target. A mask beyond the end of a text learns nothing."""
    length = learnable.shape[1]
    offsets = {depth: DraftLayout(0, (depth,)).mask_positions(0) for depth in {d for row in anchors for _, d in row}}
    root = [[m - 1 for m, depth in row for _ in range(depth)] for row in anchors]
    depth = [[offset for _, depth in row for offset in offsets[depth]] for row in anchors]
    group = [[number for number, (_, depth) in enumerate(row) for _ in range(depth)] for row in anchors]
    if len({len(row) for row in root}) > 1:
        raise ValueError(f"Every text of a batch needs as many mask rows; got {sorted({len(row) for row in root})}.")
    roots, depths = np.array(root, dtype=np.int64), np.array(depth, dtype=np.int64)
    target = roots + depths + 1
    inside = target < length
    learns = inside & np.take_along_axis(learnable, np.minimum(target, length - 1), axis=1)
    return AnchorRows(*map(torch.from_numpy, (roots, depths, np.array(group, dtype=np.int64), learns)))


def choose_anchors(
    places: NDArray[np.int64], length: int, counts: Sequence[int], rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Draw anchors (m, depth) among `places`, in order of m; `counts` comes from `keep_counts`. The number of rows is
    fixed, so that every pass has one shape: with too few places, some are used twice. Masks beyond `length` are kept
    and learn nothing."""
    num_anchors, num_masks = counts[0], len(counts)
    deep_enough = places[places + num_masks < length]
    usable = deep_enough if len(deep_enough) >= num_anchors else places
    if not len(usable):
        usable = np.array([1], dtype=np.int64)
    chosen = rng.permutation(usable)[:num_anchors]
    if len(chosen) < num_anchors:
        chosen = np.concatenate((chosen, rng.choice(usable, num_anchors - len(chosen))))
    # The first counts[j-1] anchors, in random order, have a mask at depth j.
    return sorted((int(m), sum(index < count for count in counts)) for index, m in enumerate(chosen))


@dataclass(frozen=True)
class Texts:
    """Rows of real tokens."""

    ids: Tensor  # [B, L]
    learned: Tensor  # [B, L] bool: the token is a target
    document: Tensor  # [B, L] the text a token belongs to; -1: padding
    teaches: Tensor  # [B] bool: the ordinary loss learns from the row

    @property
    def is_ordinary_target(self) -> Tensor:
        """[B, L] bool: a target of the ordinary loss."""
        return self.is_target & self.teaches[:, None]

    @property
    def is_target(self) -> Tensor:
        """[B, L] bool: a target whose previous token is in the same text."""
        same = torch.zeros_like(self.learned)
        same[:, 1:] = (self.document[:, 1:] == self.document[:, :-1]) & (self.document[:, 1:] >= 0)
        return self.learned & same

    @property
    def num_real(self) -> int:
        """Tokens without padding."""
        return int((self.document >= 0).sum())

    @property
    def num_before(self) -> Tensor:
        """[B, L] number of tokens that each token sees: those of its document up to itself; 0 for padding."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        begins = torch.ones_like(self.learned)
        begins[:, 1:] = self.document[:, 1:] != self.document[:, :-1]
        own = places - torch.where(begins, places, 0).cummax(dim=1).values + 1
        return torch.where(self.document >= 0, own, 0)

    def to(self, device: torch.device) -> Texts:
        return Texts(*(part.to(device) for part in (self.ids, self.learned, self.document, self.teaches)))

    @classmethod
    def of(cls, rows: ExampleRows, teaches: list[bool], chosen: list[int]) -> Texts | None:
        """Return the `chosen` rows, or None if there are none."""
        if not chosen:
            return None
        flags = torch.tensor([teaches[index] for index in chosen])
        return cls(rows.ids[chosen], rows.learned[chosen], rows.document[chosen], flags)

    def part(self, rows: slice) -> Texts:
        """Return a slice of the rows."""
        return Texts(self.ids[rows], self.learned[rows], self.document[rows], self.teaches[rows])


@dataclass(frozen=True)
class TrainBatch:
    """Part of an update: rows without masks and rows with masks."""

    plain: Texts | None
    masked: Texts | None
    anchors: AnchorRows | None  # of the masked rows
    recurrent: AnchorRows | None = None  # drafts of the recurrent head in the masked rows, in place of masks

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return sum(texts.num_real for texts in (self.plain, self.masked) if texts is not None)

    @property
    def num_targets(self) -> int:
        """Targets of the ordinary loss."""
        return sum(int(texts.is_ordinary_target.sum()) for texts in (self.plain, self.masked) if texts is not None)

    @property
    def num_learning_masks(self) -> int:
        """Masks with a target."""
        return 0 if self.anchors is None else int(self.anchors.learns.sum())

    @property
    def num_learning_recurrent(self) -> int:
        """Drafts of the recurrent head with a target."""
        return 0 if self.recurrent is None else int(self.recurrent.learns.sum())

    def to(self, device: torch.device) -> TrainBatch:
        plain, masked = self.plain and self.plain.to(device), self.masked and self.masked.to(device)
        anchors, recurrent = self.anchors and self.anchors.to(device), self.recurrent and self.recurrent.to(device)
        return TrainBatch(plain, masked, anchors, recurrent)


def is_plain(row: int, ar_share: float) -> bool:
    """Return whether row `row` of the run has no masks: evenly spread, so that each process gets its share."""
    return int((row + 1) * ar_share + 1e-9) > int(row * ar_share + 1e-9)


def train_batch(data: MixedRows, plan: TrainPlan, first: int, count: int) -> TrainBatch:
    """Build the batch of rows first .. first+count-1 of the run."""
    rows, teaches = data.rows(first, count), [data.teaches(first + index) for index in range(count)]
    ar_share = plan.ar_share if plan.teaches_drafts else 1.0
    plain = [index for index in range(count) if is_plain(first + index, ar_share)]
    masked = [index for index in range(count) if not is_plain(first + index, ar_share)]
    texts = Texts.of(rows, teaches, masked)
    if texts is None:
        return TrainBatch(Texts.of(rows, teaches, plain), None, None)
    generators = [_generator(data, plan, first + index) for index in masked]
    anchors: AnchorRows | None = None
    if plan.anchors is Anchors.ONE:
        texts, anchors = _cut(texts, plan, generators)
    elif plan.has_masks:
        anchors = _spread(texts, plan, plan.num_masks, generators)
    # Drawn last, so that masks stand at the same places without a recurrent head.
    recurrent = _spread(texts, plan, plan.num_recurrent_drafts, generators) if plan.has_recurrent_head else None
    return TrainBatch(Texts.of(rows, teaches, plain), texts, anchors, recurrent)


def _generator(data: MixedRows, plan: TrainPlan, row: int) -> np.random.Generator:
    """Return the generator for one row's masks: new in every epoch, or fixed for the text."""
    epoch, _ = divmod(row, len(data))
    if plan.fixed_cuts:
        # Seeded by the text, not by its place in the epoch.
        content = data.rows(row, 1).ids.numpy().tobytes()
        return np.random.default_rng([plan.seed, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())])
    return np.random.default_rng([plan.seed, row, epoch])


def _spread(texts: Texts, plan: TrainPlan, depth: int, generators: list[np.random.Generator]) -> AnchorRows:
    """Choose many anchors per text, each of at most `depth` masks, where the first mask has a target."""
    target = texts.is_target.numpy()
    length = target.shape[1]
    counts = keep_counts(max(1, round(plan.anchors_per_token * length)), depth, plan.keep, plan.least)
    anchors = [
        choose_anchors(places, length, counts, generator)
        for places, generator in zip(_places(texts), generators, strict=True)
    ]
    return within_documents(anchor_rows(anchors, target), texts)


def _cut(texts: Texts, plan: TrainPlan, generators: list[np.random.Generator]) -> tuple[Texts, AnchorRows]:
    """Choose one anchor per text and cut the text there: the tokens after it become padding. If masks learn the model's
    own distribution, the tokens in their place are read too, as the teachers' input; the ordinary loss does not learn
    them."""
    anchors: list[list[tuple[int, int]]] = []
    for places, generator in zip(_places(texts), generators, strict=True):
        anchors.append([(int(generator.choice(places)) if len(places) else 1, plan.num_masks)])
    rows = within_documents(anchor_rows(anchors, texts.is_target.numpy()), texts)
    cuts = torch.tensor([[row[0][0]] for row in anchors])
    # The last real token's label is the anchor, which the loss uses though it has no row of its own.
    length = int(cuts.max()) + plan.num_masks + 1
    at = torch.arange(texts.ids.shape[1])
    reach = plan.num_masks if plan.distill else 0
    document = torch.where(at <= cuts + reach, texts.document, -1)
    learned = texts.learned & (at <= cuts)
    return Texts(texts.ids[:, :length], learned[:, :length], document[:, :length], texts.teaches), rows


def _places(texts: Texts) -> list[NDArray[np.int64]]:
    """Return for each text every m for which x_{m+1} is a target and the root x_{m-1} is in the same document."""
    document, target = texts.document, texts.is_target
    fit = target[:, 2:] & (document[:, 2:] == document[:, :-2])
    return [np.flatnonzero(row) + 1 for row in fit.numpy()]


def within_documents(rows: AnchorRows, texts: Texts) -> AnchorRows:
    """Drop the targets of masks whose target is in another text than their root."""
    last = texts.ids.shape[1] - 1
    same = texts.document.gather(1, rows.target.clamp(max=last)) == texts.document.gather(1, rows.root)
    return AnchorRows(rows.root, rows.depth, rows.group, rows.learns & same)
