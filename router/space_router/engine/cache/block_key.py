"""The name of a block's content: a hash chained over everything before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


class BlockKeys:
    """Keys of the whole blocks of one growing run of ids, computed once each.

    key[i] = H(key[i-1], ids of block i), key[-1] = H(salt): two blocks have the same key only if the salt and all ids
    up to their end are the same.
    """

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = hashlib.blake2b(salt.encode(), digest_size=32).digest()
        self._keys: list[bytes] = []

    def upto(self, ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks` keys; `ids` must continue those of earlier calls."""
        size = self._block_size
        for i in range(len(self._keys), num_blocks):
            parent = self._keys[i - 1] if i else self._root
            content = array("I", ids[i * size : (i + 1) * size]).tobytes()
            self._keys.append(hashlib.blake2b(parent + content, digest_size=32).digest())
        return self._keys
