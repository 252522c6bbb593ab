"""What turns an encoder's hidden states into vectors, as the files of sentence-transformers say.

`modules.json` lists the modules in order, each with a folder of its own: a transformer, then a pooling, then dense
layers and a normalisation where the model has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from space_model.checkpoint.checkpoint import read_object
from space_model.model_error import CheckpointNotFound, UnsupportedModel

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""In the order in which several are joined to one vector."""

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}


def activation(path: object, file: str) -> nn.Module:
    """Return the activation that a file names by its class, such as torch.nn.modules.activation.Tanh. Raises
    UnsupportedModel."""
    name = str(path)
    if not name.startswith("torch.") or (made := ACTIVATIONS.get(name.rpartition(".")[2])) is None:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{file} names the activation {name[:100]!r}; known are torch's {known}.")
    return made()


class Pooling(nn.Module):
    """One vector of each text's hidden states."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """hidden [S, N, D], of which text i has the first lengths[i] -> [S, modes · D]."""
        places = torch.arange(hidden.shape[1], device=hidden.device)
        mask = (places < lengths[:, None])[..., None]  # [S, N, 1]
        return torch.cat([self._pooled(mode, hidden, mask, lengths) for mode in self.modes], dim=-1)

    def _pooled(self, mode: str, hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        match mode:
            case "cls":
                return hidden[:, 0]
            case "lasttoken":
                return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
            case "max":
                return hidden.masked_fill(~mask, -torch.inf).amax(dim=1)
        weights = mask.to(hidden.dtype)
        if mode == "weightedmean":
            weights = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)[:, None]
        total = weights.sum(dim=1)  # [S, 1]
        return (hidden * weights).sum(dim=1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


class Dense(nn.Module):
    """A linear layer with an activation, on pooled vectors."""

    def __init__(self, weights: Mapping[str, Tensor], act: nn.Module) -> None:
        super().__init__()
        weight, bias = weights["linear.weight"], weights.get("linear.bias")
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            if bias is not None:
                self.linear.bias.copy_(bias)
        self.act = act

    def forward(self, vectors: Tensor) -> Tensor:
        """[S, in] -> [S, out]."""
        found: Tensor = self.act(self.linear(vectors))
        return found


class Normalize(nn.Module):
    """Vectors of length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """[S, D] -> [S, D]."""
        return nn.functional.normalize(vectors, dim=-1)


@dataclass(frozen=True)
class SentenceModules:
    """What comes behind the transformer."""

    pooling: Pooling
    after: nn.Sequential
    max_length: int | None  # ids of a text, as sentence_bert_config.json says; None: it does not

    @property
    def is_normalised(self) -> bool:
        """Return whether vectors have length 1."""
        return len(self.after) > 0 and isinstance(self.after[-1], Normalize)

    @classmethod
    def read(cls, folder: Path, size: int) -> SentenceModules:
        """Read the files of a folder; without modules.json it is the mean, as sentence-transformers has it. `size`: of
        the hidden states. Raises UnsupportedModel, CheckpointNotFound."""
        listed = read_list(folder / "modules.json")
        bert = folder / "sentence_bert_config.json"
        settings = read_object(bert) if bert.is_file() else {}
        length = settings.get("max_seq_length")
        pooling, after, width = Pooling(("mean",)), nn.Sequential(), size
        for entry in sorted(listed, key=lambda one: int(one.get("idx", 0))):
            kind = str(entry.get("type", "")).rpartition(".")[2]
            place = folder / str(entry.get("path", ""))
            match kind:
                case "Transformer":
                    if place.resolve() != folder.resolve():
                        raise UnsupportedModel(f"{folder} has its transformer in the folder {place.name}: name that.")
                case "Pooling":
                    pooling = _pooling(place)
                    width = size * len(pooling.modes)
                case "Dense":
                    dense = _dense(place, width)
                    after.append(dense)
                    width = dense.linear.out_features
                case "Normalize":
                    after.append(Normalize())
                case "Dropout":
                    pass
                case _:
                    raise UnsupportedModel(
                        f"modules.json of {folder.name} has a module of the kind {kind[:60]!r}; known are Transformer, "
                        "Pooling, Dense, Normalize and Dropout."
                    )
        return cls(pooling, after.eval(), length if isinstance(length, int) else None)


def read_list(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON list, or [] if there is no file. Raises CheckpointNotFound."""
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointNotFound(f"{file} cannot be read: {error}. Fetch it again.") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise CheckpointNotFound(f"{file} holds no list of objects. Fetch it again.")
    return found


def _pooling(folder: Path) -> Pooling:
    config = read_object(folder / "config.json")
    named = config.get("pooling_mode")
    if named is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    if unknown := [mode for mode in modes if mode not in POOLING_MODES]:
        raise UnsupportedModel(
            f"{folder.name}/config.json pools by {str(unknown[0])[:60]!r}; known are {', '.join(POOLING_MODES)}."
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModel(f"{folder.name}/config.json leaves prompts out of the pooling, which is not served.")
    return Pooling(modes)


def _dense(folder: Path, width: int) -> Dense:
    config = read_object(folder / "config.json")
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise UnsupportedModel(f"{folder.name}/config.json has a dense layer of a kind that is not served.")
    file = folder / "model.safetensors"
    if not file.is_file():
        raise CheckpointNotFound(f"{folder} has no model.safetensors; only safetensors are read.")
    weights = load_file(file)
    if (found := weights.get("linear.weight")) is None or found.shape[1] != width:
        shape = None if found is None else tuple(found.shape)
        raise UnsupportedModel(f"linear.weight of {file} has the shape {shape}; {width} inputs come to it.")
    return Dense(weights, activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"), file.name))
