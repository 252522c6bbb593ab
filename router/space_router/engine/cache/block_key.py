"""Keys of the prefix cache: a hash of each block's ids, chained over all blocks before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


class BlockKeys:
    """Keys of the full blocks of one growing sequence of ids, each computed once.

    key[i] = H(key[i-1], ids of block i) with key[-1] = H(salt), so two blocks have the same key only if the salt and
    all ids up to their end are equal.
    """

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = hashlib.blake2b(salt.encode(), digest_size=32).digest()
        self._keys: list[bytes] = []

    def first_keys(self, ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Return at least the first `num_blocks` keys; `ids` must extend the ids of earlier calls."""
        size = self._block_size
        for i in range(len(self._keys), num_blocks):
            parent = self._keys[i - 1] if i else self._root
            content = array("I", ids[i * size : (i + 1) * size]).tobytes()
            self._keys.append(hashlib.blake2b(parent + content, digest_size=32).digest())
        return self._keys
