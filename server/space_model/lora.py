"""Ordinary LoRA adapters of peft: they change the text. Many are held beside one base, and each row names its own.

    y[rows] += scale · B·(A·x[rows])        scale = lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA

All rows of a sequence have its LoRA: prompt, chain and masks; on mask rows the delta of a gated adapter is added, too.
Keys and values depend on it, so a LoRA is known by its content's hash (space_common.files.hash_lora).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import regex
import torch
from safetensors import SafetensorError, safe_open
from space_common.files import LORA_CONFIG, LORA_WEIGHTS, hash_lora
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from space_model.checkpoint.checkpoint import how_to_merge, read_object
from space_model.model_error import CheckpointNotFound, InvalidLora, UnsupportedModel
from space_model.networks.latent_heads import is_absorbed

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

_UNSERVED = {
    "use_dora": "it is a DoRA adapter, whose scale depends on the base's weights",
    "bias": "it changes biases",
    "lora_bias": "it has biases of its own",
    "modules_to_save": "it has whole modules of its own (modules_to_save)",
    "trainable_token_indices": "it has embeddings of its own (trainable_token_indices)",
    "target_parameters": "it changes parameters that are no linears, such as experts (target_parameters)",
    "layer_replication": "it repeats layers (layer_replication)",
    "alora_invocation_tokens": "it is an activated LoRA, which acts behind certain tokens only",
}
"""Fields of peft's config that change the computation otherwise than by a low rank, and what they mean."""

_SERVED = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora"),
    *("fan_in_fan_out", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "runtime_config"),
    *("qalora_group_size", "lora_ga_config", "ensure_weight_tying"),
}
"""Fields that are read, or do not change what a saved adapter computes."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights (or their beginnings) with which peft changes the base's weights, too."""


@dataclass(frozen=True)
class Lora:
    """One LoRA, in the base's dtype."""

    digest: str  # of its files
    pairs: Mapping[str, tuple[Tensor, Tensor]]  # path of a linear in the whole model -> a [rank, in], b [out, rank]
    scale: float = 1.0  # each linear's own is in its b

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(len(a) for a, _ in self.pairs.values())


@dataclass(frozen=True)
class LoraBase:
    """What a LoRA must fit."""

    dtype: torch.dtype
    linears: Mapping[str, tuple[int, int]]  # path of each linear of the decoder layers -> outputs, inputs

    @classmethod
    def of(cls, model: nn.Module, layers: str, dtype: torch.dtype) -> LoraBase:
        """Describe the linears of `model` in its decoder layers, which are at path `layers`."""
        found: dict[str, tuple[int, int]] = {}
        for path, module in model.named_modules():
            if isinstance(module, Conv1D):  # GPT-2's linear
                inputs, outputs = module.weight.shape
            else:
                outputs, inputs = getattr(module, "out_features", None), getattr(module, "in_features", None)
            is_linear = isinstance(outputs, int) and isinstance(inputs, int)
            if is_linear and path.startswith(f"{layers}.") and not is_absorbed(model, path):
                found[path] = outputs, inputs
        return cls(dtype, found)

    def path_of(self, name: str, folder: Path) -> str:
        """Return the linear that a LoRA of this or a wrapped model names. Raises InvalidLora."""
        inner = re.sub(r"^model\.language_model\.|^language_model\.model\.", "model.", name)
        for path in (name, inner):
            if path in self.linears:
                return path
        raise InvalidLora(
            f"{folder} changes {name}, which is no linear of its own in the decoder layers of this model. "
            f"{how_to_merge(folder)}"
        )


