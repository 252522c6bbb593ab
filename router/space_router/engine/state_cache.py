"""The recurrent states that one worker keeps beside its pages: behind which prefixes, and in which slots."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

EVERY_BLOCKS = 64
"""Blocks of a long prompt between states that are kept, besides the one behind its last full block."""


class HeldState(NamedTuple):
    """A slot that a running sequence is to write."""

    position: int  # ids of the prefix
    key: bytes  # of its last block
    slot: int


class StateCache:
    """Slots for recurrent states, by the key of the last block of a prefix. Pages hold the keys and values of a prefix,
    and a state what recurrent layers remember of it; a prefix is shared up to the last block that has one.

    Every slot is in exactly one state:

        free     its content is meaningless
        held     a running sequence writes it, when it has computed so much of its prompt
        cached   its content has a key; the least recently used makes room

    so free + held + cached == num_slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = array("q", range(num_slots - 1, -1, -1))  # a stack: last in, first out
        self._slot: OrderedDict[bytes, int] = OrderedDict()  # by key, least recently used first
        self._held: dict[bytes, HeldState] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_cached(self) -> int:
        return len(self._slot)

    def num_usable(self, keys: Sequence[bytes]) -> int:
        """Return how many of these leading blocks of a prefix can be shared: up to the last that has a state."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._slot), 0)

    def use(self, key: bytes) -> int:
        """Return the slot of a state that a sequence begins with now, and keep it for longest."""
        self._slot.move_to_end(key)
        return self._slot[key]

    def hold(self, keys: Sequence[bytes], *, begun: int, block_size: int) -> list[HeldState]:
        """Return the slots, by position, for the states that a sequence is to keep: behind the last full block of its
        prompt, and behind each EVERY_BLOCKS-th as far as slots reach. `keys`: of these blocks, of which `begun` are
        shared. What is known, or is being written, is left out."""
        counts = [len(keys), *range(len(keys) // EVERY_BLOCKS * EVERY_BLOCKS, 0, -EVERY_BLOCKS)]
        held: dict[int, HeldState] = {}
        for count in counts:
            if count <= begun or count in held:
                continue
            key = keys[count - 1]
            if key in self._slot or key in self._held or (slot := self._take()) is None:
                continue
            held[count] = self._held[key] = HeldState(count * block_size, key, slot)
        return [held[count] for count in sorted(held)]

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._slot.popitem(last=False)[1] if self._slot else None

    def written(self, held: Iterable[HeldState]) -> None:
        """Let the states be found that sequences have written."""
        for one in held:
            del self._held[one.key]
            self._slot[one.key] = one.slot

    def give_back(self, held: Iterable[HeldState]) -> None:
        """Free slots that a sequence will not write."""
        for one in held:
            del self._held[one.key]
            self._free.append(one.slot)

    def check(self) -> None:
        """Raise ValueError unless free + held + cached == num_slots. For tests."""
        slots = [*self._free, *self._slot.values(), *(one.slot for one in self._held.values())]
        if sorted(slots) != list(range(self.num_slots)):
            raise ValueError(
                f"free {self.num_free} + held {self.num_held} + cached {self.num_cached} are not the {self.num_slots} "
                "slots of states"
            )
