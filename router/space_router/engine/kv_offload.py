"""The host memory of one worker: what is evicted from its KV cache stays there, and comes back for a known prefix."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from space_proto import worker_pb2

from space_router.engine.pages import PagePool


class PrefixBlock(NamedTuple):
    """A block of a known prefix."""

    block: int
    is_offloaded: bool  # it is one of host memory, else of the KV cache


class KVOffload:
    """Second level of the prefix cache. A block that the first level, a PagePool, evicts is copied to host memory; its
    copy stays when it is restored, so that it need not be copied again. The least recently used copies make room.

    Every block of host memory is free or cached: free + cached == num_blocks.
    """

    def __init__(self, pool: PagePool, num_blocks: int) -> None:
        """`num_blocks`: blocks of host memory; with 0 nothing is kept."""
        self.num_blocks = num_blocks
        self.num_offloaded = self.num_restored = 0  # blocks copied, since the worker started
        self._taken = (0, 0)  # of these, reported by `take_copied`
        self._pool = pool
        self._free = array("q", range(num_blocks - 1, -1, -1))  # a stack: last in, first out
        self._host_block: OrderedDict[bytes, int] = OrderedDict()  # by key, least recently used first
        self._wanted: Collection[bytes] = ()  # keys of copies that must stay for now
        self._copies: list[tuple[int, int]] = []  # block and host block, not yet commanded
        if num_blocks:
            pool.on_evict = self._evicted

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._host_block)

    def lookup_prefix(self, keys: Sequence[bytes]) -> list[PrefixBlock]:
        """Return the blocks of the longest prefix of `keys` that is known on either level."""
        found = []
        for key in keys:
            if (block := self._pool.find(key)) is not None:
                found.append(PrefixBlock(block, is_offloaded=False))
            elif (block := self._host_block.get(key)) is not None:
                found.append(PrefixBlock(block, is_offloaded=True))
            else:
                break
        return found

    def take(self, num_blocks: int, commands: list[worker_pb2.Command], wanted: Collection[bytes] = ()) -> list[int]:
        """Take blocks from the pool, and add the command that saves what is evicted for them. `wanted`: keys of
        copies that are used next and must stay. Raises ValueError as `PagePool.take` does."""
        self._wanted = wanted
        taken = self._pool.take(num_blocks)
        if self._copies:
            blocks, host_blocks = zip(*self._copies, strict=True)
            copy = worker_pb2.CopyBlocks(blocks=blocks, host_blocks=host_blocks)
            commands.append(worker_pb2.Command(offload_blocks=copy))
            self.num_offloaded += len(self._copies)
            self._copies = []
        return taken

    def restore(self, blocks: Sequence[int], keys: Sequence[bytes], commands: list[worker_pb2.Command]) -> None:
        """Add the command that copies the keys' host blocks into these held blocks, and make these known. `keys` are
        in order of position, so that later ones make room before their prefixes."""
        host_blocks = [self._host_block[key] for key in keys]
        for block, key in zip(blocks, keys, strict=True):
            self._pool.publish(block, key)
        for key in reversed(keys):
            self._host_block.move_to_end(key)
        copy = worker_pb2.CopyBlocks(blocks=blocks, host_blocks=host_blocks)
        commands.append(worker_pb2.Command(restore_blocks=copy))
        self.num_restored += len(keys)

    def take_copied(self) -> tuple[int, int]:
        """Return the blocks copied to host memory and back since the last call."""
        now = self.num_offloaded, self.num_restored
        before, self._taken = self._taken, now
        return now[0] - before[0], now[1] - before[1]

    def _evicted(self, block: int, key: bytes) -> None:
        """Keep what the pool has just evicted, unless every copy in host memory is about to be used."""
        if key in self._host_block:
            self._host_block.move_to_end(key)
            return
        if not self._free:
            oldest = next((one for one in self._host_block if one not in self._wanted), None)
            if oldest is None:
                return
            self._free.append(self._host_block.pop(oldest))
        self._host_block[key] = self._free.pop()
        self._copies.append((block, self._host_block[key]))

    def check(self) -> None:
        """Raise ValueError unless free + cached == num_blocks. For tests."""
        blocks = [*self._free, *self._host_block.values()]
        if sorted(blocks) != list(range(self.num_blocks)):
            raise ValueError(
                f"free {self.num_free} + cached {self.num_cached} are not the {self.num_blocks} blocks of host memory"
            )
