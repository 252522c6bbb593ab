"""The KV cache blocks of one worker, with reference counts and the prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence


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


class PagePool:
    """Allocates blocks. Every block is in exactly one state:

        free     its content is meaningless
        held     one or more sequences refer to it
        cached   no sequence refers to it, but its content has a key; evicted in LRU order

    so free + held + cached == num_blocks. Only full, computed blocks get a key ("known" blocks); they are immutable
    and may be shared.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Arrays, because the garbage collector does not traverse them, unlike a list of a million ints.
        self._free = array("q", range(num_blocks - 1, -1, -1))  # a stack: last in, first out
        self._num_holders = array("q", bytes(8 * num_blocks))
        self.num_held = 0
        self._key: dict[int, bytes] = {}  # known block -> key
        self._block: dict[bytes, int] = {}  # key -> block
        # Known blocks without holder, least recently used first. A plain dict would scan the slots of its deleted
        # first entries to find the next one.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.on_evict: Callable[[int, bytes], None] | None = None  # called with a block and its key

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    def find(self, key: bytes) -> int | None:
        """Return the block of a key, without holding it (see `hold`), or None."""
        return self._block.get(key)

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` have no holder: holding them lowers `num_available` by as many."""
        return sum(self._num_holders[block] == 0 for block in blocks)

    def num_sole(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` have one holder: giving them back raises `num_available` by as many."""
        return sum(self._num_holders[block] == 1 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to known blocks."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._cached[block]
                self.num_held += 1
            self._num_holders[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        """Return blocks for one new holder to write; evict cached ones in LRU order if too few are free.

        Raises ValueError if fewer than `num_blocks` are available.
        """
        if num_blocks > self.num_available:
            raise ValueError(f"{num_blocks} blocks asked for, {self.num_available} available")
        while len(self._free) < num_blocks:
            block, _ = self._cached.popitem(last=False)
            key = self._key.pop(block)
            del self._block[key]
            self._free.append(block)
            if self.on_evict is not None:
                self.on_evict(block, key)
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._num_holders[block] = 1
        self.num_held += num_blocks
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a holder. `blocks` are in order of position, so that later ones are evicted before their prefixes."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            self.num_held -= 1
            if block not in self._key:
                self._free.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Give a held, full, computed block its key. If the key has a block already, this one stays private."""
        if self._block.setdefault(key, block) == block:
            self._key[block] = key

    def check(self) -> None:
        free, cached, known = set(self._free), set(self._cached), set(self._key)
        held = {block for block, num_holders in enumerate(self._num_holders) if num_holders}
        numbers = (self.num_free, self.num_held, self.num_cached)
        if numbers != (len(free), len(held), len(cached)) or sum(numbers) != self.num_blocks:
            raise ValueError(
                f"free {self.num_free} + held {self.num_held} + cached {self.num_cached} != {self.num_blocks} blocks"
            )
        if wrong := free & (held | known):
            raise ValueError(f"block {min(wrong)} is free but held or known")
        if wrong := (cached & held) | (cached - known):
            raise ValueError(f"block {min(wrong)} is cached but held or unknown")
        if {block: key for key, block in self._block.items()} != self._key:
            raise ValueError("a block is known for another content")
