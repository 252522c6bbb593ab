"""Synthetic acceptance, for models without trained masks: drafts are accepted with configured probabilities.

A measuring aid, off by default. The speed of speculation depends on the acceptance rate, which only training gives;
this measures what a given rate would be worth on a given machine. The worker remembers each request's output. When the
same request comes again, every draft made by a mask is replaced: with the probability of its mask depth by the token
that did follow, else by another id. Everything else is unchanged: all mask rows are computed, drafts are sampled before
they are replaced, and verification and rollback run in full. So the text is still exactly that of plain decoding.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # avoids importing torch in the load generator
    from space_server.batch import RunningSequence

MAX_TOKENS = 1 << 20  # tokens remembered, 12 bytes each: 12 MiB

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def label(chances: Iterable[float]) -> str:
    """Return the label that every log line, table and figure carries."""
    return f"SYNTHETIC ACCEPTANCE {' '.join(f'{p:.2f}'.removeprefix('0') for p in chances)}"


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed a prompt, with random numbers per token that decide whether a draft is right."""

    ids: array[int]
    uniforms: array[float]  # in [0, 1): a draft from depth j is right where this is below p_j
    others: array[int]  # valid ids that are not `ids`


class SyntheticAcceptance:
    """Remembers requests' outputs, and replaces their drafts when they come again.

    Whether a draft is right depends only on the seed, the request and the position, so runs repeat. The adapter is not
    part of the request: it changes drafts, never the text.
    """

    def __init__(
        self,
        chances: Sequence[float],
        *,
        vocab_size: int,
        mask_ids: Iterable[int] = (),
        seed: int = 0,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """`chances[j-1]` is p_j; deeper masks use the last.
        `max_tokens`: tokens remembered in all; the oldest request is dropped first."""
        self.chances = tuple(chances)
        self.num_replaced = 0  # drafts
        self.num_unknown = 0  # drafts left unchanged, because the continuation is unknown
        self._seed, self._max_tokens = seed, max_tokens
        banned = set(mask_ids)
        self._valid_ids = np.array([id_ for id_ in range(vocab_size) if id_ not in banned], dtype=np.int64)
        if len(self._valid_ids) < 2:
            raise ValueError(f"A wrong draft needs a second id; of {vocab_size} ids {len(banned)} are masks.")
        self._known: OrderedDict[bytes, Continuation] = OrderedDict()  # oldest first
        self._num_tokens = 0
        self._of_sequence: WeakKeyDictionary[RunningSequence, Continuation | None] = WeakKeyDictionary()

    def ended(self, sequence: RunningSequence, tokens: Sequence[int]) -> None:
        """Remember the output of a sequence that ends with `tokens`, which are not in its ids yet."""
        name = self._request_digest(sequence)
        output = [*sequence.ids[sequence.num_prompt :], *tokens]
        before = self._known.get(name)
        if before is not None and len(before.ids) >= len(output):
            self._known.move_to_end(name)
            return
        if before is not None:
            self._forget(name)
        self._known[name] = self._continuation(name, sequence.num_prompt, output)
        self._num_tokens += len(output)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._known)))

    def drafts(self, sequence: RunningSequence, tokens: Sequence[int], first_mask: int, drafts: list[int]) -> list[int]:
        """Replace the drafts after `tokens`, emitted in this step, of masks `first_mask`, `first_mask`+1, … Drafts
        beyond the known continuation stay as they are: in a request's first run, or one longer than any before."""
        number = self.drafted(sequence, tokens, len(drafts))
        known = self.continuation_of(sequence)
        if known is None or not number:
            return drafts
        at = len(sequence.ids) - sequence.num_prompt + len(tokens)
        deepest = len(self.chances)
        made = [
            id_ if uniform < self.chances[min(first_mask + i, deepest) - 1] else other
            for i, (id_, uniform, other) in enumerate(
                zip(
                    known.ids[at : at + number],
                    known.uniforms[at : at + number],
                    known.others[at : at + number],
                    strict=True,
                )
            )
        ]
        return made + drafts[number:]

    def drafted(self, sequence: RunningSequence, tokens: Sequence[int], num_drafts: int) -> int:
        """Count and return how many of the drafts after `tokens` are replaced, here or on the device."""
        if not num_drafts:
            return 0
        known = self.continuation_of(sequence)
        begin = len(sequence.ids) - sequence.num_prompt
        at = begin + len(tokens)
        number = 0
        if known is not None and known.ids[begin:at].tolist() == list(tokens):
            number = min(num_drafts, len(known.ids) - at)
        self.num_replaced += number
        self.num_unknown += num_drafts - number
        return number

    def continuation_of(self, sequence: RunningSequence) -> Continuation | None:
        """Return the known continuation of this request, or None; cached per sequence."""
        if sequence in self._of_sequence:
            return self._of_sequence[sequence]
        known = self._of_sequence[sequence] = self._known.get(self._request_digest(sequence))
        return known

    def _continuation(self, name: bytes, num_prompt: int, output: Sequence[int]) -> Continuation:
        request = np.uint64((int.from_bytes(name[:8], "little") + self._seed) % (1 << 64))
        positions = np.arange(num_prompt, num_prompt + len(output), dtype=np.uint64)
        streams = _mixed(request + (positions + np.uint64(1)) * _GOLDEN)
        uniforms = (_mixed(streams + _GOLDEN) >> np.uint64(40)).astype(np.float64) * 2.0**-24
        ids = np.array(output, dtype=np.int64)
        places = np.searchsorted(self._valid_ids, ids)
        steps = _mixed(streams + _GOLDEN + _GOLDEN) % np.uint64(len(self._valid_ids) - 1)
        others = self._valid_ids[(places + 1 + steps.astype(np.int64)) % len(self._valid_ids)]
        return Continuation(array("I", ids.tolist()), array("f", uniforms.tolist()), array("I", others.tolist()))

    def _forget(self, name: bytes) -> None:
        self._num_tokens -= len(self._known.pop(name).ids)

    @staticmethod
    def _request_digest(sequence: RunningSequence) -> bytes:
        """Return a digest of what the text depends on: prompt and sampling parameters, without the seed if greedy."""
        sampling_params = (
            replace(sequence.sampling_params, key=0) if sequence.sampling_params.greedy else sequence.sampling_params
        )
        digest = blake2b(array("I", sequence.ids[: sequence.num_prompt]).tobytes(), digest_size=16)
        digest.update(repr(sampling_params).encode())
        return digest.digest()


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
