"""Several sources of rows as one: each its share, evenly spread, in an order that the row number alone decides."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from space_train.data.packed_examples import ExampleRows

PERIOD = 40
"""Rows after which the pattern of sources repeats: shares are kept to a fortieth."""

MOST_OWN_ROUNDS = 4.0
"""Rounds of the model's own texts in one of the data, where no share is asked for: more teach little more
(arXiv 2305.16264)."""


class RowSource(Protocol):
    """Training data: an endless order of rows, of which any part can be asked for."""

    def rows(self, first: int, count: int) -> ExampleRows:
        """Rows first .. first+count-1."""
        ...

    def __len__(self) -> int:
        """Rows of one epoch."""
        ...

    def digest(self) -> bytes:
        """Over all that rows are made of, however many there are."""
        ...


@dataclass(frozen=True)
class RowStream:
    """One source."""

    rows: RowSource
    share: float  # of all rows, relative to the other streams' shares
    # False: text that the model wrote. Masks learn from it; the ordinary loss does not, or the model would grow ever
    # surer of what it says anyway.
    teaches: bool = True


class MixedRows:
    """Rows drawn from streams in turn."""

    def __init__(self, streams: Sequence[RowStream], seed: int) -> None:
        self.streams = [stream for stream in streams if stream.share > 0]
        if not self.streams:
            raise ValueError("There is no source of rows with a share above 0.")
        whole = sum(stream.share for stream in self.streams)
        counts = [max(1, round(PERIOD * stream.share / whole)) for stream in self.streams]
        pattern = np.repeat(np.arange(len(counts)), counts)
        self._pattern = np.random.default_rng([seed, len(pattern)]).permutation(pattern)
        self._counts = counts

    def __len__(self) -> int:
        """Rows of one epoch: until the data was read once, each stream of it where there are several.

        Text that the model wrote does not count, or much of it would have the data read many times.
        """
        period, alone = len(self._pattern), not any(stream.teaches for stream in self.streams)
        return max(
            -(-len(stream.rows) * period // count)
            for stream, count in zip(self.streams, self._counts, strict=True)
            if stream.teaches or alone
        )

    @property
    def rounds(self) -> list[float]:
        """How often an epoch reads each stream."""
        read = len(self) / len(self._pattern)  # periods
        return [read * count / len(stream.rows) for stream, count in zip(self.streams, self._counts, strict=True)]

    def __str__(self) -> str:
        """What is read, and how often."""
        parts = [
            f"{len(stream.rows)} of {'the data' if stream.teaches else 'its own texts'} ×{rounds:.3g}"
            for stream, rounds in zip(self.streams, self.rounds, strict=True)
        ]
        return f"an epoch is {len(self)} rows: {' and '.join(parts)}"

    def rows(self, first: int, count: int) -> ExampleRows:
        """Rows first .. first+count-1."""
        parts = [self._row(number) for number in range(first, first + count)]
        return ExampleRows(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.learned for part in parts]),
            torch.cat([part.document for part in parts]),
        )

    def digest(self) -> str:
        """12 hexadecimal digits that other rows, or others in this order, do not have."""
        digest = hashlib.sha256(self._pattern.tobytes())
        for stream in self.streams:
            digest.update(stream.rows.digest() + bytes([stream.teaches]))
        return digest.hexdigest()[:12]

    def teaches(self, row: int) -> bool:
        """Whether the ordinary loss learns from row number `row`."""
        return self.streams[int(self._pattern[row % len(self._pattern)])].teaches

    def _row(self, number: int) -> ExampleRows:
        period, place = divmod(number, len(self._pattern))
        stream = int(self._pattern[place])
        before = int((self._pattern[:place] == stream).sum())
        return self.streams[stream].rows.rows(period * self._counts[stream] + before, 1)


def with_own_texts(data: RowSource, own: RowSource, share: float | None) -> list[RowStream]:
    """The data, and text that the model wrote: `share` of the rows.

    None: half of them, or less where its texts would be read more than MOST_OWN_ROUNDS times while the data is once.
    """
    if share is None:
        most = MOST_OWN_ROUNDS * len(own)
        share = min(0.5, most / (most + len(data)))
    return [RowStream(data, 1.0 - share), RowStream(own, share, teaches=False)]
