"""An encoder by transformers' own classes: vectors of texts, or scores of pairs (a cross-encoder), in float32."""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.encoder.sentence_modules import SentenceModules, activation
from space_model.loading.load import reading
from space_model.model_error import UnsupportedModel, malformed_is_unsupported

_log = logging.getLogger(__name__)

_OFFSET_POSITIONS = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "mpnet"}
)
"""Model types that number positions from the padding id + 1 on."""

_NEEDLESS = ("pooler.", "cls.", "lm_head.", "vocab_projector.", "vocab_transform.", "vocab_layer_norm.")
"""Parts of a checkpoint, or of transformers' class, on which hidden states do not depend."""


class TextIds(NamedTuple):
    """The ids of one text, or of two that are scored together."""

    ids: Sequence[int]
    type_ids: Sequence[int] = ()  # which of the two texts each id is of; empty: all of the first


@dataclass(frozen=True)
class EncoderFacts:
    """What there is to know of an encoder."""

    hash: str  # of its configuration and its weights' headers
    tokenizer_hash: str
    window: int  # most ids of a text
    vocab_size: int
    num_types: int  # 0: it reads no type ids
    num_values: int  # of each text
    scores_pairs: bool  # a cross-encoder
    is_normalised: bool


class TextEncoder:
    """A loaded encoder. What it makes of a text differs by rounding alone with those beside it in a batch."""

    def __init__(
        self, model: PreTrainedModel, facts: EncoderFacts, pad_id: int, finish: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """`finish`: hidden states [S, N, D] or logits [S, V], and lengths [S] -> [S, num_values]."""
        self.facts = facts
        self._model, self._finish = model, finish
        self._pad_id = pad_id
        self._inputs = frozenset(inspect.signature(model.forward).parameters)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self._model.device
        return device

    @torch.inference_mode()
    def encode(self, texts: Sequence[TextIds]) -> Tensor:
        """Return [texts, num_values] float32 on the CPU."""
        longest = max(len(text.ids) for text in texts)
        lengths = torch.tensor([len(text.ids) for text in texts])
        ids = torch.tensor([_padded(text.ids, longest, self._pad_id) for text in texts])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        named = {"input_ids": ids, "attention_mask": mask}
        if self.facts.num_types and any(text.type_ids for text in texts):
            named["token_type_ids"] = torch.tensor([_padded(text.type_ids, longest, 0) for text in texts])
        more: dict[str, Any] = {"use_cache": False} if "use_cache" in self._inputs else {}
        found = self._model(**{name: one.to(self.device) for name, one in named.items()}, **more)
        states = found.logits if self.facts.scores_pairs else found.last_hidden_state
        return self._finish(states, lengths.to(self.device)).float().cpu()


def _padded(ids: Sequence[int], length: int, pad_id: int) -> list[int]:
    return [*ids, *[pad_id] * (length - len(ids))]


def load_encoder(checkpoint: Checkpoint, device: torch.device | None = None) -> TextEncoder:
    """Load an encoder or a cross-encoder. Raises ModelError."""
    name = checkpoint.name
    if checkpoint.gguf is not None:
        raise UnsupportedModel(f"{name} is a GGUF file; an encoder is read from a folder with safetensors.")
    kinds = checkpoint.config.get("architectures") or ["BertModel"]
    scores = str(kinds[0]).endswith("ForSequenceClassification")
    with malformed_is_unsupported():
        with reading(checkpoint):
            model = _model(checkpoint, AutoModelForSequenceClassification if scores else AutoModel)
        model = model.to(device or torch.device("cpu")).eval()
        return _classifier(checkpoint, model) if scores else _embedder(checkpoint, model)


def _model(checkpoint: Checkpoint, kind: Any) -> PreTrainedModel:
    """Return the transformer, every one of whose tensors was read."""
    model, found = kind.from_pretrained(
        checkpoint.folder,
        dtype=torch.float32,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    for what, names in (
        ("lacks", found["missing_keys"]),
        ("has another shape of", [one[0] for one in found["mismatched_keys"]]),
    ):
        if missing := sorted(one for one in names if not str(one).startswith(_NEEDLESS)):
            raise UnsupportedModel(f"{checkpoint.name} {what} {missing[0]} ({len(missing)} tensors in all).")
    if unused := sorted(one for one in found["unexpected_keys"] if not _is_needless(str(one))):
        raise UnsupportedModel(
            f"{checkpoint.name} has {unused[0]} ({len(unused)} tensors in all), which {type(model).__name__} of "
            "transformers does not read: what it makes of a text would be wrong."
        )
    loaded: PreTrainedModel = model
    return loaded


def _is_needless(tensor: str) -> bool:
    return tensor.endswith("position_ids") or any(tensor.startswith(one) or f".{one}" in tensor for one in _NEEDLESS)


def _embedder(checkpoint: Checkpoint, model: PreTrainedModel) -> TextEncoder:
    modules = SentenceModules.read(checkpoint.folder, int(model.config.hidden_size))
    modules.after.to(model.device)
    num_values = int(modules.after(torch.zeros(1, _width(modules, model), device=model.device)).shape[1])
    facts = _facts(
        checkpoint, model, modules.max_length, num_values, scores_pairs=False, is_normalised=modules.is_normalised
    )

    def finish(hidden: Tensor, lengths: Tensor) -> Tensor:
        found: Tensor = modules.after(modules.pooling(hidden, lengths))
        return found

    return TextEncoder(model, facts, _pad_id(model), finish)


def _width(modules: SentenceModules, model: PreTrainedModel) -> int:
    return int(model.config.hidden_size) * len(modules.pooling.modes)


def _classifier(checkpoint: Checkpoint, model: PreTrainedModel) -> TextEncoder:
    config = checkpoint.config
    own = config.get("sentence_transformers")
    act_name = own.get("activation_fn") if isinstance(own, dict) else None
    act_name = act_name or config.get("sbert_ce_default_activation_function")
    num_scores = int(model.config.num_labels)
    default: nn.Module = nn.Sigmoid() if num_scores == 1 else nn.Identity()
    act = default if act_name is None else activation(act_name, "config.json")
    facts = _facts(checkpoint, model, None, num_scores, scores_pairs=True, is_normalised=False)
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = _pad_id(model)  # decoders that classify find the last id before the padding by it

    def finish(logits: Tensor, lengths: Tensor) -> Tensor:
        found: Tensor = act(logits)
        return found

    return TextEncoder(model, facts, _pad_id(model), finish)


def _pad_id(model: PreTrainedModel) -> int:
    """Return an id for the places that are masked."""
    known = getattr(model.config, "pad_token_id", None)
    return known if isinstance(known, int) and 0 <= known < model.config.vocab_size else 0


def _facts(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    max_length: int | None,
    num_values: int,
    *,
    scores_pairs: bool,
    is_normalised: bool,
) -> EncoderFacts:
    config = model.config
    offset = _pad_id(model) + 1 if config.model_type in _OFFSET_POSITIONS else 0
    bounds = [max_length, checkpoint.read_json("tokenizer_config.json").get("model_max_length")]
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        bounds.append(positions - offset)
    known = [int(one) for one in bounds if isinstance(one, int | float) and math.isfinite(one) and 1 < one < 2**31]
    if not known:
        raise UnsupportedModel(f"No file of {checkpoint.name} says how long a text may be.")
    types = int(getattr(config, "type_vocab_size", 0) or 0)
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        types = 0
    _log.info("encoder=%s window=%d values=%d pairs=%s", checkpoint.name, min(known), num_values, scores_pairs)
    return EncoderFacts(
        hash=_hash(checkpoint),
        tokenizer_hash=checkpoint.tokenizer_hash(),
        window=min(known),
        vocab_size=int(config.vocab_size),
        num_types=types,
        num_values=num_values,
        scores_pairs=scores_pairs,
        is_normalised=is_normalised,
    )


def _hash(checkpoint: Checkpoint) -> str:
    """Hash what vectors depend on: configurations, and the headers of the weights."""
    digest = hashlib.sha256(checkpoint.model_hash().encode())
    for file in sorted(_small_files(checkpoint.folder)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _small_files(folder: Path) -> list[Path]:
    names = ("modules.json", "sentence_bert_config.json")
    return [*(folder / name for name in names if (folder / name).is_file()), *folder.glob("*_*/config.json")]
