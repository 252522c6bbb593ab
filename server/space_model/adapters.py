"""Gated LoRA: low-rank adapters and private mask embeddings that act on mask rows only (arXiv 2507.11851).

    y[mask rows] += (alpha / rank) · B·(A·x[mask rows])        x_0[mask rows] = mask embeddings

Chain and prefill rows use the untouched weights, so the output distribution is the base model's.

Two forms on disk, both safetensors: a single file (`gated_lora.safetensors`), or a PEFT folder (`adapter_config.json`,
`adapter_model.safetensors`) with `mask_embeddings.safetensors` beside them. A single file may hold A and B in eight
bits, each with a float32 scale per row; they are dequantised at load. A released adapter (released_adapters.py) is a
PEFT folder without mask embeddings: its masks read rows of the base's embedding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from space_common.files import is_contained, is_local_name
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_model.checkpoint.checkpoint import (
    PEFT_CONFIG,
    PEFT_MASKS,
    PEFT_WEIGHTS,
    Checkpoint,
    adapter_section,
    describe_peft,
    how_to_merge,
    read_object,
)
from space_model.checkpoint.space_section import SpaceSection
from space_model.geometry.forward_batch import GatedRows
from space_model.heads import BaseSpec, DraftHeadWeights, OutputHead, load_draft_head
from space_model.model_error import CheckpointNotFound, InvalidSpaceSection, UnsupportedModel
from space_model.model_facts import AdapterFacts, HeadFacts
from space_model.networks.latent_heads import is_absorbed
from space_model.recurrent_head import RecurrentHead, RecurrentHeadWeights, load_recurrent_head
from space_model.released_adapters import AdapterFormat, MaskInputs

FORMAT = "space-gated-lora-1"
INT8_FORMAT = "space-gated-lora-int8-1"
GATED_LORA_FILE = "gated_lora.safetensors"

_MASKS = "gated_lora.mask_embeddings"
_OURS = ("gated_lora.", ".a", ".b")  # prefix and suffixes of the names in a single file
_SCALE = ".scale"  # suffix of the scales of an eight-bit tensor, behind its own name
_PEFT = ("base_model.model.", ".lora_A.weight", ".lora_B.weight")
# fields of PEFT's config that change the computation, with their neutral value besides null
_PEFT_UNSERVED = {"use_dora": False, "fan_in_fan_out": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
_PEFT_UNSERVED |= {"modules_to_save": []}


@dataclass(frozen=True)
class GatedLora:
    """One adapter's LoRA pairs and mask embeddings."""

    mask_embeddings: Tensor  # [num_masks, hidden] input of the first decoder layer; no family scaling applies. With
    # mask_inputs [ids, hidden]: a mask at position p reads row p modulo ids; none until `embedded`
    pairs: Mapping[str, tuple[Tensor, Tensor]]  # path of a linear in the whole model -> a [rank, in], b [out, rank]
    scale: float  # alpha / rank
    mask_inputs: MaskInputs | None = None  # of a released adapter

    @property
    def num_masks(self) -> int:
        """Return the number of masks per group."""
        return len(self.mask_embeddings) if self.mask_inputs is None else self.mask_inputs.num_masks

    def inputs_of(self, run: GatedRows, positions: Tensor) -> Tensor:
        """Return which row of mask_embeddings each row of `run` reads: [rows] int64. positions [R]: of the step."""
        return run.masks if self.mask_inputs is None else positions[run.slice] % len(self.mask_embeddings)

    def embedded(self, model: PreTrainedModel, ids: Sequence[int], entry: Tensor) -> GatedLora:
        """Return this with the rows of `model`'s embedding that a released adapter's masks read; any other as it is.
        `entry` [ids, hidden]: what enters the first layer for `ids`. Raises UnsupportedModel for a family that changes
        embeddings by more than its embedding module does, and InvalidSpaceSection."""
        if self.mask_inputs is None:
            return self
        embed = model.get_input_embeddings()
        device = embed.weight.device
        if not torch.equal(embed(torch.tensor(ids, device=device)), entry):
            raise UnsupportedModel(
                f"Adapters of {self.mask_inputs.format} read embeddings as they are; models of type "
                f"{model.config.model_type!r} change them before their first layer."
            )
        chosen = self.mask_inputs.ids(model.config, len(embed.weight))
        return replace(self, mask_embeddings=embed(torch.tensor(chosen, device=device)).detach())

    @property
    def rank(self) -> int:
        """Return the rank of the pairs; 1 if there are none, only embeddings."""
        return next((len(a) for a, _ in self.pairs.values()), 1)

    @classmethod
    def load(cls, path: Path, base: BaseSpec, num_masks: int | None = None) -> GatedLora:
        """Read a single file or a PEFT folder. `num_masks`: keep the first so many masks; None: all. Raises
        InvalidSpaceSection naming the bad tensor."""
        scale, tensors, affixes = _read_peft(path) if path.is_dir() else _read_ours(path)
        masks = tensors.pop(_MASKS, None)
        if masks is None or masks.dim() != 2 or masks.shape[1] != base.hidden_size or not len(masks):
            shape = "is not there" if masks is None else f"has shape {tuple(masks.shape)}"
            raise InvalidSpaceSection(f"{_MASKS} of {path} {shape}; it must be [masks, {base.hidden_size}].")
        if num_masks is not None and num_masks > len(masks):
            raise InvalidSpaceSection(f"{path} has embeddings for {len(masks)} masks; {num_masks} are asked for.")
        pairs = _pairs(tensors, affixes, path)
        for name, tensor in {_MASKS: masks, **{n: t for n, pair in pairs.items() for t in pair}}.items():
            if not bool(tensor.isfinite().all()):
                raise InvalidSpaceSection(f"{name} in {path} has values that are not finite.")
        moved = {name: (base.place(a), base.place(b)) for name, (a, b) in pairs.items()}
        return cls(base.place(masks[:num_masks]), moved, scale)

    @classmethod
    def load_released(cls, folder: Path, base: BaseSpec, inputs: MaskInputs) -> GatedLora:
        """Read a released adapter's PEFT folder. Raises InvalidSpaceSection naming the bad tensor."""
        if (folder / PEFT_MASKS).is_file():
            raise InvalidSpaceSection(
                f"{folder} has {PEFT_MASKS}, so it is a gated adapter as spaceserve writes it, and none of "
                f"{inputs.format}: give the folder without the format."
            )
        scale, tensors = _read_lora(folder)
        bare = {name.removeprefix(_PEFT[0]): tensor for name, tensor in tensors.items()}  # some lack the prefix
        pairs = _pairs(bare, ("", *_PEFT[1:]), folder / PEFT_WEIGHTS)
        if not pairs:
            raise InvalidSpaceSection(f"{folder / PEFT_WEIGHTS} is empty.")
        for path, pair in pairs.items():
            if not all(bool(tensor.isfinite().all()) for tensor in pair):
                raise InvalidSpaceSection(f"The pair for {path} in {folder} has values that are not finite.")
        moved = {name: (base.place(a), base.place(b)) for name, (a, b) in pairs.items()}
        return cls(base.place(torch.empty(0, base.hidden_size)), moved, scale, inputs)

    def save(self, file: Path, *, int8: bool = False) -> None:
        """Write a single file. `int8`: A and B in eight bits, half the bytes of bfloat16; masks keep their dtype."""
        pairs = self._named(_OURS)
        if int8:
            pairs = {name: part for key, tensor in pairs.items() for name, part in _quantised(key, tensor).items()}
        alpha = self.scale * self.rank
        figures = {"rank": str(self.rank), "alpha": f"{alpha:.17g}", "num_masks": str(self.num_masks)}
        form = INT8_FORMAT if int8 else FORMAT
        save_file(_on_disk({_MASKS: self.mask_embeddings} | pairs), file, metadata={"format": form, **figures})

    def _named(self, affixes: tuple[str, str, str]) -> dict[str, Tensor]:
        before, after_a, after_b = affixes
        both = (((path, after_a, a), (path, after_b, b)) for path, (a, b) in self.pairs.items())
        return {f"{before}{path}{after}": tensor for pair in both for path, after, tensor in pair}

    def save_peft(self, folder: Path, *, base: str) -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` reads, plus the mask embeddings."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_on_disk(self._named(_PEFT)), folder / PEFT_WEIGHTS, metadata={"format": "pt"})
        save_file(_on_disk({_MASKS: self.mask_embeddings}), folder / PEFT_MASKS, metadata={"format": "pt"})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": self.rank}
        config |= {"lora_alpha": self.scale * self.rank, "target_modules": sorted(self.pairs)}
        config |= {"bias": "none", "inference_mode": True}
        (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")

    def check(self, model: nn.Module, layers: str) -> None:
        """Raises InvalidSpaceSection unless each pair fits a linear of the decoder layers, at path `layers`."""
        for path, (a, b) in self.pairs.items():
            try:
                linear = model.get_submodule(path) if path.startswith(f"{layers}.") else None
            except AttributeError:
                linear = None
            sizes = getattr(linear, "out_features", None), getattr(linear, "in_features", None)
            if linear is not None and is_absorbed(model, path):
                raise InvalidSpaceSection(
                    f"The adapter adapts {path}, by which latent attention (MLA) multiplies queries instead of the "
                    "keys of all tokens. Train it on other linears."
                )
            if linear is None or None in sizes:  # linears with packed weights have sizes, too
                raise InvalidSpaceSection(f"The adapter adapts {path}, which is no linear of the model's {layers}.")
            if (b.shape[0], a.shape[1]) != sizes:
                made = f"[{b.shape[0]}, {a.shape[1]}]; the model's weight is {list(sizes)}"
                raise InvalidSpaceSection(f"The adapter's pair for {path} makes {made}.")


def _read_ours(file: Path) -> tuple[float, dict[str, Tensor], tuple[str, str, str]]:
    tensors, metadata = _read(file)
    form = metadata.get("format")
    if form not in (FORMAT, INT8_FORMAT):
        raise InvalidSpaceSection(f"{file} has the format {form!r} in its header; {FORMAT} and {INT8_FORMAT} are read.")
    if form == INT8_FORMAT:
        tensors = _dequantised(tensors, file)
    try:
        rank, num_masks = int(metadata["rank"]), int(metadata["num_masks"])
        alpha = float(metadata["alpha"])
    except (KeyError, ValueError) as error:
        raise InvalidSpaceSection(f"The header of {file} needs numbers rank, alpha and num_masks: {error!r}") from error
    if rank < 1 or not math.isfinite(alpha):
        raise InvalidSpaceSection(f"The header of {file} says rank {rank} and alpha {alpha}: 1 or more, and finite.")
    if _MASKS in tensors and len(tensors[_MASKS]) != num_masks:
        raise InvalidSpaceSection(f"{_MASKS} of {file} has {len(tensors[_MASKS])} rows; its header says {num_masks}.")
    wrong = [n for n, t in sorted(tensors.items()) if n.endswith(_OURS[1]) and t.shape[:1] != (rank,)]
    if wrong:
        shape = tuple(tensors[wrong[0]].shape)
        raise InvalidSpaceSection(f"{wrong[0]} in {file} has shape {shape}; its header says rank {rank}.")
    return alpha / rank, tensors, _OURS


def _quantised(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the int8 values of `tensor` [rows, columns] and their float32 scales [rows], by name."""
    values = tensor.detach().float()
    scale = values.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return {name: (values / scale[:, None]).round().to(torch.int8), name + _SCALE: scale}


def _dequantised(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return `tensors` of an eight-bit file with A and B in float32. Raises InvalidSpaceSection naming the bad one."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(_SCALE)}
    unknown = sorted(tensors.keys() - found.keys() - {name + _SCALE for name in found})
    if unknown:
        raise InvalidSpaceSection(f"{file} has {unknown[0]}, the scales of no tensor in it.")
    for name, tensor in found.items():
        if name == _MASKS:
            continue
        scale = tensors.get(name + _SCALE)
        if tensor.dtype != torch.int8 or tensor.dim() != 2 or scale is None or scale.shape != tensor.shape[:1]:
            shape = None if scale is None else tuple(scale.shape)
            raise InvalidSpaceSection(
                f"{name} in {file} is {tensor.dtype} of shape {tuple(tensor.shape)} with scales of shape {shape}; "
                f"{INT8_FORMAT} has int8 and one scale for each row."
            )
        found[name] = tensor.float() * scale.float()[:, None]
    return found


def _read_peft(folder: Path) -> tuple[float, dict[str, Tensor], tuple[str, str, str]]:
    file = folder / PEFT_CONFIG
    if file.is_file() and not (folder / PEFT_MASKS).is_file():
        raise InvalidSpaceSection(
            f"{folder} is {describe_peft(folder)}, which changes the text of the model. An adapter here is a gated "
            f"one, which only drafts: it has {PEFT_MASKS} beside it, or is said to be one of Uno or I-DLM "
            f"(NAME=uno:{folder}, NAME=i-dlm:{folder}). {how_to_merge(folder)}"
        )
    scale, tensors = _read_lora(folder)
    masks, _ = _read(folder / PEFT_MASKS)
    return scale, tensors | masks, _PEFT


def _read_lora(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Return the scale and the tensors of a PEFT folder."""
    file = folder / PEFT_CONFIG
    try:
        config = read_object(file)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (CheckpointNotFound, OSError, OverflowError, ValueError, KeyError, TypeError) as error:
        raise InvalidSpaceSection(f"{file} is no config of a LoRA with r and lora_alpha: {error!r}") from error
    if config.get("peft_type") != "LORA" or rank < 1 or not math.isfinite(alpha):
        raise InvalidSpaceSection(f"{file} has peft_type {config.get('peft_type')!r} and r {rank}; LORA is read.")
    for name, neutral in _PEFT_UNSERVED.items():
        if config.get(name) not in (None, neutral):
            raise InvalidSpaceSection(f"{file} has {name} = {config[name]!r}, which is not served.")
    if not (folder / PEFT_WEIGHTS).is_file() and any(folder.glob("adapter_model*.bin")):
        raise InvalidSpaceSection(
            f"{folder} has its weights as adapter_model.bin, which can run code when it is opened. Save it again with "
            f"peft as {PEFT_WEIGHTS}."
        )
    tensors, _ = _read(folder / PEFT_WEIGHTS)
    for name, tensor in sorted(tensors.items()):
        if name.endswith(_PEFT[1]) and tensor.shape[:1] != (rank,):
            raise InvalidSpaceSection(f"{name} in {folder} has shape {tuple(tensor.shape)}; {file.name} says r {rank}.")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), tensors


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not file.is_file():
        raise InvalidSpaceSection(f"There is no adapter file {file}.")
    try:
        with safe_open(file, framework="pt") as found:
            return {name: found.get_tensor(name) for name in found.keys()}, found.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise InvalidSpaceSection(f"{file} is no safetensors file: {error}") from error


def _pairs(tensors: dict[str, Tensor], affixes: tuple[str, str, str], file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the (a, b) pair of each adapted linear, by the linear's path."""
    before, after_a, after_b = affixes
    unknown = [name for name in tensors if not (name.startswith(before) and name.endswith((after_a, after_b)))]
    if unknown:
        raise InvalidSpaceSection(f"{file} has a tensor {min(unknown)}, which is no part of a gated LoRA.")
    pairs = {}
    for name in sorted(tensors):
        is_a = name.endswith(after_a)
        path = name[len(before) : -len(after_a if is_a else after_b)]
        other = before + path + (after_b if is_a else after_a)
        if other not in tensors:
            raise InvalidSpaceSection(f"{file} has {name} and lacks {other}.")
        a, b = tensors[before + path + after_a], tensors[before + path + after_b]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not len(a):
            raise InvalidSpaceSection(
                f"The pair for {path} in {file} has shapes {tuple(a.shape)} and {tuple(b.shape)}; "
                "a is [rank, in] and b [out, rank]."
            )
        pairs[path] = (a, b)
    if len({len(a) for a, _ in pairs.values()}) > 1:
        raise InvalidSpaceSection(f"The pairs of {file} have several ranks; one is read.")
    return pairs


def _on_disk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Drafting:
    """All that drafts for one base model: the heads of the checkpoint's own masks, and the loaded adapters."""

    draft_head: DraftHeadWeights | None = None
    recurrent_head: RecurrentHeadWeights | None = None
    adapters: tuple[Adapter, ...] = ()

    def each(self, change: Callable[[Adapter], Adapter]) -> Drafting:
        """Return this with each adapter changed."""
        return replace(self, adapters=tuple(map(change, self.adapters)))

    def recurrent_heads(self, whole: OutputHead, **form: Any) -> dict[int | None, RecurrentHead]:
        """Return the recurrent heads by the adapter's number (None: the checkpoint's own). Arguments: as RecurrentHead
        takes them."""
        weights = {None: self.recurrent_head} | {
            number: adapter.recurrent_head for number, adapter in enumerate(self.adapters)
        }
        return {number: RecurrentHead(one, whole, **form) for number, one in weights.items() if one is not None}


OWN = ""  # the name of the checkpoint's own adapter, for requests that name none


@dataclass(frozen=True)
class Adapter:
    """A gated adapter for one base model. It only drafts: the output distribution stays the base model's."""

    name: str  # as requests ask for it
    gated: GatedLora
    draft_head: DraftHeadWeights | None
    acceptance: tuple[float, ...] = ()  # as declared in its `space` section
    recurrent_head: RecurrentHeadWeights | None = None

    @property
    def facts(self) -> AdapterFacts:
        inputs = self.gated.mask_inputs
        form = AdapterFormat.SPACE if inputs is None else inputs.format
        return AdapterFacts(
            self.name,
            self.gated.num_masks,
            self.draft_head is not None,
            self.acceptance,
            str(form),
            HeadFacts.of(self.recurrent_head),
        )

    def embedded(self, model: PreTrainedModel, ids: Sequence[int], entry: Tensor) -> Adapter:
        """Return this with the inputs of its masks (GatedLora.embedded); errors name the adapter."""
        with self._named_in_errors():
            return replace(self, gated=self.gated.embedded(model, ids, entry))

    def check(self, model: nn.Module, layers: str) -> None:
        """Check that the pairs fit (GatedLora.check); errors name the adapter."""
        with self._named_in_errors():
            self.gated.check(model, layers)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except (InvalidSpaceSection, UnsupportedModel) as error:
            raise type(error)(f"Adapter {self.name}: {error}" if self.name else str(error)) from error

    @classmethod
    def read(cls, name: str, folder: Path, section: SpaceSection, base: BaseSpec) -> Adapter:
        """Load what `section` declares from `folder`. Raises InvalidSpaceSection."""
        if section.adapter is None:
            raise InvalidSpaceSection(f'{folder} declares no "adapter" in the space section of its config.json.')
        file = folder / section.adapter
        if not is_local_name(section.adapter) or not is_contained(file, folder):
            raise InvalidSpaceSection(f"The adapter {section.adapter} is not in {folder}.")
        if section.mask_inputs is None:
            gated = GatedLora.load(file, base, section.num_masks)
        else:
            gated = GatedLora.load_released(file, base, section.mask_inputs)
        head = None if section.draft_head is None else load_draft_head(folder, section.draft_head, base)
        recurrent = section.recurrent_head
        recurrent_head = None if recurrent is None else load_recurrent_head(folder, recurrent, base)
        return cls(name, gated, head, section.acceptance, recurrent_head)

    @classmethod
    def open(cls, name: str, path: str | Path, checkpoint: Checkpoint, vocab_size: int, base: BaseSpec) -> Adapter:
        """Load a folder's adapter, for `checkpoint`: a gated checkpoint with or without base weights, or PEFT's."""
        folder, config = adapter_section(path)
        section = SpaceSection.parse(config, mask_ids=None, num_masks=None, vocab_size=vocab_size)
        section.check_base(checkpoint.name, checkpoint.weights_sha256)
        return cls.read(name, folder, section, base)
