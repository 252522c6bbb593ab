"""Rows of one length for training, from examples or from a stream of ids on disk, mixed by share.

Short examples share a row, long ones are split; the seed fixes the order:

    examples  a a a | b b b b b | c c          row 0   b b b b b c c .
    length 8                                   row 1   a a a . . . . .        . is padding

Each id carries its document, so that attention stays within it. All rows depend only on the seed and the row number:
training can resume at any row, and processes take disjoint rows by number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from space_train.data.corpus import END_OF_TEXT_ID
from space_train.data.examples import Example
from space_train.data.records import NothingToLearn

PADDING = -1  # document number of padding


@dataclass(frozen=True)
class ExampleRows:
    """B rows of L ids each. A target always directly follows an id of the same document in its row."""

    ids: Tensor  # [B, L] int64
    learned: Tensor  # [B, L] bool: the id is a target
    document: Tensor  # [B, L] int64: which example of the row an id belongs to, from 0; -1 is padding


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
        return len(self._rows)

    @property
    def longest(self) -> int:
        """Ids of the fullest row, without padding."""
        sizes = np.diff(self._start)
        return int(max(sizes[row].sum() for row in self._rows))

    @property
    def most_places(self) -> int:
        """Most places of a row at which a first mask has a target: targets from a piece's third id on."""
        counted = np.concatenate(([0], np.cumsum(self._learned)))
        start, end = self._start[:-1], self._start[1:]
        places = counted[end] - counted[np.minimum(start + 2, end)]
        return int(max(places[row].sum() for row in self._rows))

    def count_ids(self, vocab_size: int) -> NDArray[np.int64]:
        """[V] how often each id is a target in one epoch."""
        return np.bincount(self._ids[self._learned], minlength=vocab_size)

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
                ids[row, here], learned[row, here] = self._ids[start:end], self._learned[start:end]
                document[row, here] = number
                at = here.stop
        return ExampleRows(torch.from_numpy(ids), torch.from_numpy(learned), torch.from_numpy(document))

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the rows in an epoch; the last two are cached."""
        if epoch not in self._order:
            self._order = {old: order for old, order in self._order.items() if old == epoch - 1}
            self._order[epoch] = np.random.default_rng([self.seed, self.length, epoch]).permutation(len(self))
        return self._order[epoch]


def packed(sizes: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Pack items of these sizes into rows: the largest first, each into the fullest row with enough space. (Best fit
    decreasing: at most 11/9 of the fewest rows, plus one.) Equal sizes come in `order`."""
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


TEXTS_PER_CALL = 256


def write_packed(tokenizer: Tokenizer, texts: Iterable[str], path: Path) -> int:
    """Encode `texts` into one stream of uint16 ids, each text followed by end-of-text. Return their number."""
    if tokenizer.get_vocab_size() > 65536:
        raise ValueError(f"A vocabulary of {tokenizer.get_vocab_size()} does not fit uint16: use at most 65536 ids.")
    num_ids, rest = 0, iter(texts)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        while some := list(islice(rest, TEXTS_PER_CALL)):
            for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
                ids = np.asarray([*encoding.ids, END_OF_TEXT_ID], dtype=np.uint16)
                stream.write(ids.tobytes())
                num_ids += len(ids)
    partial.replace(path)
    return num_ids


