"""The files of EAGLE heads: config.json and tensors as EAGLE, SpecForge and `speculators` publish them.

    generation    read of the model                    known by                    tensors of the layer
    EAGLE-3       hidden states of three layers        fc [hidden, 3·the model's]  midlayer.… or layers.0.…
    EAGLE-1, -2   the last hidden state, after norm    fc [hidden, 2·hidden]       layers.0.…

EAGLE-3's three are numbered in two ways. `eagle_aux_hidden_state_layer_ids` at the top of config.json, as in vLLM and
`speculators`, names layers whose inputs are read. Within `eagle_config`, as in SGLang and ModelOpt, it names layers
whose outputs are read, so one less. Without either they are the inputs of the layers 2, L/2 and L-3 of L.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig

from space_model.checkpoint.checkpoint import Fetch, folder_of, read_object
from space_model.convert.source import SourceWeights
from space_model.model_error import CheckpointNotFound, InvalidSetting

FLAG = "--draft-head"

_ELSEWHERE = re.compile(r"t2d|.*rotary_emb\.inv_freq|verifier(_lm_head|_norm)?\..*")
"""Tensors of training: which ids of the model are drafted, and the model's own."""

_LAYER = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
]
_LAYER_MAY = [f"self_attn.{name}_proj.bias" for name in "qkvo"] + ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]


