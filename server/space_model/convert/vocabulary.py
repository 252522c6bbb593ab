"""Finds the tensors with one row per token id, and checks all shapes against config.json."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from space_model.checkpoint.checkpoint_file import read_object
from space_model.convert.source import ConvertError, SourceWeights

_RECOMPUTED = ".rotary_emb.inv_freq"  # in old Llama checkpoints; computed from config.json


@dataclass(frozen=True)
class VocabularyTensors:
    """The vocabulary tables of a checkpoint, and their new number of rows."""

    tables: frozenset[str]  # names: input embedding and, unless tied to it, output head (and its bias)
    dropped: frozenset[str]  # names that are not written: a tied head, buffers computed from config.json
    old_size: int
    num_added: int

    @property
    def new_size(self) -> int:
        return self.old_size + self.num_added

    @classmethod
    def find(cls, source: Path, weights: SourceWeights, *, num_added: int) -> VocabularyTensors:
        """Build the architecture without weights, and check every tensor's shape against it. Raises ConvertError."""
        from transformers import AutoModelForCausalLM

        from space_model.checkpoint import family

        config = family.parse_config(read_object(source / "config.json"), str(source))
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ConvertError(f"transformers has no causal model for {source / 'config.json'}: {reason}") from error
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        modules = {id(module): name for name, module in model.named_modules()}
        names = [
            {f"{modules[id(table)]}.{name}" for name, _ in table.named_parameters()} for table in (embedding, head)
        ]
        embedding_name = f"{modules[id(embedding)]}.weight"
        if embedding_name not in weights.entries:
            raise ConvertError(f"{source} has no tensor {embedding_name}, the input embedding of its architecture.")
        dropped = {name for name in weights.entries if name.endswith(_RECOMPUTED)}
        head_weight = f"{modules[id(head)]}.weight"
        tied = bool(getattr(config, "tie_word_embeddings", False))
        if tied and head_weight in weights.entries:
            _require_equal(head_weight, embedding_name, weights)
            dropped.add(head_weight)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        _check_shapes(expected, weights, optional=dropped | ({head_weight} if tied else set()))
        tables = (names[0] | names[1]) & weights.entries.keys() - dropped
        return cls(frozenset(tables), frozenset(dropped), weights.entries[embedding_name].shape[0], num_added)


def _require_equal(head: str, embedding: str, weights: SourceWeights) -> None:
    if not torch.equal(weights.read(head), weights.read(embedding)):
        raise ConvertError(
            f"config.json ties the output head to the embedding, but {head} differs from {embedding}. "
            'Say "tie_word_embeddings": false in config.json if the head is meant.'
        )


def _check_shapes(expected: Mapping[str, tuple[int, ...]], weights: SourceWeights, *, optional: Set[str]) -> None:
    for name, entry in weights.entries.items():
        if name in expected and entry.shape != expected[name]:
            raise ConvertError(
                f"{name} in {entry.file.name} has shape {list(entry.shape)}; config.json makes it "
                f"{list(expected[name])}. Is it the config.json of this checkpoint?"
            )
    if weights.entries.keys() - expected.keys() - optional:
        return  # transformers renames tensors of some families while loading, so a missing name proves nothing
    missing = sorted(expected.keys() - weights.entries.keys() - optional)
    if missing:
        raise ConvertError(f"The checkpoint lacks {len(missing)} tensors of its architecture, {missing[0]} first.")
