"""When a sequence ends, also in the middle of the run of ids that one step emits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class SequenceEnd(Enum):
    """Why a sequence ended."""

    EOS = auto()
    STOP_ID = auto()
    LENGTH = auto()


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Ends at the first EOS id, stop id, or when max_tokens or the window is reached."""

    max_tokens: int  # generated ids in all
    window: int  # ids in all: prompt and output
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]

    def num_left(self, num_known: int, num_prompt: int) -> int:
        """Ids that may still be emitted."""
        return min(self.max_tokens - (num_known - num_prompt), self.window - num_known)

    def cut(self, emitted: Sequence[int], num_left: int) -> tuple[int, SequenceEnd | None]:
        """How many of these ids stand, and why the sequence ends there, if it does.

        An end token is the last id that stands; on the last allowed place it is still what ended the sequence.
        """
        for count, token in enumerate(emitted, start=1):
            if token in self.eos_ids:
                return count, SequenceEnd.EOS
            if token in self.stop_ids:
                return count, SequenceEnd.STOP_ID
            if count >= num_left:
                return count, SequenceEnd.LENGTH
        return len(emitted), None
