"""What the mask rows of released adapters read. Their files are ordinary LoRAs of peft and do not say it.

    format   a mask at position p reads the base's embedding of       as in
    uno      an id drawn uniformly from 1 .. mask_token_id - 1        SGLang 0.5.23, srt/speculative/uno_utils.py
    i-dlm    mask_token_id                                            github.com/thuEcstasy/I-DLM, srt/dllm/config.py

Both run a block of such rows causally behind a known token, which the base's weights alone compute: a mask group.
Uno's ids are drawn anew in every step there; here once, when the model is loaded, and an id is the position's, so that
what is drafted depends on the text alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from transformers import PreTrainedConfig

from space_model.model_error import InvalidSpaceSection

NOISE_IDS = 1021  # prime, so that ids repeat with no period of a text


class AdapterFormat(StrEnum):
    """How the masks of an adapter get their inputs."""

    SPACE = "space"  # mask embeddings of its own
    UNO = "uno"
    IDLM = "i-dlm"


USUAL_MASKS = {AdapterFormat.UNO: 7, AdapterFormat.IDLM: 3}
"""Masks per group, if none are declared: of blocks of 8 and 4, the first row is the known token."""

_IDLM_MASK_IDS = {"qwen3": 151669, "qwen3_moe": 151669}  # model type -> mask_token_id


def split_place(place: str) -> tuple[AdapterFormat, str]:
    """Split `uno:FOLDER` or `i-dlm:FOLDER`, as users name adapters, into the format and the folder or hub id."""
    prefix, colon, rest = place.partition(":")
    if colon and prefix in USUAL_MASKS and not Path(place).exists():
        return AdapterFormat(prefix), rest
    return AdapterFormat.SPACE, place


@dataclass(frozen=True)
class MaskInputs:
    """The inputs of a released adapter's mask rows."""

    format: AdapterFormat
    num_masks: int
    mask_token_id: int | None  # None: as the base's config declares, or is usual for it

    def ids(self, config: PreTrainedConfig, vocab_size: int) -> list[int]:
        """Return the ids that masks read: a mask at position p the id of index p modulo their number. Raises
        InvalidSpaceSection."""
        last = self.mask_token_id
        if last is None:
            last = getattr(config, "mask_token_id", None)
        if self.format is AdapterFormat.UNO:
            last = vocab_size if last is None else last
            if not 1 < last <= vocab_size:
                raise InvalidSpaceSection(f"mask_token_id must be from 2 to {vocab_size}; got {last}.")
            generator = random.Random(0)
            return [1 + int(generator.random() * (last - 1)) for _ in range(NOISE_IDS)]
        if last is None:
            last = _IDLM_MASK_IDS.get(str(config.model_type))
        if last is None:
            raise InvalidSpaceSection(
                f"Which id an I-DLM adapter's masks read is known for bases of type {', '.join(_IDLM_MASK_IDS)}; this "
                f'one is of type {config.model_type}. Declare "mask_token_id" in the space section of the config.json '
                "beside the adapter."
            )
        if not 0 <= last < vocab_size:
            raise InvalidSpaceSection(f"mask_token_id must be from 0 to {vocab_size - 1}; got {last}.")
        return [last]
