"""The requests of a round: prompts, lengths and arrivals, redrawn for every round."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_eval.bench.exchange import LoadRequest
from space_eval.prompts import FIELDS, PromptError, json_lines, load_prompts, text_of

CHARACTERS_PER_TOKEN = 4.0
"""For English with common vocabularies; used only if the server has no /tokenize."""


@dataclass(frozen=True)
class Workload:
    """Generates the requests of a round."""

    recorded: Sequence[Recorded]  # used in turn
    output_tokens: Lengths
    prompt_tokens: Lengths | None = None  # None: each prompt as it is
    text: str = ""  # source of prompts of a given length
    ids: Sequence[int] = ()  # `text` as token ids, for prompts of exact length; empty: text is sent
    characters_per_token: float = CHARACTERS_PER_TOKEN
    seed: int = 1

    @property
    def has_given_lengths(self) -> bool:
        """Whether any prompt has a given length."""
        return self.prompt_tokens is not None or any(one.text is None for one in self.recorded)

    @property
    def max_output_tokens(self) -> int:
        return max([self.output_tokens.high, *(one.output_tokens or 1 for one in self.recorded)])

    def requests(self, round_number: int, rate: float | None = None, *, mark: str = "") -> Iterator[LoadRequest]:
        """Yield requests endlessly. `rate`: Poisson arrivals per second; None: arrivals of the file, if it has any.

        `mark`: prefix of every text prompt, so that a server without salts has no cached prefix of it.
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
            yield LoadRequest(number, prompt, output_tokens, clock)

    @property
    def _length(self) -> float:
        """Seconds from one pass over the file to the next: its duration plus one mean gap."""
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


FORMS = "N, uniform:LOW:HIGH, normal:MEAN:SPREAD[:LOW:HIGH] or lognormal:MEDIAN:SIGMA[:LOW:HIGH]"


class LengthError(ValueError):
    """A length distribution that cannot be parsed; the message lists the known forms."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, from `low` to `high`.

    normal: mean and standard deviation. lognormal: median, and standard deviation of the logarithm. Values are clamped
    to the bounds.
    """

    form: str  # as given by the user
    sampling_params: str
    figures: tuple[float, ...]
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse a distribution. Raises LengthError."""
        sampling_params, *rest = text.split(":") if ":" in text else ("fixed", text)
        try:
            figures = [float(part) for part in rest]
        except ValueError:
            figures = []
        if (
            sampling_params not in _LAWS
            or len(figures) not in _COUNTS[sampling_params]
            or not all(map(math.isfinite, figures))
        ):
            raise LengthError(f"{text!r} is no length: give {FORMS}.")
        bounds = figures[2:] if sampling_params in ("normal", "lognormal") else figures
        low, high = (min(bounds), max(bounds)) if bounds else (1.0, _far(sampling_params, figures))
        if low < 1 or any(bound != int(bound) for bound in bounds) or figures[0] < 1 or figures[-1] < 0:
            raise LengthError(f"{text!r}: lengths are whole numbers of at least 1. Give {FORMS}.")
        if bounds != sorted(bounds):
            raise LengthError(f"{text!r}: the lower bound {bounds[0]:g} is above the upper one, {bounds[1]:g}.")
        if sampling_params in ("normal", "lognormal") and figures[1] < 0:
            raise LengthError(f"{text!r}: the spread must be at least 0; got {figures[1]:g}.")
        return cls(text, sampling_params, tuple(figures), int(low), int(high))

    def draw(self, source: random.Random) -> int:
        """Draw the next length."""
        drawn = round(_LAWS[self.sampling_params](source, self.figures))
        return min(max(drawn, self.low), self.high)


def _far(sampling_params: str, figures: Sequence[float]) -> float:
    """Return the default upper bound: 4 standard deviations."""
    mean, spread = figures[0], figures[1]
    return math.ceil(mean + 4 * spread if sampling_params == "normal" else mean * math.exp(4 * min(spread, 5.0)))


_LAWS: dict[str, Callable[[random.Random, Sequence[float]], float]] = {
    "fixed": lambda source, figures: figures[0],
    "uniform": lambda source, figures: source.randint(int(figures[0]), int(figures[1])),
    "normal": lambda source, figures: source.gauss(figures[0], figures[1]),
    "lognormal": lambda source, figures: source.lognormvariate(math.log(figures[0]), figures[1]),
}
_COUNTS = {"fixed": (1,), "uniform": (2,), "normal": (2, 4), "lognormal": (2, 4)}


PROMPT_LENGTHS = ("prompt_tokens", "input_length")
OUTPUT_LENGTHS = ("output_tokens", "max_tokens", "output_length")


@dataclass(frozen=True)
class Recorded:
    """One line of a workload file."""

    text: str | None  # None: only its length is given
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    arrival: float | None = None  # seconds after the first


def load_recorded(path: Path) -> list[Recorded]:
    """Read the lines of `path`; a file that does not end in .jsonl is one prompt. Raises PromptError.

    A line has a text (`prompt`, `question`, `turns`, ...) or a length (`prompt_tokens`, `input_length`), and may have
    the answer's (`output_tokens`, `max_tokens`, `output_length`) and an arrival: `arrival` in seconds, or `timestamp`
    in milliseconds, as published traces have it.
    """
    if path.suffix != ".jsonl" or not path.is_file():
        return [Recorded(prompt.text) for prompt in load_prompts(path)]
    recorded = [_recorded(record, f"{path}:{number}") for number, record in json_lines(path)]
    if not recorded:
        raise PromptError(f"{path} holds no request. Give at least one JSON line with `prompt` or `prompt_tokens`.")
    arrivals = [one.arrival for one in recorded if one.arrival is not None]
    if arrivals and len(arrivals) < len(recorded):
        raise PromptError(f"{path}: {len(arrivals)} of {len(recorded)} lines have an arrival; give all or none.")
    if arrivals != sorted(arrivals):
        raise PromptError(f"{path}: its arrivals do not ascend. Sort its lines by arrival.")
    return recorded


def _recorded(record: Mapping[str, Any], where: str) -> Recorded:
    text, prompt_tokens = text_of(record), _length(record, PROMPT_LENGTHS, where)
    if text is None and prompt_tokens is None:
        raise PromptError(f"{where} has none of the fields turns, {', '.join((*FIELDS, *PROMPT_LENGTHS))}.")
    return Recorded(text, prompt_tokens, _length(record, OUTPUT_LENGTHS, where), _arrival(record, where))


def _length(record: Mapping[str, Any], names: tuple[str, ...], where: str) -> int | None:
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        return None
    value = record[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PromptError(f"{where}: `{name}` must be a whole number of at least 1; it is {value!r}.")
    return value


def _arrival(record: Mapping[str, Any], where: str) -> float | None:
    name, unit = ("arrival", 1.0) if "arrival" in record else ("timestamp", 0.001)
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise PromptError(f"{where}: `{name}` must be a number of at least 0; it is {value!r}.")
    return float(value) * unit