def read_lora(folder: Path, base: LoraBase) -> Lora:
    """Read a folder that peft saved. Raises InvalidLora, which says what to do."""
    try:
        config = read_object(folder / LORA_CONFIG)
    except (CheckpointNotFound, OSError) as error:
        raise InvalidLora(f"{folder / LORA_CONFIG} is no config of a LoRA: {error}") from error
    _check_config(folder, config)
    patterns, targets = _Patterns(folder, config), _Targets(folder, config)
    if not (folder / LORA_WEIGHTS).is_file():
        raise InvalidLora(f"{folder} has no {LORA_WEIGHTS}. Save the adapter again with peft, as safetensors.")
    try:
        digest = hash_lora(folder)
        with safe_open(folder / LORA_WEIGHTS, framework="pt") as found:
            tensors: dict[str, Tensor] = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidLora(f"{folder / LORA_WEIGHTS} cannot be read: {error}") from error
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(tensors):
        if name.endswith(_B) and name.removesuffix(_B) + _A in tensors:
            continue
        if not name.endswith(_A):
            what = "embeddings" if "lora_embedding" in name else "a tensor that is no A or B of a linear"
            raise InvalidLora(f"{folder} has {what} ({name}), which is not served. {how_to_merge(folder)}")
        path = name.removesuffix(_A).removeprefix(_PREFIX)
        b_name = name.removesuffix(_A) + _B
        if b_name not in tensors:
            raise InvalidLora(f"{folder} has {name} and lacks {b_name}. Save the adapter again.")
        linear = base.path_of(path, folder)
        if linear in pairs:
            raise InvalidLora(f"{folder} has two pairs for {linear}, by different names. Save the adapter again.")
        if not (targets.include(path) or targets.include(linear)):
            raise InvalidLora(
                f"{folder} has a pair for {path}, which its {LORA_CONFIG} leaves out ({targets.fields}): peft would "
                "ignore it. Fetch both files again, or save the adapter again."
            )
        pairs[linear] = _pair(folder, path, tensors[name], tensors[b_name], patterns, base)
    if not pairs:
        raise InvalidLora(f"{folder / LORA_WEIGHTS} is empty. Save the adapter again.")
    return Lora(digest, pairs)


_HIDDEN_SIDED = re.compile(r"\.(?:[qkvo]|gate|up|down)_proj$")
"""Linears that read or write the hidden state in every family that has them."""


def describe_lora(folder: Path, hidden_size: int) -> str:
    """Return rank and number of linears of a LoRA, without its base's weights. Raises InvalidLora as `read_lora` does
    for its config and names, and if its linears are not those of a base with this hidden size."""
    try:
        config = read_object(folder / LORA_CONFIG)
        _check_config(folder, config)
        _Patterns(folder, config)
        with safe_open(folder / LORA_WEIGHTS, framework="pt") as found:
            shapes = {name: found.get_slice(name).get_shape() for name in found.keys()}  # noqa: SIM118
    except (CheckpointNotFound, OSError, SafetensorError) as error:
        raise InvalidLora(f"{folder} is no LoRA of peft that can be read: {error}") from error
    names = list(shapes)
    if others := [name for name in names if not name.endswith((_A, _B))]:
        raise InvalidLora(f"{folder} has {min(others)}, which is not served. {how_to_merge(folder)}")
    for path in (name.removesuffix(_A) for name in names if name.endswith(_A)):
        inputs, outputs = shapes[path + _A][-1:], shapes.get(path + _B, [hidden_size])[:1]
        if _HIDDEN_SIDED.search(path) and hidden_size not in (*inputs, *outputs):
            raise InvalidLora(
                f"{folder} changes {path.removeprefix(_PREFIX)} from {inputs} to {outputs} values; the hidden size of "
                f"this model is {hidden_size}. Is it for this base?"
            )
    return f"rank {config.get('r')} on {len(names) // 2} linears"


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise InvalidLora for an adapter that is more, or other, than pairs of low rank."""
    if config.get("peft_type") != "LORA":
        raise InvalidLora(
            f"{folder} is an adapter of type {config.get('peft_type')!r}; LORA is served. {how_to_merge(folder)}"
        )
    for name, value in config.items():
        if value in (None, False, "none", [], {}) or name in _SERVED:
            continue
        reason = _UNSERVED.get(name, f"it has {name} = {value!r}, which is not known here")
        raise InvalidLora(f"{folder} is not served: {reason}. {how_to_merge(folder)}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InvalidLora(
            f"{folder} was begun with init_lora_weights = {start!r}, for which peft changes the base's weights, too. "
            "Convert it to an ordinary LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...). Or: "
            f"{how_to_merge(folder)}"
        )


class _Patterns:
    """Rank and alpha by linear, as peft has them: its name, or an expression for its end."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises InvalidLora, naming the field that is none of its kind."""
        where = f"the {LORA_CONFIG} of {folder}"
        self._ranks = [
            (key, _rank(f"rank_pattern in {where}", value)) for key, value in _patterns(where, config, "rank")
        ]
        self._alphas = [
            (key, _finite(f"alpha_pattern in {where}", value)) for key, value in _patterns(where, config, "alpha")
        ]
        self._rank = _rank(f"r in {where}", config.get("r"))
        self._alpha = _finite(f"lora_alpha in {where}", config.get("lora_alpha"))
        self._by_root = bool(config.get("use_rslora"))

    def of(self, path: str) -> tuple[int, float]:
        """Return rank and scale."""
        rank = int(_found(self._ranks, path, self._rank))
        alpha = _found(self._alphas, path, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._by_root else rank)


