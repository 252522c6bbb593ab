"""Packs examples into rows of one length: short ones share a row, long ones are split; the seed fixes the order.

    examples  a a a | b b b b b | c c          row 0   b b b b b c c .
    length 8                                   row 1   a a a . . . . .        . is padding

Each id carries its document, so that attention stays within it. The seed fixes which documents share a row;
the order of the rows is redrawn each epoch. Both depend only on the seed and the row number: training can
resume at any row, and processes take disjoint rows by number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from space_train.data.data_error import NothingToLearn
from space_train.data.example import Example

PADDING = -1
"""Document number of padding."""


@dataclass(frozen=True)
class ExampleRows:
    """B rows of L ids each.

    A target always directly follows an id of the same document in its row.
    """

    ids: Tensor  # [B, L] int64
    learned: Tensor  # [B, L] bool: the id is a target
    document: Tensor  # [B, L] int64: which example of the row an id belongs to, from 0; -1 is padding

    @property
    def visible(self) -> Tensor:
        """[B, L, L] bool: row sees key, within its document and not ahead; padding sees only itself."""
        place = torch.arange(self.ids.shape[1], device=self.ids.device)
        same = self.document[:, :, None] == self.document[:, None, :]
        return (same & (self.document[:, None, :] != PADDING) & (place[:, None] >= place)) | (place[:, None] == place)

    @property
    def positions(self) -> Tensor:
        """[B, L] int64: the place of each id in its document, from 0."""
        place = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        begins = torch.ones_like(self.learned)
        begins[:, 1:] = self.document[:, 1:] != self.document[:, :-1]
        return place - torch.where(begins, place, 0).cummax(dim=1).values


class PackedExamples:
    """Rows of `length` ids over all epochs, each piece of an example once per epoch."""

    def __init__(self, examples: Sequence[Example], *, length: int, seed: int, pad_id: int, pack: bool = True) -> None:
        if length < 2:
            raise ValueError(f"A row needs at least 2 ids, one to see and one to learn; got length {length}.")
        if pad_id < 0:
            raise ValueError(f"pad_id must be an id, 0 or more; got {pad_id}.")
        pieces = [piece for example in examples for piece in example.pieces(length)]
        if not pieces:
            raise NothingToLearn(
                f"None of the {len(examples)} examples has an id to learn behind another: there is nothing to pack."
            )
        self.length, self.seed, self.pad_id = length, seed, pad_id
        sizes = [len(piece.ids) for piece in pieces]
        self._ids = np.concatenate([np.asarray(piece.ids, dtype=np.int32) for piece in pieces])
        self._learned = np.concatenate([np.asarray(piece.learned, dtype=np.bool_) for piece in pieces])
        self._start = np.concatenate(([0], np.cumsum(sizes)))
        order = np.random.default_rng([seed, length]).permutation(len(pieces)).tolist()
        self._rows = packed(sizes, length, order) if pack else [[piece] for piece in range(len(pieces))]
        self._order: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Rows per epoch."""
        return len(self._rows)

    @property
    def num_tokens(self) -> int:
        """Ids per epoch, without padding."""
        return len(self._ids)

    @property
    def num_targets(self) -> int:
        """Targets per epoch."""
        return int(self._learned.sum())

    @property
    def fill(self) -> float:
        """The share of the rows that is not padding."""
        return self.num_tokens / (len(self) * self.length)

    def digest(self) -> bytes:
        """Return a digest of the ids, the targets and the examples' starts."""
        digest = hashlib.sha256(self.pad_id.to_bytes(8, "little"))
        for part in (self._ids, self._learned, self._start):
            digest.update(part.data)
        return digest.digest()

    def rows(self, first: int, count: int) -> ExampleRows:
        """Return rows first .. first+count-1 of the endless sequence; row n is in epoch n // len(self)."""
        if first < 0 or count < 1:
            raise ValueError(f"Rows are numbered from 0 and come at least one at a time; got {first=}, {count=}.")
        ids = np.full((count, self.length), self.pad_id, dtype=np.int64)
        learned = np.zeros((count, self.length), dtype=np.bool_)
        document = np.full((count, self.length), PADDING, dtype=np.int64)
        for row in range(count):
            epoch, place = divmod(first + row, len(self))
            at = 0
            for number, piece in enumerate(self._rows[self._epoch(epoch)[place]]):
                start, end = self._start[piece], self._start[piece + 1]
                here = slice(at, at + int(end - start))
                ids[row, here], learned[row, here], document[row, here] = (
                    self._ids[start:end],
                    self._learned[start:end],
                    number,
                )
                at = here.stop
        return ExampleRows(torch.from_numpy(ids), torch.from_numpy(learned), torch.from_numpy(document))

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the rows in an epoch; the last two are cached."""
        if epoch not in self._order:
            self._order = {old: order for old, order in self._order.items() if old == epoch - 1}
            self._order[epoch] = np.random.default_rng([self.seed, self.length, epoch]).permutation(len(self))
        return self._order[epoch]


def packed(sizes: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Pack items of these sizes into rows: the largest first, each into the fullest row with enough space.

    (Best fit decreasing: at most 11/9 of the fewest rows, plus one.) Equal sizes come in `order`.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by their free space
    rooms = 0  # bit r is set if a row has r free: finds the best fit in one operation
    for item in sorted(order, key=lambda item: -sizes[item]):
        size = sizes[item]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        with_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows
