"""Texts without words: how long each is, and which of its drafts are accepted."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from space_kernels.sampling.noise import request_key

VOCABULARY = 1 << 30
"""Token ids: so many that two texts share none unless they share a prefix on purpose."""

EOS = VOCABULARY - 1
_HALF = VOCABULARY // 2

_NUM_UNIFORMS = 1 << 16
_MIX = 0x9E3779B97F4A7C15


class SimulatedText(NamedTuple):
    """One choice of a request, as the model would write it."""

    first: int  # id of its position 0; the others count up from it
    length: int  # tokens of the answer; the last one is EOS
    chances: tuple[float, ...]  # acceptance of the draft of mask depth 1, 2, … if all before it are accepted
    offset: int  # where its uniforms begin


@dataclass(frozen=True)
class DepthAcceptance:
    """Acceptance by mask depth, and how much single texts differ from it by a shift of all log-odds."""

    chances: tuple[float, ...]  # p_1, p_2, …
    spread: float = 0.0  # standard deviation of the shift, in log-odds

    def draw(self, source: random.Random) -> tuple[float, ...]:
        """The chances of one text."""
        shift = source.gauss(0.0, self.spread) if self.spread else 0.0
        return tuple(_shifted(p, shift) for p in self.chances)


def _shifted(chance: float, shift: float) -> float:
    if not shift or not 0.0 < chance < 1.0:
        return chance
    return 1.0 / (1.0 + math.exp(-math.log(chance / (1.0 - chance)) - shift))


class TextLibrary:
    """All texts, by the noise key of their request.

    Whether a draft is accepted depends on text and position alone: it is the same in every run, whatever was drafted
    and when.
    """

    def __init__(self, acceptance: DepthAcceptance, seed: int) -> None:
        self.acceptance = acceptance
        self._seed = seed
        self._texts: dict[int, SimulatedText] = {}
        source = random.Random(f"uniforms {seed}")
        self._uniforms = array("f", (source.random() for _ in range(_NUM_UNIFORMS)))

    def write(self, seed: int, choice: int, length: int) -> SimulatedText:
        """Add the text that the request with this seed will get."""
        key = request_key(seed, choice)
        source = random.Random(key ^ self._seed)
        text = SimulatedText(
            first=key * _MIX % _HALF,
            length=length,
            chances=self.acceptance.draw(source),
            offset=source.randrange(_NUM_UNIFORMS),
        )
        self._texts[key] = text
        return text

    def text(self, key: int) -> SimulatedText:
        return self._texts[key]

    def num_accepted(self, text: SimulatedText, position: int, first_depth: int, num_drafts: int) -> int:
        """How many of the drafts for `position`, … are accepted; they come from masks `first_depth`, …"""
        chances, uniforms, at = text.chances, self._uniforms, text.offset + position
        deepest, depth = len(chances), first_depth - 1
        for number in range(num_drafts):
            if uniforms[(at + number) % _NUM_UNIFORMS] >= chances[min(depth + number, deepest - 1)]:
                return number
        return num_drafts

    @staticmethod
    def ids(text: SimulatedText, begin: int, end: int) -> list[int]:
        """Ids of the answer, tokens [begin, end)."""
        ids = list(range(text.first + begin, text.first + end))
        if begin < text.length <= end:
            ids[text.length - 1 - begin] = EOS
        return ids


def prompt_ids(number: int, length: int, prefix: Sequence[int] = ()) -> tuple[int, ...]:
    """The prompt of request `number`: a prefix that others share, then ids of its own."""
    first = _HALF + number * _MIX % (_HALF // 2)
    return (*prefix, *range(first, first + length - len(prefix)))


def prefix_ids(number: int, length: int) -> tuple[int, ...]:
    """A prefix that many prompts share."""
    first = _HALF + _HALF // 2 + number * _MIX % (_HALF // 4)
    return tuple(range(first, first + length))