def _rank(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**31 or value != int(value):
        raise InvalidLora(f"{field} is {value!r}; a rank is a whole number above 0. Save the adapter again.")
    return int(value)


def _finite(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise InvalidLora(f"{field} is {value!r}, which is no number of a scale. Save the adapter again.")
    return float(value)


def _patterns(where: str, config: Mapping[str, Any], kind: str) -> list[tuple[Expression, object]]:
    """Return the expressions of rank_pattern or alpha_pattern, and what they give."""
    field = f"{kind}_pattern"
    found = config.get(field) or {}
    if not isinstance(found, dict):
        raise InvalidLora(f"{field} in {where} is {found!r}, which is no object. Save the adapter again.")
    return [(Expression(f"{field} in {where}", rf"(.*\.)?({key})$"), value) for key, value in found.items()]


_MOST_SECONDS = 1.0  # of one name, which takes microseconds


class Expression:
    """A regular expression of a LoRA's config, which comes from outside: the time that it takes is bounded."""

    def __init__(self, field: str, pattern: str) -> None:
        """Raises InvalidLora, naming the `field`, if it is none."""
        self._field, self._pattern = field, pattern
        try:
            re.compile(pattern)  # peft's
            self._compiled = regex.compile(pattern)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise InvalidLora(f"{field} has {pattern!r}, which is no regular expression: {error}.") from error

    def match(self, path: str, *, whole: bool = False) -> regex.Match[str] | None:
        """Match the beginning of a linear's name, or all of it. Raises InvalidLora if that takes too long."""
        try:
            find = self._compiled.fullmatch if whole else self._compiled.match
            return find(path, timeout=_MOST_SECONDS)
        except TimeoutError:
            raise InvalidLora(
                f"{self._field} has {self._pattern!r}, which takes more than {_MOST_SECONDS:g} s for {path}. Name the "
                "linears instead."
            ) from None


class _Targets:
    """Which linears a LoRA's config says that it changes, as peft reads it: by name or the end of a name, or by an
    expression for the whole name."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises InvalidLora, naming the field that is none of its kind."""
        where = f"the {LORA_CONFIG} of {folder}"
        self._named = _names(where, config, "target_modules")  # None: it does not say
        self._others = _names(where, config, "exclude_modules") or ()
        self._layers = self._layer_expressions(where, config)
        numbers = config.get("layers_to_transform")
        numbers = [numbers] if isinstance(numbers, int) else numbers or []
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise InvalidLora(f"layers_to_transform in {where} is {numbers!r}, which is no list of layers.")
        self._numbers = frozenset(numbers)
        names = ("target_modules", "exclude_modules", "layers_to_transform")
        self.fields = ", ".join(name for name in names if config.get(name))

    @staticmethod
    def _layer_expressions(where: str, config: Mapping[str, Any]) -> list[Expression]:
        lists = config.get("layers_pattern") or r"[^.]*"
        lists = [lists] if isinstance(lists, str) else lists
        if not isinstance(lists, list) or not all(isinstance(name, str) for name in lists):
            raise InvalidLora(f"layers_pattern in {where} is {lists!r}, which is no name of a list of layers.")
        return [Expression(f"layers_pattern in {where}", rf".*\.{name}\.(\d+)\.") for name in lists]

    def include(self, path: str) -> bool:
        """Return whether the config lets the LoRA change the linear at `path`; one that names none: any."""
        if _matches(self._others, path):
            return False
        if self._named is None:
            return True
        if not _matches(self._named, path):
            return False
        if not self._numbers or isinstance(self._named, Expression):
            return True
        found = next((match for layer in self._layers if (match := layer.match(path))), None)
        return found is not None and int(found[1]) in self._numbers


Names = Expression | tuple[str, ...]
"""Of modules: an expression for whole names, or names and ends of names."""


def _names(where: str, config: Mapping[str, Any], field: str) -> Names | None:
    found = config.get(field)
    if found in (None, [], "", "all-linear"):
        return None
    if isinstance(found, str):
        return Expression(f"{field} in {where}", found)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise InvalidLora(f"{field} in {where} is {found!r}, which is no list of names. Save the adapter again.")
    return tuple(found)


def _matches(names: Names, path: str) -> bool:
    if isinstance(names, Expression):
        return names.match(path, whole=True) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _found(patterns: Sequence[tuple[Expression, float]], path: str, otherwise: float) -> float:
    return next((value for expression, value in patterns if expression.match(path)), otherwise)


def _pair(folder: Path, path: str, a: Tensor, b: Tensor, patterns: _Patterns, base: LoraBase) -> tuple[Tensor, Tensor]:
    """Check a pair and return it in the base's dtype, with its scale in b."""
    rank, scale = patterns.of(path)
    outputs, inputs = base.linears[base.path_of(path, folder)]
    if a.shape != (rank, inputs) or b.shape != (outputs, rank):
        raise InvalidLora(
            f"{folder} has A {list(a.shape)} and B {list(b.shape)} for {path}; of rank {rank} they must be "
            f"[{rank}, {inputs}] and [{outputs}, {rank}]. Is it for this base?"
        )
    scaled = (a.float(), b.float() * scale)
    made = tuple(tensor.to(base.dtype) for tensor in scaled)
    if not all(bool(tensor.isfinite().all()) for tensor in made):
        raise InvalidLora(f"The pair for {path} in {folder} has values that are not finite in {base.dtype}.")
    return made[0], made[1]


def why_no_loras(device: torch.device, num_ranks: int) -> str:
    """Return why a model takes no LoRAs there; "": it does."""
    cure = "Merge the LoRA into its base (peft: merge_and_unload) and serve the result"
    if num_ranks > 1:
        return f"LoRAs are not shared among the processes of --tensor-parallel. {cure}, or leave --tensor-parallel out."
    if device.type != "cpu":
        return f"LoRAs are served on a CPU only. {cure}, or give --device cpu."
    return ""


class LoraNetwork(Protocol):
    """The part of a network that LoRAs need."""

    def add_lora(self, number: int, lora: Lora) -> None:
        """Let a LoRA act on the rows that name it by `number`. Raises UnsupportedModel where it cannot."""

    def remove_lora(self, number: int) -> None:
        """Drop a LoRA that no step under way uses."""


@dataclass(frozen=True)
class LoadedLora:
    """A LoRA that rows can name."""

    number: int
    name: str  # as given at start; "": loaded later
    rank: int


class LoadedLoras:
    """The LoRAs of one model, by the hash of their content."""

    def __init__(self, network: LoraNetwork, base: LoraBase, *, why_none: str = "") -> None:
        """`why_none`: why the model takes none; "": it does."""
        self._network, self._base, self._why_none = network, base, why_none
        self._loaded: dict[str, LoadedLora] = {}

    @property
    def loaded(self) -> Mapping[str, LoadedLora]:
        """Return those that are loaded, by hash."""
        return self._loaded

    def load(self, folder: Path, *, digest: str = "", name: str = "") -> str:
        """Load a folder's LoRA, unless it is loaded already, and return the hash of its content. `digest`: that it must
        have. Raises InvalidLora."""
        if self._why_none:
            raise InvalidLora(self._why_none)
        if digest in self._loaded:
            return digest
        lora = read_lora(folder, self._base)
        if digest and lora.digest != digest:
            raise InvalidLora(f"The content of {folder} has changed since it was loaded: load it again.")
        if lora.digest not in self._loaded:
            taken = {one.number for one in self._loaded.values()}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            try:
                self._network.add_lora(number, lora)
            except UnsupportedModel as error:
                self._network.remove_lora(number)
                raise InvalidLora(f"{folder}: {error} {how_to_merge(folder)}") from error
            self._loaded[lora.digest] = LoadedLora(number, name, lora.rank)
        return lora.digest

    def unload(self, digest: str) -> None:
        """Drop a LoRA that no sequence uses any more; one that is not loaded is ignored."""
        found = self._loaded.pop(digest, None)
        if found is not None:
            self._network.remove_lora(found.number)

    def unload_unnamed(self) -> None:
        """Drop those that were loaded after the start."""
        for digest in [digest for digest, one in self._loaded.items() if not one.name]:
            self.unload(digest)
