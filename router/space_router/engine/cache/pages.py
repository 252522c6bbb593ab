"""The blocks of one worker's cache: who holds them, and which content they are known for."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """Every block is exactly one of

        free     content means nothing
        held     one or more sequences refer to it (known content may be shared)
        cached   nobody refers to it, but its content is known: the oldest use goes first when room is needed

    so that free + held + cached == num_blocks always. Only whole computed blocks become known; they are immutable.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Arrays, because the garbage collector does not look into them: a list of a million it would.
        self._free = array("q", range(num_blocks - 1, -1, -1))  # a stack: the last given back is taken first
        self._num_holders = array("q", bytes(8 * num_blocks))
        self._num_held = 0
        self._key: dict[int, bytes] = {}  # of known blocks
        self._block: dict[bytes, int] = {}  # key -> block
        # Known blocks without holder; the first is the longest unused. Of a dict, the first is found only behind the
        # places of all that were first before it.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: the free ones and those that are only cached."""
        return len(self._free) + len(self._cached)

    def known(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `keys`. They are not held by this: see `hold`."""
        blocks = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds: by so many does holding them lower `num_available`."""
        return sum(self._num_holders[block] == 0 for block in blocks)

    def num_sole(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` have one holder: by so many does giving them back raise `num_available`."""
        return sum(self._num_holders[block] == 1 for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for known blocks."""
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._cached[block]
                self._num_held += 1
            self._num_holders[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        """Blocks for one new holder to write; the longest unused cached ones are forgotten where free ones run out.

        The caller asks for at most `num_available`.
        """
        if num_blocks > self.num_available:
            raise ValueError(f"{num_blocks} blocks asked for, {self.num_available} available")
        while len(self._free) < num_blocks:
            block, _ = self._cached.popitem(last=False)
            del self._block[self._key.pop(block)]
            self._free.append(block)
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._num_holders[block] = 1
        self._num_held += num_blocks
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less. Blocks come in order of position, so that deep ones are forgotten before their roots."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            self._num_held -= 1
            if block not in self._key:
                self._free.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Make a held, whole, computed block known. A content known already keeps its block; this one stays private."""
        if self._block.setdefault(key, block) == block:
            self._key[block] = key

    def check(self) -> None:
        """Raise ValueError unless the books balance."""
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
