"""The rows of one update: texts and their mask positions, a pure function of the plan and the row numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from space_train.data.anchors import AnchorRows, anchor_rows, choose_anchors, keep_counts
from space_train.data.mixed_rows import MixedRows
from space_train.data.packed_examples import ExampleRows
from space_train.train_plan import Anchors, TrainPlan


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
    told_own: Tensor | None = None  # [B, M] bool: the draft head gets its own previous draft for these masks

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

    def to(self, device: torch.device) -> TrainBatch:
        return TrainBatch(
            self.plain and self.plain.to(device),
            self.masked and self.masked.to(device),
            self.anchors and self.anchors.to(device),
            None if self.told_own is None else self.told_own.to(device),
        )


def is_plain(row: int, ar_share: float) -> bool:
    """Return whether row `row` of the run has no masks: evenly spread, so that each process gets its share."""
    return int((row + 1) * ar_share + 1e-9) > int(row * ar_share + 1e-9)


def train_batch(data: MixedRows, plan: TrainPlan, first: int, count: int) -> TrainBatch:
    """Build the batch of rows first .. first+count-1 of the run."""
    rows, teaches = data.rows(first, count), [data.teaches(first + index) for index in range(count)]
    ar_share = plan.ar_share if plan.has_masks else 1.0
    plain = [index for index in range(count) if is_plain(first + index, ar_share)]
    masked = [index for index in range(count) if not is_plain(first + index, ar_share)]
    texts = Texts.of(rows, teaches, masked)
    if texts is None:
        return TrainBatch(Texts.of(rows, teaches, plain), None, None)
    generators = [_generator(data, plan, first + index) for index in masked]
    if plan.anchors is Anchors.ONE:
        texts, anchors = _cut(texts, plan, generators)
    else:
        anchors = _spread(texts, plan, generators)
    told_own = _told_own(anchors, plan.scheduled_drafting, generators) if plan.scheduled_drafting else None
    return TrainBatch(Texts.of(rows, teaches, plain), texts, anchors, told_own)


def _generator(data: MixedRows, plan: TrainPlan, row: int) -> np.random.Generator:
    """Return the generator for one row's masks: new in every epoch, or fixed for the text."""
    epoch, _ = divmod(row, len(data))
    if plan.fixed_cuts:
        # Seeded by the text, not by its place in the epoch.
        content = data.rows(row, 1).ids.numpy().tobytes()
        return np.random.default_rng([plan.seed, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())])
    return np.random.default_rng([plan.seed, row, epoch])


def _spread(texts: Texts, plan: TrainPlan, generators: list[np.random.Generator]) -> AnchorRows:
    """Choose many anchors per text, at places whose first mask has a target."""
    target = texts.is_target.numpy()
    length = target.shape[1]
    counts = keep_counts(max(1, round(plan.anchors_per_token * length)), plan.num_masks, plan.keep, plan.least)
    anchors = [
        choose_anchors(places, length, counts, generator)
        for places, generator in zip(_places(texts), generators, strict=True)
    ]
    return within_documents(anchor_rows(anchors, target), texts)


def _cut(texts: Texts, plan: TrainPlan, generators: list[np.random.Generator]) -> tuple[Texts, AnchorRows]:
    """Choose one anchor per text and cut the text there: the tokens after it become padding.

    If masks learn the model's own distribution, the tokens in their place are read too, as the teachers' input; the
    ordinary loss does not learn them.
    """
    anchors: list[list[tuple[int, int]]] = []
    for places, generator in zip(_places(texts), generators, strict=True):
        anchors.append([(int(generator.choice(places)) if len(places) else 1, plan.num_masks)])
    rows = within_documents(anchor_rows(anchors, texts.is_target.numpy()), texts)
    cuts = torch.tensor([[row[0][0]] for row in anchors])
    # The last real token's label is the anchor, which the loss uses though it has no row of its own.
    length = int(cuts.max()) + plan.num_masks + 1
    at = torch.arange(texts.ids.shape[1])
    reach = plan.num_masks if plan.distill or plan.survival else 0
    document = torch.where(at <= cuts + reach, texts.document, -1)
    learned = texts.learned & (at <= cuts)
    return Texts(texts.ids[:, :length], learned[:, :length], document[:, :length], texts.teaches), rows


def _places(texts: Texts) -> list[NDArray[np.int64]]:
    """Return for each text every m for which x_{m+1} is a target and the root x_{m-1} is in the same document."""
    document, target = texts.document, texts.is_target
    fit = target[:, 2:] & (document[:, 2:] == document[:, :-2])
    return [np.flatnonzero(row) + 1 for row in fit.numpy()]


def _told_own(anchors: AnchorRows, share: float, generators: list[np.random.Generator]) -> Tensor:
    """[B, M] bool: `share` of the masks after a first one. Drawn row by row, so that parts of an update agree."""
    drawn = np.stack([generator.random(anchors.depth.shape[1]) for generator in generators])
    return torch.from_numpy(drawn < share) & (anchors.depth > 1)


def within_documents(rows: AnchorRows, texts: Texts) -> AnchorRows:
    """Drop the targets of masks whose target is in another text than their root."""
    last = texts.ids.shape[1] - 1
    same = texts.document.gather(1, rows.target.clamp(max=last)) == texts.document.gather(1, rows.root)
    return AnchorRows(rows.root, rows.depth, rows.group, rows.learns & same)
