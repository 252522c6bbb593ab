"""A loaded gated adapter: its LoRA and mask embeddings, the draft head trained with them, and its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from space_model.adapters.gated_lora import GatedLora
from space_model.checkpoint.checkpoint import Checkpoint, adapter_section
from space_model.checkpoint.checkpoint_file import is_contained, is_local_name
from space_model.checkpoint.space_section import SpaceSection, load_draft_head
from space_model.heads.draft_head_weights import DraftHeadWeights
from space_model.model_error import InvalidSpaceSection
from space_model.model_facts import AdapterFacts

OWN = ""
"""The name of the checkpoint's own adapter, for requests that name none."""


@dataclass(frozen=True)
class Adapter:
    """A gated adapter for one base model. It only drafts: the output distribution stays the base model's."""

    name: str  # as requests ask for it
    gated: GatedLora
    draft_head: DraftHeadWeights | None
    acceptance: tuple[float, ...] = ()  # as declared in its `space` section

    @property
    def facts(self) -> AdapterFacts:
        """Return the adapter's figures."""
        return AdapterFacts(self.name, self.gated.num_masks, self.draft_head is not None, self.acceptance)

    @classmethod
    def read(
        cls,
        name: str,
        folder: Path,
        section: SpaceSection,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Adapter:
        """Load what `section` declares from `folder`. Raises InvalidSpaceSection."""
        if section.adapter is None:
            raise InvalidSpaceSection(f'{folder} declares no "adapter" in the space section of its config.json.')
        file = folder / section.adapter
        if not is_local_name(section.adapter) or not is_contained(file, folder):
            raise InvalidSpaceSection(f"The adapter {section.adapter} is not in {folder}.")
        gated = GatedLora.load(file, num_masks=section.num_masks, hidden_size=hidden_size, dtype=dtype, device=device)
        head = None
        if section.draft_head is not None:
            head = load_draft_head(folder, section.draft_head, hidden_size=hidden_size, dtype=dtype, device=device)
        return cls(name, gated, head, section.acceptance)

    @classmethod
    def open(
        cls,
        name: str,
        path: str | Path,
        *,
        base: Checkpoint,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Adapter:
        """Load the adapter in a folder: a gated checkpoint's, with or without base weights, or a PEFT folder.

        `base`: the model that it drafts for.
        """
        folder, config = adapter_section(path)
        section = SpaceSection.parse(config, mask_ids=None, num_masks=None, vocab_size=vocab_size)
        section.check_base(base.name, base.weights_sha256)
        return cls.read(name, folder, section, hidden_size=hidden_size, dtype=dtype, device=device)
