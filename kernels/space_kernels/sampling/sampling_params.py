"""How the ids of one request are chosen: the parameters of SPACE §3, parsed and frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from space_kernels.sampling.token_list_tensors import TokenListTensors

MIN_TEMPERATURE = 1e-6
"""Positive temperatures below this act as this one: no finite logit overflows when divided by it."""


@dataclass(frozen=True)
class SamplingParams:
    """The law of choice of one request. Its stages act in the order of the fields' groups; defaults are neutral."""

    key: int = 0  # noise key (noise.request_key), an int64

    bias: tuple[tuple[int, float], ...] = ()  # (id, added to its raw logit), ids distinct
    allowed_ids: tuple[int, ...] = ()  # if not empty: every other id is impossible
    grammar: str = ""  # name of the grammar that says at each row which ids are possible (Row.possible); "": none
    min_tokens: int = 0  # end_ids are impossible before so many generated ids
    end_ids: tuple[int, ...] = ()  # EOS and stop ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id of a run is impossible behind the run's other ids

    repetition_penalty: float = 1.0  # ids of prompt and output: logit ÷ penalty if positive, × penalty if negative
    presence_penalty: float = 0.0  # ids of the output: logit - penalty
    frequency_penalty: float = 0.0  # ids of the output: logit - penalty·count

    temperature: float = 1.0  # 0: the largest logit; what follows then has no effect
    top_k: int = 0  # the k first candidates; 0 is off
    top_p: float = 1.0  # the first candidates that together reach this probability; 1 is off
    min_p: float = 0.0  # candidates at least this fraction as probable as the first; 0 is off
    typical_p: float = 1.0  # the candidates of most typical information that together reach this probability; 1 is off

    @cached_property
    def greedy(self) -> bool:
        """The largest logit is chosen, without noise."""
        return self.temperature == 0.0

    @cached_property
    def divisor(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.greedy else max(self.temperature, MIN_TEMPERATURE)

    @cached_property
    def penalises(self) -> bool:
        """The law needs counts of the ids before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def ending(self) -> SamplingParams:
        """What is left of it where a text is complete and nothing can follow: nothing may forbid its end."""
        return replace(self, allowed_ids=(), min_tokens=0, bad_words=())

    @cached_property
    def lists(self) -> dict[tuple[int, torch.dtype, torch.device], TokenListTensors]:
        """Its lists as tensors, by vocabulary, dtype and device of the logits: made when they are first asked for."""
        return {}

    @cached_property
    def edits(self) -> bool:
        """Some stage before the temperature is on."""
        listed = self.bias or self.allowed_ids or self.min_tokens or self.bad_words
        return bool(listed or self.grammar or self.penalises)

    @cached_property
    def truncates(self) -> bool:
        """Some stage after the temperature is on."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0)
