"""A second, smaller model that drafts for the served one (Leviathan et al., arXiv 2211.17192; here verified by sampling
with the same noise, so the text is the served model's own)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.draft_networks.place import check_place
from space_model.geometry.forward_batch import ForwardBatch
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_model.model_facts import HeadFacts, ModelFacts
from space_model.networks.network import DraftKV, PagedKV
from space_model.space_model import SpaceModel

_log = logging.getLogger(__name__)

NUM_DRAFTS = 8
"""Most drafts of a step. Where each is accepted with .8, the eighth is reached in one of five steps."""


class DraftModel:
    """A loaded model as a DraftNetwork. Its own masks, heads and adapters are not used."""

    lag = width = 0
    tapped = None

    def __init__(self, model: SpaceModel) -> None:
        self._model = model
        self.facts = HeadFacts(NUM_DRAFTS, kind="model")
        self.name, self.window = model.facts.name, model.facts.window
        self.vocab_size = model.facts.vocab_size
        self.kv_bytes_per_token = model.facts.kv_bytes_per_token

    def allocate_kv(self, num_blocks: int, block_size: int) -> DraftKV:
        """Allocate num_blocks · block_size slots."""
        return DraftKV.of(self._model.allocate_kv(num_blocks, block_size))

    def forward(self, batch: ForwardBatch, kv: PagedKV, states: Tensor | None = None) -> Tensor:
        """[R, hidden] after the final norm. Stores the rows' keys and values in `kv`."""
        return self._model.forward(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, D] float32, of all ids of the draft model."""
        return self._model.logits(hidden)

    def widened(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[N, D] -> [N, vocab_size]: ids that only one of the models has are cut, or -inf."""
        missing = vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, :vocab_size].contiguous() if missing else logits
        return torch.cat([logits, logits.new_full((len(logits), missing), float("-inf"))], dim=1)

    def best(self, logits: Tensor) -> Tensor:
        """[N, D] -> [N] int64: the most probable ids."""
        return logits.argmax(dim=1)


def load_draft_model(checkpoint: Checkpoint, target: Checkpoint, facts: ModelFacts, *, dtype: str) -> DraftModel:
    """Load the model at `checkpoint`, which drafts for `target`, loaded with these `facts`. `dtype`: as of load_model.
    Raises ModelError for another tokenizer, or if it cannot be loaded."""
    check_place(facts.device, facts.num_ranks)
    check_tokenizer(checkpoint, target)
    trained = family.positions(family.read_config(checkpoint))
    shorter = facts.window if trained is None or trained > facts.window else None
    model = load_model(checkpoint, dtype=dtype, weights="auto", device=str(facts.device), max_model_len=shorter)
    if model.facts.is_recurrent:
        raise InvalidSetting(
            f"--draft-model {checkpoint.name} has recurrent layers, whose states cannot go back to the end of the text "
            "after each step's drafts. Take a model of attention layers alone."
        )
    if model.facts.window < facts.window:
        _log.info("%s drafts up to position %d of %d", checkpoint.name, model.facts.window, facts.window)
    return DraftModel(model)


def check_tokenizer(draft: Checkpoint, target: Checkpoint) -> None:
    """Check that an id means the same token to both models, and that `draft` is one. Raises InvalidSetting."""
    kinds = [*(draft.config.get("architectures") or ()), draft.config.get("speculators_model_type")]
    if head := next((str(kind) for kind in kinds if kind and "eagle" in str(kind).lower()), None):
        raise InvalidSetting(
            f"--draft-model {draft.name} is an EAGLE head ({head}), and no model: --draft-head {draft.name} drafts by "
            "it."
        )
    if draft.tokenizer_hash() == target.tokenizer_hash() != "":
        return
    ours, theirs = _tokens(target), _tokens(draft)
    if not ours or not theirs:
        named = draft.name if ours else target.name
        raise InvalidSetting(
            f"--draft-model {draft.name} cannot be compared with {target.name}: {named} has no tokenizer.json. A draft "
            "model must have the served model's tokenizer."
        )
    for id_, token in sorted(ours.items()):
        if id_ in theirs and theirs[id_] != token:
            raise InvalidSetting(
                f"--draft-model {draft.name} has another tokenizer than {target.name}: id {id_} is {theirs[id_]!r} "
                f"there, and {token!r} here. Take a smaller model of the same family."
            )
    if 2 * len(theirs.keys() & ours.keys()) < len(ours):
        raise InvalidSetting(
            f"--draft-model {draft.name} has {len(theirs)} tokens, and {target.name} {len(ours)}: these are other "
            "vocabularies. Take a smaller model of the same family."
        )


def _tokens(checkpoint: Checkpoint) -> dict[int, str]:
    """Return each id's token; empty if there is no tokenizer."""
    content = checkpoint.read_json("tokenizer.json")
    vocabulary: Any = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        found = {int(id_): str(token) for token, id_ in vocabulary.items()}
    else:  # Unigram: [piece, score]
        found = {id_: str(piece) for id_, (piece, *_) in enumerate(vocabulary)}
    added = content.get("added_tokens") or ()
    return found | {int(token["id"]): str(token["content"]) for token in added}
