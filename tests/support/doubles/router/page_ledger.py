"""The memory of a scripted worker: which prefix each slot was written for, and who may write there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


class Violation(AssertionError):
    """The router broke the contract."""


class PageLedger:
    """What stands in every slot, and who may write where.

    A slot's content is the hash of the ids up to and including its position, as real keys and values depend on all
    ids before them. A sequence's computed slots must always hold its own prefix, whoever wrote them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._contents: list[list[bytes | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._writer: dict[int, int] = {}  # block -> the one sequence that may write to it
        self._readers: dict[int, set[int]] = {}  # block -> sequences that share it

    def grant(self, seq_id: int, blocks: Sequence[int]) -> None:
        """Blocks for `seq_id` alone."""
        for block in blocks:
            if not 0 <= block < len(self._contents):
                raise Violation(f"sequence {seq_id} got block {block}, outside 0..{len(self._contents) - 1}")
            users = self._readers.get(block, set()) | ({self._writer[block]} if block in self._writer else set())
            if users:
                raise Violation(f"sequence {seq_id} got block {block} to write, still in use by {sorted(users)}")
            self._writer[block] = seq_id

    def share(self, seq_id: int, blocks: Sequence[int]) -> None:
        """Blocks that `seq_id` only reads."""
        for block in blocks:
            self._readers.setdefault(block, set()).add(seq_id)

    def write(self, seq_id: int, pages: Sequence[int], position: int, content: bytes | None) -> None:
        """Put a prefix's hash (None: something wrong, as a rejected draft leaves it) into the slot of `position`."""
        index = position // self.block_size
        if index >= len(pages):
            raise Violation(f"sequence {seq_id} has {len(pages)} pages and would write position {position}")
        block = pages[index]
        if self._writer.get(block) != seq_id:
            raise Violation(f"sequence {seq_id} would write block {block} of {self._writer.get(block)}")
        if readers := self._readers.get(block, set()) - {seq_id}:
            old = self._contents[block][position % self.block_size]
            if old != content:
                raise Violation(f"sequence {seq_id} would change block {block}, shared with {sorted(readers)}")
        self._contents[block][position % self.block_size] = content

    def attend(self, seq_id: int, pages: Sequence[int], prefix: Sequence[bytes]) -> None:
        """Read the slots of positions [0, len(prefix)) as attention does; each must hold its prefix."""
        for start in range(0, len(prefix), self.block_size):
            wanted = list(prefix[start : start + self.block_size])
            found = self._contents[pages[start // self.block_size]][: len(wanted)]
            if found != wanted:
                raise Violation(
                    f"sequence {seq_id} finds foreign content in its block {pages[start // self.block_size]}"
                )

    def release(self, seq_id: int) -> None:
        """Forget a sequence; contents stay as they are."""
        self._writer = {block: writer for block, writer in self._writer.items() if writer != seq_id}
        for readers in self._readers.values():
            readers.discard(seq_id)


def prefix_hashes(ids: Sequence[int], known: list[bytes]) -> list[bytes]:
    """`known` extended in place to one hash per id: each over all ids up to and including its own."""
    for i in range(len(known), len(ids)):
        before = known[i - 1] if i else b""
        known.append(hashlib.blake2b(before + ids[i].to_bytes(4, "little"), digest_size=8).digest())
    return known
