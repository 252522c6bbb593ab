"""Greedy text against transformers' `generate`: equal, or different at a tie that is named (DESIGN: exactness)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

TIE_FACTOR = 64
"""A decision is a tie if the values that made it lie closer than this many rounding units of the largest logit."""


@dataclass(frozen=True)
class Tie:
    """A position where rounding may decide, and did."""

    position: int  # absolute
    ours: int
    theirs: int
    gap: float  # between their two logits, in the oracle
    bound: float


class NotEqual(AssertionError):
    """The texts differ where no tie excuses it."""


class GreedyOracle:
    """A checkpoint under stock transformers: dense attention, its own cache, `generate`."""

    def __init__(self, path: Path, *, banned_ids: Sequence[int] = ()) -> None:
        """`banned_ids` are never generated; EOS is an id like others."""
        # eager: sdpa leaves out a soft cap of the scores, and not every version of transformers avoids it by itself
        model_type = AutoConfig.from_pretrained(path).model_type
        sees = model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        self.model: Any = (AutoModelForMultimodalLM if sees else AutoModelForCausalLM).from_pretrained(
            str(path), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        # Bamba's step with a cache gives other logits than its forward over the whole text (transformers 5.23).
        self._use_cache = model_type != "bamba"
        self.banned_ids = list(banned_ids)

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], num_new: int) -> list[int]:
        prompt = torch.tensor([list(ids)])
        found = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_new,
            suppress_tokens=self.banned_ids or None, use_cache=self._use_cache,
        )  # fmt: skip
        new: list[int] = found[0, len(ids) :].tolist()
        return new

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[V] logits behind `ids`, banned ids at -inf."""
        z: torch.Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
        z[self.banned_ids] = -torch.inf
        return z

    def check(self, prompt: Sequence[int], output: Sequence[int]) -> list[Tie]:
        """The ties at which `output` leaves `generate`; it continues behind each with our id (teacher-forced).

        Raises NotEqual at the first difference that is none.
        """
        ties: list[Tie] = []
        done = 0
        while done < len(output):
            ours = list(output[done:])
            theirs = self.generate([*prompt, *output[:done]], len(ours))
            same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
            if same is None:
                break
            ties.append(self._judge([*prompt, *output[: done + same]], ours[same], theirs[same]))
            done += same + 1
        return ties

    def _judge(self, known: list[int], ours: int, theirs: int) -> Tie:
        z = self.logits(known)
        bound = TIE_FACTOR * torch.finfo(torch.float32).eps * float(z[z.isfinite()].abs().max())
        tie = Tie(len(known), ours, theirs, float(z[theirs] - z[ours]), bound)
        if not abs(tie.gap) < bound:
            top = torch.topk(z, 4)
            first = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            raise NotEqual(
                f"At position {tie.position} ours is {ours}, generate's {theirs}: their logits differ by "
                f"{tie.gap:.3g}, a tie is below {bound:.3g}. The oracle's first logits: {first}."
            )
        return tie
