"""The sampling parameters of one request (SPACE §3), parsed and frozen, and its lists as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-6
"""Smaller positive temperatures are raised to this, so that dividing by them does not overflow a finite logit."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. Stages apply in the order of the field groups; defaults are neutral."""

    key: int = 0  # noise key (noise.request_key), an int64

    bias: tuple[tuple[int, float], ...] = ()  # (id, added to its raw logit), ids distinct
    allowed_ids: tuple[int, ...] = ()  # if not empty: every other id is impossible
    grammar: str = ""  # name of the grammar that limits the ids of each row (SamplingRow.possible); "": none
    min_tokens: int = 0  # end_ids are impossible before this many generated ids
    end_ids: tuple[int, ...] = ()  # EOS and stop ids
    bad_words: tuple[tuple[int, ...], ...] = ()  # a word's last id is impossible after its other ids

    repetition_penalty: float = 1.0  # ids of prompt and output: logit ÷ penalty if positive, × penalty if negative
    presence_penalty: float = 0.0  # ids of the output: logit - penalty
    frequency_penalty: float = 0.0  # ids of the output: logit - penalty·count

    temperature: float = 1.0  # 0: greedy; the parameters below then have no effect
    top_k: int = 0  # keep the k most probable ids; 0: off
    top_p: float = 1.0  # keep the most probable ids that together reach this probability; 1: off
    min_p: float = 0.0  # keep ids at least this fraction as probable as the most probable one; 0: off
    typical_p: float = 1.0  # keep the ids of most typical information that together reach this probability; 1: off

    @cached_property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, without noise."""
        return self.temperature == 0.0

    @cached_property
    def divisor(self) -> float:
        """The divisor of the logits: the temperature, or 1 if greedy."""
        return 1.0 if self.greedy else max(self.temperature, MIN_TEMPERATURE)

    @cached_property
    def penalises(self) -> bool:
        """Whether any penalty is on, so that counts of earlier ids are needed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def ending(self) -> SamplingParams:
        """These parameters for a complete grammar, after which only an end id can follow: nothing forbids the end."""
        return replace(self, allowed_ids=(), min_tokens=0, bad_words=())

    @cached_property
    def lists(self) -> dict[tuple[int, torch.dtype, torch.device], TokenListTensors]:
        """Cache of the lists as tensors, by vocabulary size, dtype and device of the logits."""
        return {}

    @cached_property
    def edits(self) -> bool:
        """Whether any stage before the temperature is on."""
        listed = self.bias or self.allowed_ids or self.min_tokens or self.bad_words
        return bool(listed or self.grammar or self.penalises)

    @cached_property
    def truncates(self) -> bool:
        """Whether any stage after the temperature is on."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenListTensors:
    """Biases, allowed ids, end ids and bad words of one request, on the device of the logits."""

    bias_ids: Tensor  # [B] int64
    biases: Tensor  # [B], dtype of the logits
    forbidden: Tensor | None  # [V] bool: every id that is not allowed; None: all are
    end_ids: Tensor  # [E] int64
    banned: Tensor  # [W] int64: bad words of one id
    bad_behind: Mapping[int, Sequence[tuple[int, ...]]]  # longer bad words, by their second-last id

    @classmethod
    def of(cls, sampling_params: SamplingParams, logits: Tensor) -> TokenListTensors:
        """Return the tensors for logits [N, V], built on first use and cached in the parameters."""
        kind = (logits.shape[1], logits.dtype, logits.device)
        found = sampling_params.lists.get(kind)
        if found is None:
            found = sampling_params.lists[kind] = cls._made(sampling_params, logits)
        return found

    @classmethod
    def _made(cls, sampling_params: SamplingParams, logits: Tensor) -> TokenListTensors:
        def of_ids(ids: Sequence[int]) -> Tensor:
            return torch.tensor(ids, dtype=torch.int64, device=logits.device)

        forbidden = None
        if sampling_params.allowed_ids:
            forbidden = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            forbidden[of_ids(sampling_params.allowed_ids)] = False
        behind: dict[int, list[tuple[int, ...]]] = {}
        for word in sampling_params.bad_words:
            if len(word) > 1:
                behind.setdefault(word[-2], []).append(word)
        return cls(
            bias_ids=of_ids([id_ for id_, _ in sampling_params.bias]),
            biases=torch.tensor([value for _, value in sampling_params.bias], dtype=logits.dtype, device=logits.device),
            forbidden=forbidden,
            end_ids=of_ids(sampling_params.end_ids),
            banned=of_ids([word[0] for word in sampling_params.bad_words if len(word) == 1]),
            bad_behind=behind,
        )
