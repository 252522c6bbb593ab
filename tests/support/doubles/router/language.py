"""Made-up languages: the next id is a pure function of the ids before it, as with a real model and a fixed seed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from space_proto import worker_pb2


class Language(Protocol):
    """Says the next id."""

    def next_id(self, ids: Sequence[int], num_prompt: int, sampling: worker_pb2.Sampling) -> int:
        """The id after `ids`, of which `num_prompt` are prompt."""


@dataclass(frozen=True)
class HashLanguage:
    """The next id is a hash of the prefix and, above temperature 0, of seed and choice."""

    vocab: Sequence[int]  # ids that may be said
    eos_id: int | None = None
    eos_period: int = 0  # about one id in so many is EOS; 0: never

    def next_id(self, ids: Sequence[int], num_prompt: int, sampling: worker_pb2.Sampling) -> int:
        key = b"%d,%d" % (sampling.seed, sampling.choice) if sampling.temperature > 0 else b""
        digest = hashlib.blake2b(array("I", ids).tobytes(), digest_size=16, key=key).digest()
        first, second = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        may_end = self.eos_id is not None and len(ids) - num_prompt >= sampling.min_tokens
        if may_end and self.eos_period and second % self.eos_period == 0 and self.eos_id is not None:
            return self.eos_id
        choice = sampling.allowed_ids or self.vocab
        return choice[first % len(choice)]


@dataclass(frozen=True)
class FixedReply:
    """The same answer to everything, over and over where it is too short."""

    reply: Sequence[int]

    def next_id(self, ids: Sequence[int], num_prompt: int, sampling: worker_pb2.Sampling) -> int:
        return self.reply[(len(ids) - num_prompt) % len(self.reply)]
