"""Texts without words: how long each is, and how often its drafts come true."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from space_kernels.noise import request_key

VOCABULARY = 1 << 30
"""Ids: so many that texts have none in common unless they are told to."""

EOS = VOCABULARY - 1
_HALF = VOCABULARY // 2

_NUM_UNIFORMS = 1 << 16
_MIX = 0x9E3779B97F4A7C15


class Text(NamedTuple):
    """One choice of a request, as the model would write it."""

    first: int  # id of its position 0; the others count up from it
    length: int  # ids of the answer; the last one is the end
    chances: tuple[float, ...]  # that a draft of mask depth 1, 2, … comes true, given those before it
    place: int  # where its uniforms begin


@dataclass(frozen=True)
class Acceptance:
    """The law of chances: a shape by depth, and texts that differ from it by a shift of all log-odds."""

    chances: tuple[float, ...]  # p_1, p_2, …
    spread: float = 0.0  # standard deviation of the shift, in log-odds

    def draw(self, source: random.Random) -> tuple[float, ...]:
        """The chances of one text."""
        shift = source.gauss(0.0, self.spread) if self.spread else 0.0
        return tuple(_shifted(p, shift) for p in self.chances)

    @property
    def name(self) -> str:
        shape = " ".join(f"{p:.2f}".removeprefix("0") for p in self.chances)
        return f"{shape}, spread {self.spread:g} in log-odds" if self.spread else shape


def _shifted(chance: float, shift: float) -> float:
    if not shift or not 0.0 < chance < 1.0:
        return chance
    return 1.0 / (1.0 + math.exp(-math.log(chance / (1.0 - chance)) - shift))


class Library:
    """All texts, by the key of the law that draws them. Whether a draft comes true depends on text and position alone:
    the same in every run, whatever was drafted and when.
    """

    def __init__(self, acceptance: Acceptance, seed: int) -> None:
        self.acceptance = acceptance
        self._seed = seed
        self._texts: dict[int, Text] = {}
        source = random.Random(f"uniforms {seed}")
        self._uniforms = array("f", (source.random() for _ in range(_NUM_UNIFORMS)))

    def write(self, seed: int, choice: int, length: int) -> Text:
        """The text that a request with this seed will get."""
        key = request_key(seed, choice)
        source = random.Random(key ^ self._seed)
        text = Text(
            first=key * _MIX % _HALF,
            length=length,
            chances=self.acceptance.draw(source),
            place=source.randrange(_NUM_UNIFORMS),
        )
        self._texts[key] = text
        return text

    def text(self, key: int) -> Text:
        return self._texts[key]

    def num_true(self, text: Text, position: int, first_depth: int, num_drafts: int) -> int:
        """How many of the drafts for `position`, … come true: from masks `first_depth`, …"""
        chances, uniforms, at = text.chances, self._uniforms, text.place + position
        deepest, depth = len(chances), first_depth - 1
        for number in range(num_drafts):
            if uniforms[(at + number) % _NUM_UNIFORMS] >= chances[min(depth + number, deepest - 1)]:
                return number
        return num_drafts

    @staticmethod
    def ids(text: Text, begin: int, end: int) -> list[int]:
        """Ids of the answer, from place `begin` to before `end`."""
        made = list(range(text.first + begin, text.first + end))
        if begin < text.length <= end:
            made[text.length - 1 - begin] = EOS
        return made


def prompt_ids(number: int, length: int, prefix: Sequence[int] = ()) -> tuple[int, ...]:
    """The prompt of request `number`: a prefix that others share, then ids of its own."""
    first = _HALF + number * _MIX % (_HALF // 2)
    return (*prefix, *range(first, first + length - len(prefix)))


def prefix_ids(number: int, length: int) -> tuple[int, ...]:
    """A prefix that many prompts share."""
    first = _HALF + _HALF // 2 + number * _MIX % (_HALF // 4)
    return tuple(range(first, first + length))
