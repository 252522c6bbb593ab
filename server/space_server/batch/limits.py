"""When a sequence ends, also within the tokens that one step emits."""

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
    """Ends a sequence at the first EOS id or stop id, or at max_tokens or the context window."""

    max_tokens: int  # generated tokens in all
    window: int  # context window: prompt and output tokens
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]

    def num_left(self, num_known: int, num_prompt: int) -> int:
        """Return how many tokens may still be emitted."""
        return min(self.max_tokens - (num_known - num_prompt), self.window - num_known)

    def cut(self, emitted: Sequence[int], num_left: int) -> tuple[int, SequenceEnd | None]:
        """Return how many of these tokens are kept, and why the sequence ends there (None: it goes on).

        An EOS or stop token is the last one kept. At the last allowed position it still counts as the reason of the
        end.
        """
        for count, token in enumerate(emitted, start=1):
            if token in self.eos_ids:
                return count, SequenceEnd.EOS
            if token in self.stop_ids:
                return count, SequenceEnd.STOP_ID
            if count >= num_left:
                return count, SequenceEnd.LENGTH
        return len(emitted), None
