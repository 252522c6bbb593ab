"""Loads a checkpoint as a whole transformers model: its weights streamed to the device, dequantised, packed, or as fp8.

A quantised checkpoint's weights are dequantised when they are read, or kept packed for a library that takes them so. A
warning says what holding the weights dequantised costs.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from space_kernels.fp8 import Fp8
from space_kernels.linear.cuda_linear import Fp8Linear
from space_kernels.linear.group_weights import input_order_of
from space_kernels.linear.row_table import RowTable
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from space_model.checkpoint.checkpoint import Checkpoint, has_experts
from space_model.checkpoint.family import key_mapping, name_base
from space_model.checkpoint.quantized_formats import QuantizedFormat, read_format
from space_model.checkpoint.stored_weight import (
    FUSED,
    PANEL,
    StoredExperts,
    StoredPart,
    StoredWeight,
    is_expert,
    missing_of_experts,
    odd_expert,
    split_mixtures,
    take_mixtures,
)
from space_model.checkpoint.translated_weights import TranslatedWeights
from space_model.checkpoint.unused_tensors import refuse_missing
from space_model.checkpoint.weight_files import JoinedRows, WeightFiles, WeightStream, let_go, send
from space_model.loading.load_progress import show_load_progress_on_terminals
from space_model.loading.meta_tensors import MetaModel
from space_model.model_error import InvalidSetting, UnsupportedModel
from space_model.networks.llama_parts import FAMILIES
from space_model.stored_weights import attach, attach_experts, check_rows, give, look_up_in_file

_LINEARS = ("_proj", "lm_head", ".fc1", ".fc2", ".dense", ".query_key_value", ".dense_h_to_4h", ".dense_4h_to_h")
"""Ends of the paths of linears that may stay packed on a CPU."""


def _may_join(weights: Sequence[StoredPart | None]) -> bool:
    """Return whether a compact network can fuse these."""
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights) or any(weight.out_features % PANEL for weight in found):
        return False
    if len({weight.form for weight in found}) > 1:
        return False
    try:
        input_order_of(found)
    except ValueError:
        return False
    return True


class QuantizedWeights(WeightFiles):
    """The model's tensors, dequantised from the tensors of the files one at a time, on demand."""

    def __init__(self, files: WeightFiles, form: QuantizedFormat) -> None:
        super().__init__(files.name, files.opened, files.size)
        self.form = form
        self._parts: dict[str, frozenset[str]] = {}  # path of a module with a quantised weight -> its tensors
        self._read: set[str] = set()  # tensors of the files that were used for weights
        aside: set[str] = set()
        found: dict[str, set[str]] = {}
        marked: set[str] = set()
        for name in files.names:
            path, part = self._split(name)
            found.setdefault(path, set()).add(part)
            if part in form.markers:
                marked.add(path)
            if part in form.parts:
                aside.add(name)
        if not marked:
            raise UnsupportedModel(
                f"The config.json of {self.name} says that its weights are quantised as {form.name}, and none of them "
                "is. Remove quantization_config from it if they are plain numbers."
            )
        self._parts = {path: frozenset(found[path]) for path in marked}
        self._aside = aside
        self._names = sorted((set(files.names) - aside) | {path + form.weight for path in marked})

    def _split(self, name: str) -> tuple[str, str]:
        """Split a name into the module's path and the suffix."""
        for part in self.form.parts:
            if name.endswith(self.form.before_part + part):
                return name[: -len(part) - 1], part
        path, _, part = name.rpartition(".")
        return path, part

    def __contains__(self, name: object) -> bool:
        return name in self._names or super().__contains__(name)

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def knows_shapes(self) -> bool:
        """Whether the shape of a tensor is known without reading it."""
        return False

    @property
    def num_quantized(self) -> int:
        """Return the number of dequantised weights."""
        return len(self._parts)

    def unused(self) -> list[str]:
        """After all tensors were read, return the parts of quantised weights that no weight used."""
        return sorted(name for name in self._aside - self._read if self._split(name)[1] not in self.form.needless)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape; a quantised one may be dequantised for it."""
        if not self.is_quantised(name):
            return super().shape(name)
        return self._known_shape(name) or tuple(self.whole(name).shape)

    def _known_shape(self, name: str) -> tuple[int, ...] | None:
        """Return a quantised tensor's shape by the header; None: only by dequantising it."""
        path = name.removesuffix(self.form.weight)
        with self._weight(path):
            return self.form.shape(lambda part: super(QuantizedWeights, self).shape(self._name_of(path, part)))

    def _name_of(self, path: str, part: str) -> str:
        return f"{path}{self.form.before_part}{part}"

    def whole(self, name: str) -> Tensor:
        """Return a tensor; quantised ones become float32."""
        if not self.is_quantised(name):
            return super().whole(name)
        path = name.removesuffix(self.form.weight)
        with self._weight(path):
            return self.form.dense(lambda part: self._part(path, part), self._parts[path])

    def _part(self, path: str, part: str) -> Tensor:
        name = self._name_of(path, part)
        self._read.add(name)
        return super().whole(name)

    def is_packed(self, name: str) -> bool:
        return self.is_quantised(name) and self._known_shape(name) is not None

    def read_into(self, name: str, place: Tensor) -> None:
        path, read = name.removesuffix(self.form.weight), list[Tensor]()

        def note(part: str) -> Tensor:
            read.append(self._part(path, part))
            return read[-1]

        with self._weight(path):
            self.form.write(note, place)
        let_go(*read)

    @contextmanager
    def _weight(self, path: str) -> Iterator[None]:
        """Raise errors as those of the module at `path`."""
        try:
            yield
        except (IndexError, KeyError, RuntimeError, ValueError) as error:
            raise UnsupportedModel(f"{path} of {self.name} is no {self.form.name} weight: {error}") from error

    def stored(self, *, fuses: bool) -> dict[str, StoredWeight]:
        kept: dict[str, StoredPart] = {}
        for path, parts in self._parts.items():
            if not (path.endswith(_LINEARS) or is_expert(f"{path}.weight")):
                continue
            with self._weight(path):
                weight = self.form.packed(path, lambda part, path=path: self._part(path, part), parts)  # type: ignore[misc]
            if weight is not None:
                kept[path] = weight
        for path in [*kept] if fuses else []:
            module, _, linear = path.rpartition(".")
            group = next((group for group in FUSED if linear in group), ())
            fused = [f"{module}.{one}" for one in group]
            if fused and not _may_join([kept.get(one) for one in fused]):
                kept.pop(path)
        found: dict[str, StoredWeight] = {f"{path}.weight": [weight] for path, weight in kept.items()}

        def may_join(gate: str, up: str) -> bool:
            return _may_join([found[gate][0], found[up][0]])

        lost = split_mixtures(found, self.names, may_join)
        return {name: weight for name, weight in found.items() if name not in lost}

    def stored_mixtures(self) -> dict[str, StoredExperts]:
        stacked: dict[str, dict[str, Sequence[StoredWeight]]] = {}
        for path in sorted(self._parts):
            mixture, _, linear = path.rpartition(".")
            with self._weight(path):
                each = self.form.packed_experts(path, lambda part, path=path: self._part(path, part))  # type: ignore[misc]
            stacked.setdefault(mixture, {}).update({f"{linear}{role}": weights for role, weights in each.items()})
        gate, up, down = "gate_up_proj.gate", "gate_up_proj.up", "down_proj"
        whole = {
            path: StoredExperts(found[gate], found[up], found[down], is_transposed=True)
            for path, found in stacked.items()
            if found.keys() >= {gate, up, down}
        }
        return {path: found for path, found in whole.items() if found.gate[0][0].out_features % PANEL == 0}

    def rows(self, name: str, part: slice) -> Tensor:
        """Return some rows of a tensor; of a quantised one, all are read."""
        return self.whole(name)[part].clone() if self.is_quantised(name) else super().rows(name, part)

    def columns(self, name: str, part: slice) -> Tensor:
        """Return some columns of a matrix; of a quantised one, all are read."""
        return self.whole(name)[:, part].clone() if self.is_quantised(name) else super().columns(name, part)

    def is_quantised(self, name: str) -> bool:
        return name.endswith(self.form.weight) and name.removesuffix(self.form.weight) in self._parts


