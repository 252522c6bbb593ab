"""The requests of a round: prompts, lengths and arrivals, the same for every arm and drawn anew for every round."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from space_eval.load_dialect import Ask
from space_eval.load_file import Recorded
from space_eval.load_lengths import Lengths

CHARACTERS_PER_TOKEN = 4.0
"""Of English under a common vocabulary; used only for servers that do not tokenize for us."""


@dataclass(frozen=True)
class Work:
    """What is asked for, request by request."""

    recorded: Sequence[Recorded]  # taken in turn
    output_tokens: Lengths
    prompt_tokens: Lengths | None = None  # None: each prompt as it is
    text: str = ""  # what prompts of a given length are cut from
    ids: Sequence[int] = ()  # the same as token ids, for prompts of exact length; empty: text is sent
    characters_per_token: float = CHARACTERS_PER_TOKEN
    seed: int = 1

    @property
    def cuts(self) -> bool:
        """Whether any prompt has a given length."""
        return self.prompt_tokens is not None or any(one.text is None for one in self.recorded)

    @property
    def max_output_tokens(self) -> int:
        return max([self.output_tokens.high, *(one.output_tokens or 1 for one in self.recorded)])

    def asks(self, round_number: int, rate: float | None = None, *, mark: str = "") -> Iterator[Ask]:
        """Requests without end. `rate`: Poisson arrivals per second; None: those of the file, where it has any.

        `mark`: stands before every prompt that is text, so that a server without salts finds no prefix it knows.
        """
        source = random.Random(f"{self.seed} {round_number}")
        clock = 0.0
        for number in itertools.count():
            one = self.recorded[number % len(self.recorded)]
            output_tokens = one.output_tokens or self.output_tokens.draw(source)
            prompt = self._prompt(one, source, mark and f"{mark}.{number}\n")
            if rate is not None:
                clock += source.expovariate(rate)
            elif one.arrival is not None:
                clock = one.arrival - (self.recorded[0].arrival or 0.0) + self._length * (number // len(self.recorded))
            yield Ask(number, prompt, output_tokens, clock)

    @property
    def _length(self) -> float:
        """Seconds from one turn of the file to the next: its own length, and one mean gap."""
        first, last = self.recorded[0].arrival or 0.0, self.recorded[-1].arrival or 0.0
        return (last - first) * len(self.recorded) / max(1, len(self.recorded) - 1)

    def _prompt(self, one: Recorded, source: random.Random, mark: str) -> str | tuple[int, ...]:
        length = None if one.text is not None and self.prompt_tokens is None else one.prompt_tokens
        if length is None and self.prompt_tokens is not None:
            length = self.prompt_tokens.draw(source)
        if length is None:
            return mark + (one.text or "")
        if self.ids:
            start = source.randrange(len(self.ids))
            return tuple(self.ids[(start + place) % len(self.ids)] for place in range(length))
        num_characters = max(1, round(length * self.characters_per_token) - len(mark))
        start = source.randrange(len(self.text))
        return mark + (self.text[start:] + self.text * (num_characters // len(self.text) + 1))[:num_characters]