class ModelSizes(NamedTuple):
    """Of a model that is drafted for."""

    name: str
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class EagleFiles:
    """An EAGLE head on disk. Tensors of its layer are named without a prefix, such as self_attn.q_proj.weight."""

    name: str  # as the user named it
    folder: Path
    layer: LlamaConfig  # of its decoder layer
    norm_before_residual: bool  # the layer's sum begins with the normed state
    layers: tuple[int, ...] | None  # whose inputs it reads, as its config.json says; None: it does not say
    draft_vocab_size: int | None  # None: it drafts any id that it reads
    verifier: str | None  # the model that it was made for, as its config.json names it
    weights: SourceWeights
    names: Mapping[str, str]  # of a tensor: its name in the files

    @classmethod
    def open(cls, path: str, fetch: Fetch) -> EagleFiles:
        """Open a folder or a hub id (OWNER/NAME, which `fetch` downloads). Raises ModelError for anything that is no
        EAGLE head, or one of a kind that is not served."""
        folder = folder_of(path, fetch)
        if not (folder / "config.json").is_file():
            raise CheckpointNotFound(f"{folder} has no config.json; give the folder of an EAGLE head.")
        config = read_object(folder / "config.json")
        kind = config.get("speculators_model_type")
        if kind not in (None, "eagle3"):
            raise InvalidSetting(f"{FLAG} {path}: speculators' {kind} is not served. Take an eagle3 head.")
        own = config if kind is None else config.get("transformer_layer_config")
        if not isinstance(own, Mapping):
            raise InvalidSetting(
                f"{FLAG} {path}: config.json has no transformer_layer_config, which describes its layer."
            )
        weights = SourceWeights.open(folder)
        names = {_short(name): name for name in weights.entries if not _ELSEWHERE.fullmatch(name)}
        if "fc.weight" not in names:
            raise InvalidSetting(
                f"{FLAG} {path} has no tensor fc.weight, so it is no EAGLE head. A whole model drafts by "
                f"--draft-model {path}."
            )
        verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
        found = cls(
            path,
            folder,
            _layer_config(own, path),
            bool(config.get("norm_before_residual", kind is not None)),
            _tapped(config),
            config.get("draft_vocab_size"),
            verifier,
            weights,
            names,
        )
        found._check()
        return found

    @property
    def generation(self) -> int:
        """Return 3, or 1 for EAGLE-1 and EAGLE-2, which differ in how their drafts were verified."""
        return 3 if "hidden_norm.weight" in self.names else 1

    @property
    def hidden_size(self) -> int:
        """Return the numbers of its own hidden state."""
        return int(self.layer.hidden_size)

    @property
    def state_size(self) -> int:
        """Return the numbers of the model's hidden state that it was made for."""
        inputs = self.shape("fc.weight")[1]
        return inputs // 3 if self.generation == 3 else inputs - self.hidden_size

    @property
    def head_dim(self) -> int:
        """Return the size of its attention's heads."""
        return int(getattr(self.layer, "head_dim", None) or self.hidden_size // self.layer.num_attention_heads)

    @property
    def num_parameters(self) -> int:
        """Return the numbers in its weights."""
        return sum(torch.Size(self.shape(name)).numel() for name in self.names if name != "d2t")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.weights.entries[self.names[name]].shape

    def read(self, name: str) -> Tensor | None:
        """Return a tensor; None if there is none."""
        return self.weights.read(self.names[name]) if name in self.names else None

    def tapped(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers, of a model of so many, whose inputs it reads; `num_layers` for the last one's output.
        Raises InvalidSetting."""
        if self.generation != 3:
            return ()
        found = self.layers or (2, num_layers // 2, num_layers - 3)
        if len(found) != 3 or not all(0 <= number <= num_layers for number in found):
            raise InvalidSetting(
                f"{FLAG} {self.name} reads the inputs of the layers {', '.join(map(str, found))}; the model has "
                f"{num_layers} layers, and an EAGLE-3 head reads three. Take the model that it was made for."
            )
        return found

    def draft_ids(self, vocab_size: int) -> Tensor | None:
        """Return the ids that it drafts [D] int64, of a vocabulary of `vocab_size`; None: all. Raises
        InvalidSetting."""
        offsets = self.read("d2t")
        if offsets is None:
            if self.draft_vocab_size not in (None, vocab_size):
                raise InvalidSetting(
                    f"{FLAG} {self.name} drafts {self.draft_vocab_size} of the ids, and has no tensor d2t that says "
                    "which. Fetch the whole checkpoint."
                )
            return None
        ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < len(ids):
            raise InvalidSetting(
                f"d2t of {FLAG} {self.name} does not name {len(ids)} different ids of a vocabulary of {vocab_size}: it "
                "is of another model's vocabulary."
            )
        return ids

    def check(self, model: ModelSizes) -> None:
        """Check that it was made for a model of these sizes. Raises InvalidSetting."""
        made = "" if self.verifier is None else f" It was made for {self.verifier}."
        about, size = f"{FLAG} {self.name}", self.hidden_size
        if self.state_size != model.hidden_size:
            raise InvalidSetting(
                f"{about} reads hidden states of {self.state_size} numbers, and those of {model.name} have "
                f"{model.hidden_size}.{made}"
            )
        if int(self.layer.vocab_size) != model.vocab_size:
            raise InvalidSetting(
                f"{about} is for a vocabulary of {self.layer.vocab_size} ids, and {model.name} has {model.vocab_size}."
                + made
            )
        own = [one for one in ("embed_tokens", "lm_head") if f"{one}.weight" in self.names and self.generation == 3]
        if size != model.hidden_size and len(own) < 2:
            raise InvalidSetting(
                f"{about} has states of {size} numbers, and no embedding and head of its own for them: those of "
                f"{model.name} have {model.hidden_size}.{made}"
            )
        drafted = self.draft_ids(model.vocab_size)
        num_drafted = model.vocab_size if drafted is None else len(drafted)
        wanted = {"embed_tokens.weight": (model.vocab_size, size), "lm_head.weight": (num_drafted, size)}
        wanted["fc.weight"] = (size, 3 * self.state_size if self.generation == 3 else size + self.state_size)
        if drafted is not None and "lm_head.weight" not in self.names:
            raise InvalidSetting(f"{about} drafts {num_drafted} of the ids, and has no lm_head of so many.")
        for name, shape in wanted.items():
            if name in self.names and self.shape(name) != shape:
                raise InvalidSetting(
                    f"{name} of {about} has the shape {self.shape(name)}; for {model.name} it is {shape}.{made}"
                )

    def _check(self) -> None:
        """Refuse what is not computed."""
        if self.layer.num_hidden_layers != 1:
            raise InvalidSetting(
                f"{FLAG} {self.name} has {self.layer.num_hidden_layers} decoder layers; heads of one are served."
            )
        if self.layer.hidden_act != "silu":
            raise InvalidSetting(f"{FLAG} {self.name}: its activation is {self.layer.hidden_act}; silu is served.")
        wanted = {*_LAYER, "fc.weight"}
        wanted |= {"norm.weight", "hidden_norm.weight", "input_layernorm.weight"} if self.generation == 3 else set()
        may = {*_LAYER_MAY, "fc.bias", "embed_tokens.weight", "lm_head.weight", "d2t"}
        if missing := sorted(wanted - self.names.keys()):
            raise InvalidSetting(f"{FLAG} {self.name} has no tensor {missing[0]}. Fetch the whole checkpoint.")
        if unknown := sorted(self.names.keys() - wanted - may):
            raise InvalidSetting(
                f"{FLAG} {self.name} has a tensor {self.names[unknown[0]]}, which an EAGLE-{self.generation} head as "
                "served has not."
            )


def _short(name: str) -> str:
    return re.sub(r"^(model\.)?(midlayer\.|layers\.0\.)?", "", name)


def _tapped(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    if inputs := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(map(int, inputs))
    outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(number) + 1 for number in outputs) if outputs else None


def _layer_config(fields: Mapping[str, Any], name: str) -> LlamaConfig:
    """Return the config of the layer, which is Llama's whatever model it was made for."""
    own = {key: value for key, value in fields.items() if key not in ("model_type", "architectures", "layer_types")}
    try:
        return LlamaConfig(**own)
    except (TypeError, ValueError) as error:
        raise InvalidSetting(f"{FLAG} {name}: its config.json does not describe a layer: {error}") from error