class PackedTokens:
    """A stream of ids read as windows, which are a pure function of the seed and the number of ids drawn before."""

    def __init__(self, ids: NDArray[np.uint16], seed: int) -> None:
        self.ids, self.seed = ids, seed
        self._order: dict[tuple[int, int], NDArray[np.int64]] = {}

    @classmethod
    def open(cls, path: Path, seed: int) -> PackedTokens:
        """Memory-map the stream at `path`."""
        return cls(np.memmap(path, dtype=np.uint16, mode="r"), seed)

    def holds(self, length: int) -> bool:
        """Whether windows of `length` can be drawn."""
        return len(self.ids) >= 2 * length

    def num_windows(self, length: int) -> int:
        """Windows of `length` in one epoch."""
        return len(self.ids) // length - 1

    def windows(self, drawn: int, count: int, length: int) -> Tensor:
        """Return `count` windows, [count, length] int64, after `drawn` ids were drawn in earlier windows. An epoch cuts
        the stream at multiples of `length` from an offset of its own, and shuffles the pieces."""
        if not self.holds(length):
            raise ValueError(f"The stream has {len(self.ids)} ids; windows of {length} need at least {2 * length}.")
        per_epoch, first = self.num_windows(length), drawn // length
        rows = []
        for index in range(first, first + count):
            epoch, place = divmod(index, per_epoch)
            if (epoch, length) not in self._order:
                self._order[epoch, length] = np.random.default_rng([self.seed, epoch, length]).permutation(per_epoch)
            offset = int(np.random.default_rng([self.seed, epoch]).integers(length))
            start = offset + int(self._order[epoch, length][place]) * length
            rows.append(torch.from_numpy(self.ids[start : start + length].astype(np.int64)))
        return torch.stack(rows)


class TokenRows:
    """Windows of a stream, each once per epoch."""

    def __init__(self, tokens: PackedTokens, length: int) -> None:
        self.tokens, self.length = tokens, length

    def rows(self, first: int, count: int) -> ExampleRows:
        """Return windows first .. first+count-1 of the endless seeded order."""
        ids = self.tokens.windows(first * self.length, count, self.length)
        return ExampleRows(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))

    def __len__(self) -> int:
        """Windows of one epoch."""
        return self.tokens.num_windows(self.length)

    def count_ids(self, vocab_size: int) -> NDArray[np.int64]:
        """[V] how often each id occurs."""
        return np.bincount(self.tokens.ids, minlength=vocab_size)

    def digest(self) -> bytes:
        return hashlib.sha256(self.tokens.ids.data).digest()


PERIOD = 40  # rows after which the pattern of sources repeats; shares are rounded to 1/40

MOST_OWN_ROUNDS = 4.0
"""Most passes over the model's own texts per pass over the data, if no share is given: more teach little more
(arXiv 2305.16264)."""


class RowSource(Protocol):
    """Training data as an endless sequence of rows with random access."""

    def rows(self, first: int, count: int) -> ExampleRows:
        """Rows first .. first+count-1."""

    def __len__(self) -> int:
        """Rows of one epoch."""

    def count_ids(self, vocab_size: int) -> NDArray[np.int64]:
        """[V] how often each id is a target in one epoch."""

    def digest(self) -> bytes:
        """Return a digest of the underlying data."""


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
        """Rows of one epoch: until every data stream was read at least once. Text that the model wrote does not count;
        otherwise much of it would make an epoch repeat the data."""
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
        parts = [
            f"{len(stream.rows)} of {'the data' if stream.teaches else 'its own texts'} ×{rounds:.3g}"
            for stream, rounds in zip(self.streams, self.rounds, strict=True)
        ]
        return f"an epoch is {len(self)} rows: {' and '.join(parts)}"

    def rows(self, first: int, count: int) -> ExampleRows:
        """Rows first .. first+count-1."""
        parts = [self._row(number) for number in range(first, first + count)]
        columns = zip(*((part.ids, part.learned, part.document) for part in parts), strict=True)
        return ExampleRows(*(torch.cat(column) for column in columns))

    def frequent_ids(self, count: int, vocab_size: int, never: Sequence[int] = ()) -> Tensor | None:
        """[count] int64 ascending: the ids that are targets most often, of equally frequent ones the lowest, and those
        in `never` last. None: `count` is the whole vocabulary."""
        if count >= vocab_size:
            return None
        counts = np.zeros(vocab_size, dtype=np.int64)
        for stream in self.streams:
            counts += stream.rows.count_ids(vocab_size)
        counts[list(never)] = -1
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))

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
    """Mix the data with text that the model wrote, which gets `share` of the rows. None: half, or less if one pass over
    the data would otherwise read these texts more than MOST_OWN_ROUNDS times."""
    if share is None:
        most = MOST_OWN_ROUNDS * len(own)
        share = min(0.5, most / (most + len(data)))
    return [RowStream(data, 1.0 - share), RowStream(own, share, teaches=False)]
