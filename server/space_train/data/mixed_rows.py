"""Mixes several row sources by share, evenly spread, in an order that depends only on the row number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from space_train.data.packed_examples import ExampleRows

PERIOD = 40
"""Rows after which the pattern of sources repeats; shares are rounded to 1/40."""

MOST_OWN_ROUNDS = 4.0
"""Most passes over the model's own texts per pass over the data, if no share is given: more teach little more
(arXiv 2305.16264)."""


class RowSource(Protocol):
    """Training data as an endless sequence of rows with random access."""

    def rows(self, first: int, count: int) -> ExampleRows:
        """Rows first .. first+count-1."""
        ...

    def __len__(self) -> int:
        """Rows of one epoch."""
        ...

    def digest(self) -> bytes:
        """Return a digest of the underlying data."""
        ...


@dataclass(frozen=True)
class RowStream:
    """A row source and its share."""

    rows: RowSource
    share: float  # of all rows, relative to the other streams' shares
    # False: text that the model wrote. Masks learn from it; the ordinary loss does not, because that would sharpen the
    # model's own distribution.
    teaches: bool = True


class MixedRows:
    """Rows drawn from several streams in a fixed pattern."""

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
        """Rows of one epoch: until every data stream was read at least once.

        Text that the model wrote does not count; otherwise much of it would make an epoch repeat the data.
        """
        period, alone = len(self._pattern), not any(stream.teaches for stream in self.streams)
        return max(
            -(-len(stream.rows) * period // count)
            for stream, count in zip(self.streams, self._counts, strict=True)
            if stream.teaches or alone
        )

    @property
    def rounds(self) -> list[float]:
        """How many times an epoch reads each stream."""
        read = len(self) / len(self._pattern)  # periods
        return [read * count / len(stream.rows) for stream, count in zip(self.streams, self._counts, strict=True)]

    def __str__(self) -> str:
        """Describe the streams and how many times each is read."""
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
        """Return a digest of the rows and their order, 12 hexadecimal digits."""
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
    """Mix the data with text that the model wrote, which gets `share` of the rows.

    None: half, or less if one pass over the data would otherwise read these texts more than MOST_OWN_ROUNDS times.
    """
    if share is None:
        most = MOST_OWN_ROUNDS * len(own)
        share = min(0.5, most / (most + len(data)))
    return [RowStream(data, 1.0 - share), RowStream(own, share, teaches=False)]
