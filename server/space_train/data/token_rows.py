"""Training rows from a packed stream of ids; every id is a target."""

from __future__ import annotations

import hashlib

import torch

from space_train.data.packed_examples import ExampleRows
from space_train.data.packed_tokens import PackedTokens


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

    def digest(self) -> bytes:
        """Return a digest of the whole stream."""
        return hashlib.sha256(self.tokens.ids.data).digest()
