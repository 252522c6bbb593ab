"""The lists of one request's sampling parameters as tensors, built once so that rows need no Python loops over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from space_kernels.sampling.sampling_params import SamplingParams


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
