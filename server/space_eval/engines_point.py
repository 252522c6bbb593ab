"""What is compared: one batch after its prompts, or the prompts themselves; and the rate that an answer comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise


class WrongAnswer(Exception):
    """An engine's answer that cannot be compared; the message says why."""


@dataclass(frozen=True)
class Point:
    """So many sequences, each with a prompt so long and so many new tokens."""

    num_sequences: int
    prompt_tokens: int
    new_tokens: int  # 1: the prompt alone is timed

    @property
    def is_prefill(self) -> bool:
        """The prompt is what is timed."""
        return self.new_tokens == 1

    @property
    def name(self) -> str:
        """`batch 8`, `prefill 512`."""
        return f"prefill {self.prompt_tokens}" if self.is_prefill else f"batch {self.num_sequences}"


@dataclass(frozen=True)
class Answer:
    """What an engine gave: by sequence its new ids, and the seconds at which each was there."""

    outputs: Sequence[Sequence[int]]
    seconds: Sequence[Sequence[float]]

    def tokens_per_second(self, point: Point) -> float:
        """Of prompts: their ids until the last sequence has its first token. Else new tokens after that.

        The end is where the first sequence has all of its tokens: as long as that all of them run.

            sequence 1  |prompt....|t t t t t t t|
            sequence 2  |prompt......|t t t t t t t t|
                                     [ counted  )
        """
        self._check(point)
        begin = max(times[0] for times in self.seconds)
        if point.is_prefill:
            return point.num_sequences * point.prompt_tokens / begin
        end = min(times[-1] for times in self.seconds)
        num_tokens = sum(begin < moment <= end for moment in chain.from_iterable(self.seconds))
        if end <= begin or not num_tokens:
            raise WrongAnswer(
                f"A sequence ended before another began: {point.new_tokens} new tokens are too few for a batch of "
                f"{point.num_sequences}. Ask for more by --new-tokens."
            )
        return num_tokens / (end - begin)

    def same_ids(self, other: Answer) -> float:
        """Share of the ids up to the first that differs, over all sequences."""
        same = total = 0
        for ids, others in zip(self.outputs, other.outputs, strict=True):
            differs = [one != another for one, another in zip(ids, others, strict=True)]
            same += differs.index(True) if True in differs else len(differs)
            total += len(differs)
        return same / total

    def _check(self, point: Point) -> None:
        if len(self.outputs) != point.num_sequences or len(self.seconds) != point.num_sequences:
            raise WrongAnswer(f"It answered {len(self.outputs)} of {point.num_sequences} prompts.")
        for ids, times in zip(self.outputs, self.seconds, strict=True):
            if not len(ids) == len(times) == point.new_tokens:
                raise WrongAnswer(f"It gave {len(ids)} tokens at {len(times)} times, not the {point.new_tokens} asked.")
            if times[0] <= 0 or any(later < sooner for sooner, later in pairwise(times)):
                raise WrongAnswer("Its times do not grow.")
