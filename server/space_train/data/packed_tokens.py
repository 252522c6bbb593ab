"""Token ids on disk, read as training windows: each once per epoch, in an order that the seed fixes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from space_train.data.tokenizer import END_OF_TEXT_ID

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

    def __init__(self, ids: NDArray[np.uint16], seed: int, *, aligned: bool = False) -> None:
        self.ids, self.seed, self.aligned = ids, seed, aligned
        self._order: dict[tuple[int, int], NDArray[np.int64]] = {}

    @classmethod
    def open(cls, path: Path, seed: int, *, aligned: bool = False) -> PackedTokens:
        """Memory-map the stream at `path`."""
        return cls(np.memmap(path, dtype=np.uint16, mode="r"), seed, aligned=aligned)

    def holds(self, length: int) -> bool:
        """Whether windows of `length` can be drawn."""
        return len(self.ids) >= 2 * length

    def num_windows(self, length: int) -> int:
        """Windows of `length` in one epoch."""
        return len(self.ids) // length - 1

    def windows(self, drawn: int, count: int, length: int) -> Tensor:
        """Return `count` windows, [count, length] int64, after `drawn` ids were drawn in earlier windows.

        An epoch cuts the stream at multiples of `length` from an offset of its own (none where the stream is
        `aligned`: made of pieces of that length), and shuffles the pieces.
        """
        if not self.holds(length):
            raise ValueError(f"The stream has {len(self.ids)} ids; windows of {length} need at least {2 * length}.")
        per_epoch, first = self.num_windows(length), drawn // length
        rows = []
        for index in range(first, first + count):
            epoch, place = divmod(index, per_epoch)
            if (epoch, length) not in self._order:
                self._order[epoch, length] = np.random.default_rng([self.seed, epoch, length]).permutation(per_epoch)
            offset = 0 if self.aligned else int(np.random.default_rng([self.seed, epoch]).integers(length))
            start = offset + int(self._order[epoch, length][place]) * length
            rows.append(torch.from_numpy(self.ids[start : start + length].astype(np.int64)))
        return torch.stack(rows)