@contextmanager
def open_weights(checkpoint: Checkpoint) -> Iterator[WeightFiles]:
    """Open the tensors of the checkpoint's model, in whatever format they are stored."""
    if checkpoint.gguf is not None:
        from space_model.checkpoint.gguf_weights import open_gguf  # imported late: other formats need no gguf package

        with open_gguf(checkpoint, checkpoint.gguf) as found:
            yield found
        return
    form = read_format(checkpoint.config, checkpoint.name)
    with WeightFiles.open(checkpoint) as files:
        plain = files if form is None else QuantizedWeights(files, form)
        yield plain if checkpoint.translation is None else TranslatedWeights(plain, checkpoint.translation)


def has_kernels(form: QuantizedFormat) -> bool:
    """Return whether the library whose kernels multiply by packed weights is installed."""
    return bool(form.library) and importlib.util.find_spec(form.library) is not None


_log = logging.getLogger(__name__)

Loaded = tuple[PreTrainedModel, dict[str, Any]]  # a model, and transformers' report of missing and unexpected weights


def stays_packed(form: QuantizedFormat, device: torch.device) -> bool:
    """Return whether weights stay packed: on a GPU, if the library with the kernels is installed."""
    return device.type == "cuda" and has_kernels(form)


def read_packed(
    checkpoint: Checkpoint, config: PreTrainedConfig, form: QuantizedFormat, dtype: torch.dtype, device: torch.device
) -> Loaded | None:
    """Return the model with packed weights, loaded by transformers' quantizer; None if that is not possible."""
    if checkpoint.translation is not None:
        return None  # it would look for the tensors under their own names
    try:
        model, found = packed_class(config).from_pretrained(
            str(checkpoint.folder),
            config=config,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=key_mapping(checkpoint, config),
            ignore_mismatched_sizes=True,
        )
        ends = tuple(f".{part}" for part in form.needless)
        found["unexpected_keys"] = {name for name in found["unexpected_keys"] if not name.endswith(ends)}
    except (ImportError, RuntimeError, ValueError) as error:
        _log.warning("%s: %s cannot multiply by its %s weights: %s", checkpoint.name, form.library, form.name, error)
        return None
    head = getattr(model.get_output_embeddings(), "weight", None)
    if model.dtype is not dtype or not isinstance(head, Tensor) or not head.is_floating_point():
        what = f"wants {model.dtype} instead of {dtype}" if model.dtype is not dtype else "packs the output head"
        _log.warning("%s: %s %s", checkpoint.name, form.library, what)
        return None
    _log.info("%s: %s weights stay packed; %s multiplies by them", checkpoint.name, form.name, form.library)
    return model, found


def packed_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class of models with this config."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def log_dense(checkpoint: Checkpoint, files: WeightFiles, parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Log the cost of holding the checkpoint's quantised weights dequantised, if it has any."""
    held = sum(parameter.nbytes for parameter in parameters) / 2**20
    form = str(dtype).removeprefix("torch.")
    if isinstance(files, QuantizedWeights):
        ways = [f"on a GPU with {files.form.library} installed"] * bool(files.form.library)
        ways += ["on a CPU with --weights packed"] * (checkpoint.kept_as is not None)
        packed = f". They stay packed {', and '.join(ways)}" if ways else ""
        _log.warning(
            "%s: %d %s weights are held as plain %s: %.1f MiB in memory for %.1f MiB on disk, and as much to read at "
            "every step%s",
            checkpoint.name,
            files.num_quantized,
            files.form.name,
            form,
            held,
            files.num_bytes / 2**20,
            packed,
        )
    elif files.num_packed:
        _log.info(
            "%s: %d weights of %s are held as plain %s: %.1f MiB in memory for %.1f MiB on disk, and as much to read "
            "at every step; on a CPU --weights packed leaves them as they are",
            checkpoint.name,
            files.num_packed,
            checkpoint.kept_as or "few bits",
            form,
            held,
            files.size / 2**20,
        )


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the same config without quantisation."""
    fields = config.to_dict()
    fields.pop("quantization_config", None)
    return type(config).from_dict(fields)


def check_plain(form: QuantizedFormat | None) -> None:
    """Raises InvalidSetting for a checkpoint that is already quantised."""
    if form is not None:
        raise InvalidSetting(f"The checkpoint's weights are {form.name} ones already; leave out --weights fp8.")


def quantize_to_fp8(base: nn.Module, device: torch.device, bring: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
    """Quantise the weights of each linear to fp8, one at a time, so that only one is in memory twice.

    `bring`: moves a weight to its device.

    A CPU has no fp8 matmul: its weights stay bfloat16 but are rounded to fp8 values, so outputs and quality match a
    GPU's, but nothing is smaller or faster.
    """
    if device.type == "cuda" and find_spec("triton") is None:
        raise InvalidSetting("fp8 weights need triton, which is not installed: `pip install triton`.")
    held = 0
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                raise InvalidSetting(
                    f"fp8 weights are those of linears, and {type(child).__name__}, a mixture of experts, has none; "
                    "leave out --weights fp8."
                )
            if not isinstance(child, nn.Linear):
                continue
            weight = bring(child.weight.detach())
            kept = Fp8.of(weight)
            let_go(child.weight)
            if device.type == "cpu":
                child.weight = nn.Parameter(kept.dense().to(weight.dtype), requires_grad=False)
            else:
                bias = None if child.bias is None else bring(child.bias.detach())
                setattr(parent, name, Fp8Linear(kept, bias))
            held += 1
    if not held:
        raise InvalidSetting(
            f"fp8 weights are those of linears, and {type(base).__name__} has none; leave out --weights fp8."
        )


@contextmanager
def _naming_odd_experts(name: str, files: WeightFiles) -> Iterator[None]:
    """Name the weight that transformers could not stack with those of the other experts, if it is that."""
    try:
        yield
    except RuntimeError as error:
        odd = odd_expert(files.names, lambda one: tuple(files.shape(one))) if files.knows_shapes else None
        if odd is None:
            raise
        raise UnsupportedModel(f"{odd}: the weights of {name} are broken. Fetch the whole checkpoint again.") from error


def stream_model(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    as_kept: bool = False,
    copies: bool | None = None,
    leaves_packed: bool = False,
    keeps_packed: bool = False,
) -> Loaded:
    """Return the model with its dequantised weights of `dtype` on `device`; no weight is held twice. `as_kept`: weights
    stay on the host as views of their files, in the files' dtype; `copies`: see WeightStream; `leaves_packed`: linears
    that the files have in groups, and a GGUF's embedding, are not read, but refer to the files, to be dequantised later
    or, with `keeps_packed`, multiplied by (see stored_weights.py)."""
    plain = without_quantization(config) if hasattr(config, "quantization_config") else config
    model_class = _class_of(plain)
    with open_weights(checkpoint) as files:
        joined = None
        if config.model_type in FAMILIES and files.knows_shapes:
            joined = JoinedRows(lambda name: files.shape(name)[0] if name in files else None)
        if has_experts(checkpoint.config):
            refuse_missing(checkpoint.name, missing_of_experts(files.names))
            copies = True  # transformers stacks experts, and nothing would release the pages of their views
        stream = WeightStream(files, device, joined=joined, as_kept=as_kept, copies=copies)
        left: dict[str, StoredWeight] = {}
        mixtures: dict[str, StoredExperts] = {}
        if leaves_packed:
            left, mixtures = _leave(files, stream, config, dtype, stays=keeps_packed)
        show_load_progress_on_terminals()
        with MetaModel(), _naming_odd_experts(checkpoint.name, files):
            model, found = model_class.from_pretrained(
                None,
                config=plain,
                state_dict=stream.unread(),
                dtype=dtype,
                output_loading_info=True,
                key_mapping=key_mapping(checkpoint, config),
                ignore_mismatched_sizes=True,  # reports mismatched shapes instead of only raising
            )
        name_base(model)
        found["unexpected_keys"] = set(found["unexpected_keys"]) | set(files.unused())
        if leaves_packed:
            _attach_left(files, stream, model, left, stays=keeps_packed)
            attach_experts(model, {stream.placeholders[one].data_ptr(): each for one, each in mixtures.items()})
        if keeps_packed:
            _log_left(checkpoint, files, left, mixtures, stream)
        else:
            log_dense(checkpoint, files, model.parameters(), dtype)
    return model, found


def _leave(
    files: WeightFiles, stream: WeightStream, config: PreTrainedConfig, dtype: torch.dtype, *, stays: bool
) -> tuple[dict[str, StoredWeight], dict[str, StoredExperts]]:
    """Return the weights that are left in the files, linears and a GGUF's embedding, by name, and mixtures of experts,
    by the name of the stacked gate and up projections; they are not read. `stays`: weights are left only where they can
    be multiplied so, and experts are left."""
    left = files.stored(fuses=stays and config.model_type in FAMILIES)
    if not stays and config.tie_word_embeddings:
        left.pop("lm_head.weight", None)  # transformers compares it with the embedding
    if (embedding := files.stored_embedding()) is not None:
        name, rows = embedding
        left[name] = [rows]
    taken = take_mixtures(left)
    mixtures = {f"{path}.gate_up_proj": experts for path, (experts, _) in taken.items()} if stays else {}
    for path, (experts, names) in taken.items() if stays else ():
        stream.leave_experts(path, experts, names, dtype)
    for path, experts in files.stored_mixtures().items() if stays else ():
        stream.leave_experts(path, experts, (), dtype)
        mixtures[f"{path}.gate_up_proj"] = experts
    for name, stored in left.items():
        stream.leave(name, stored, dtype)
    return left, mixtures


def _attach_left(
    files: WeightFiles, stream: WeightStream, model: PreTrainedModel, left: dict[str, StoredWeight], *, stays: bool
) -> None:
    """Give the linears the weights that were left, and the embedding its rows, which a head that shares its weight has,
    too."""
    name, rows = files.stored_embedding() or (None, None)
    linears = {stream.placeholders[one].data_ptr(): stored for one, stored in left.items() if one != name}
    attach(model, linears, stays=stays)
    if rows is None:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        give(head, [rows], stays=stays)
    table = RowTable(rows, embedding.weight.dtype)
    check_rows(table)
    look_up_in_file(embedding, table)


def _log_left(
    checkpoint: Checkpoint,
    files: WeightFiles,
    left: dict[str, StoredWeight],
    mixtures: dict[str, StoredExperts],
    stream: WeightStream,
) -> None:
    """Log which weights stay as the file has them."""
    what = "no other is quantised" if files.stored_embedding() is None else "the embedding's rows are looked up in it"
    aside = stream.left_to_experts.union(stream.placeholders)
    dense = [name for name in files.names if files.is_quantised(name) and name not in left and name not in aside]
    if dense:
        names = ", ".join(dense[:3]) + " …" * (len(dense) > 3)
        what = f"{len(dense)} others are held as plain numbers: {names}"
    weights = [*left.values(), *(one for each in mixtures.values() for one in (*each.gate, *each.up, *each.down))]
    kinds = ", ".join(sorted({part.kind for stored in weights for part in stored})) or "none"
    _log.info("%s: %d weights stay as the file has them (%s); %s", checkpoint.name, len(weights), kinds, what)


def settle(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Move the remaining host tensors to `device`, one weight after another; shared weights stay shared."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.device.type == device.type:
                continue
            if weight not in moved:
                place = torch.empty(weight.shape, dtype=dtype, device=device)
                send(weight.detach(), place)
                moved[weight] = nn.Parameter(place, requires_grad=False)
            setattr(module, name, moved[weight])
    model.to(device)  # buffers keep their dtype


def _class_of(config: PreTrainedConfig) -> Any:
    """Return the model class of this config; of several, the one that the config names."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = [one for one in found if one.__name__ in (getattr(config, "architectures", None) or ())]
    return (named or found)[0]
