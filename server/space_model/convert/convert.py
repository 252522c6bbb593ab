"""`spaceserve convert SRC DST`: converts a published checkpoint to one that this server can load.

Weights become safetensors, a tokenizer without tokenizer.json gets one, missing mask rows are added, and config.json
names the mask ids. A GGUF file is dequantised, and its metadata become config.json and tokenizer files. SRC is only
read; DST is written atomically."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from space_common.gguf.find import GgufError, find_gguf
from space_common.tokenizer.tokenizer_files import TokenizerFileError, tokenizer_json
from torch import Tensor
from tqdm import tqdm

from space_model.adapters import GatedLora
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import (
    TEXT_CONFIGS,
    Checkpoint,
    read_object,
    refuse_as_model,
    whole_folder,
    with_quantization,
)
from space_model.checkpoint.quantized_formats import read_format
from space_model.checkpoint.space_section import SpaceSection, declared_files
from space_model.convert.source import ConvertError, SourceWeights, TensorEntry, weight_files
from space_model.heads import BaseSpec
from space_model.loading.load import check_tensors
from space_model.model_error import CheckpointNotFound, ModelError


@contextmanager
def converted_folder(target: Path, *, num_bytes: int, force: bool) -> Iterator[Path]:
    """Yield a folder, which becomes `target` after the block, or is removed if the block raises. `num_bytes`: size of
    the output; lack of disk space is detected before anything is written. An existing `target` is replaced only with
    `force`, and only at the very end."""
    if target.exists() and not force:
        raise ConvertError(f"{target} exists already. Choose another folder, or replace it with --force.")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise ConvertError(
            f"The converted checkpoint takes {num_bytes / 1024**3:.1f} GiB; {target.parent} has "
            f"{free / 1024**3:.1f} GiB free. Make room or choose another disk."
        )
    with whole_folder(target) as folder:
        yield folder


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int) -> None:
    """Write the tensors to safetensors files of at most `max_bytes` each (a larger tensor gets its own file). Holds one
    file's tensors in memory at a time. One file is `model.safetensors`; several are numbered and have an index, as
    transformers names them."""
    shard: dict[str, Tensor] = {}
    names: list[list[str]] = []  # per shard
    sizes: list[int] = []

    def flush() -> None:
        if shard:
            save_file(shard, folder / f"{len(names)}.safetensors", metadata={"format": "pt"})
            names.append(list(shard))
            sizes.append(_num_bytes(shard.values()))
            shard.clear()

    for name, tensor in tensors:
        if shard and _num_bytes(shard.values()) + tensor.nbytes > max_bytes:
            flush()
        shard[name] = tensor
    flush()
    if len(names) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, inside in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(inside, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


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
            if not torch.equal(weights.read(head_weight), weights.read(embedding_name)):
                raise ConvertError(
                    f"config.json ties the output head to the embedding, but {head_weight} differs from "
                    f'{embedding_name}. Say "tie_word_embeddings": false in config.json if the head is meant.'
                )
            dropped.add(head_weight)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        _check_shapes(expected, weights, optional=dropped | ({head_weight} if tied else set()))
        tables = (names[0] | names[1]) & weights.entries.keys() - dropped
        return cls(frozenset(tables), frozenset(dropped), weights.entries[embedding_name].shape[0], num_added)


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


_COPIED = (".json", ".jinja", ".model", ".txt", ".md")
_COPIED_NAMES = ("LICENSE", "NOTICE", "COPYING")
_MOST_MASKS = 16
_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of older tokenizers, which are converted to tokenizer.json."""


@dataclass(frozen=True)
class Wish:
    """The user's settings of a conversion."""

    mask_ids: tuple[int, ...] = ()  # one shared by all masks, or one per mask
    num_masks: int | None = None  # None: as many as mask ids
    add_masks: int = 0  # rows to append to the vocabulary, one per mask
    dtype: torch.dtype | None = None  # None: each tensor keeps its own
    max_shard_bytes: int = 1024**3
    force: bool = False
    adapter_int8: bool = False  # write the gated adapter in eight bits


def convert(source: Path, target: Path, wish: Wish, *, progress: bool = False) -> None:
    """Write `target`. Raises ModelError if the source or the settings are unsupported."""
    source, target = source.expanduser(), target.expanduser()
    if not source.exists():
        raise CheckpointNotFound(f"There is no folder or GGUF file {source}. Download the checkpoint first.")
    if source.resolve() == target.resolve():
        raise ConvertError(f"Source and target are both {source}; give another target.")
    weights: SourceWeights
    try:
        gguf, given = Checkpoint.open(source) if find_gguf(source) is not None else None, source
    except GgufError as error:
        raise ConvertError(str(error)) from error
    if gguf is None and source.is_file():
        raise CheckpointNotFound(f"{source} is a file; give the folder of a checkpoint, or a GGUF file.")
    if gguf is not None:
        from space_model.convert.source import GgufSource  # imported late: other formats need no gguf package

        source, config, weights = gguf.folder, gguf.config, GgufSource.of(gguf)
        wish = replace(wish, dtype=wish.dtype or getattr(torch, config["dtype"]))
    else:
        config = _read_config(source)
        form = read_format(with_quantization(source, config), str(source))
        if form is not None and wish.dtype is not None:
            raise ConvertError(
                f"{source} is quantised ({form.name}): its numbers mean something in their own dtype only. Leave out "
                "--dtype."
            )
        weights = SourceWeights.open(source)
    vocabulary = VocabularyTensors.find(source, weights, num_added=wish.add_masks)
    entries = {name: entry for name, entry in weights.entries.items() if name not in vocabulary.dropped}
    num_bytes = sum(_bytes_after(name, entry, vocabulary, wish.dtype) for name, entry in entries.items())
    space = _space_section(config, wish, vocabulary)  # before anything is written, because it may refuse
    files = weight_files(source) if gguf is None else gguf.weights
    names_base = _check_base(Checkpoint(str(given), source, config, files, source))
    spare = 64 * 1024**2  # tokenizer, configs, headers
    with (
        converted_folder(target, num_bytes=num_bytes + spare, force=wish.force) as folder,
        tqdm(total=num_bytes, unit="B", unit_scale=True, desc="converting", disable=None if progress else True) as bar,
    ):

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in _converted(weights, vocabulary, wish.dtype):
                yield name, tensor
                bar.update(tensor.nbytes)

        write_shards(folder, counted(), max_bytes=wish.max_shard_bytes)
        _copy_small_files(source, folder, config)
        if given.is_dir() and given != source:
            for name in _drafters(config):  # config and tokenizer come from the GGUF file
                if (given / name).is_file():
                    shutil.copyfile(given / name, folder / name)
        if wish.adapter_int8:
            _write_adapter_int8(folder, config)
        written = {**config, "vocab_size": vocabulary.new_size} | ({} if space is None else {"space": space})
        if wish.dtype is not None:
            written.pop("torch_dtype", None)
            written["dtype"] = str(wish.dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        if names_base:  # the same weights, in other files or another dtype
            written = read_object(folder / "config.json")
            written["space"]["base_sha256"] = Checkpoint.open(folder).weights_sha256()
            (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        if not (source / "tokenizer.json").is_file():
            _write_tokenizer(source, folder)


def _read_config(source: Path) -> dict[str, Any]:
    """Return config.json without the fields that name remote code, which is not copied."""
    file = source / "config.json"
    config = read_object(file) if file.is_file() else {}
    refuse_as_model(source, config.get("space"))
    if not file.is_file():
        raise CheckpointNotFound(f"{source} has no config.json; give the folder of a checkpoint.")
    if any(isinstance(config.get(part), dict) for part in TEXT_CONFIGS):
        raise ConvertError(
            f"{file} describes a model that sees or hears beside its text part, which is served as it is; only "
            "checkpoints of text alone can be converted."
        )
    if not isinstance(config.get("vocab_size"), int):
        raise ConvertError(f"{file} does not say `vocab_size`; only text decoders can be converted.")
    family.parse_config(config, str(source))  # refuses models that need remote code
    return {field: value for field, value in config.items() if field != "auto_map"}


def _space_section(config: dict[str, Any], wish: Wish, vocabulary: VocabularyTensors) -> dict[str, Any] | None:
    """Return the new `space` section; None keeps the present one."""
    if wish.add_masks and wish.mask_ids:
        raise ConvertError("Give --mask-ids for masks that the vocabulary has, or --add-masks for new ones; not both.")
    if not wish.mask_ids and not wish.add_masks:
        if wish.num_masks is not None:
            raise ConvertError(f"--num-masks {wish.num_masks} needs --mask-ids or --add-masks.")
        return None
    ids = wish.mask_ids or tuple(range(vocabulary.old_size, vocabulary.new_size))
    num_masks = len(ids) if wish.num_masks is None else wish.num_masks
    if not 1 <= num_masks <= _MOST_MASKS:
        raise ConvertError(f"A group has 1 to {_MOST_MASKS} masks; got {num_masks}.")
    if len(ids) not in (1, num_masks):
        raise ConvertError(f"{num_masks} masks need 1 shared id or {num_masks} ids; got {len(ids)}.")
    if len(set(ids)) < len(ids):
        raise ConvertError(f"The mask ids {list(ids)} repeat. Give one id if all masks share it.")
    for id in ids:
        if not 0 <= id < vocabulary.new_size:
            raise ConvertError(
                f"Mask id {id} is outside the vocabulary of {vocabulary.new_size} (0 to {vocabulary.new_size - 1}). "
                "--add-masks K appends K new mask rows."
            )
    kept = config.get("space") if isinstance(config.get("space"), dict) else {}
    return {"adapter": None, "draft_head": None, **(kept or {}), "num_masks": num_masks, "mask_token_ids": list(ids)}


def _bytes_after(name: str, entry: TensorEntry, vocabulary: VocabularyTensors, dtype: torch.dtype | None) -> int:
    num_added = vocabulary.num_added if name in vocabulary.tables else 0
    numel = math.prod(entry.shape) + num_added * math.prod(entry.shape[1:])
    wanted = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
    return numel * wanted.itemsize


def _converted(
    weights: SourceWeights, vocabulary: VocabularyTensors, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor as it is written: in its own memory, in the wanted dtype, with the added rows."""
    num_added = vocabulary.num_added
    for name, tensor in weights.tensors():
        if name in vocabulary.dropped:
            continue
        if num_added and name in vocabulary.tables:
            # The mean row acts as an average token: its logit is never the largest, and attention to it is never sharp.
            mean = tensor.float().mean(dim=0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat([tensor, mean.expand(num_added, *tensor.shape[1:])])
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        yield name, tensor.to(wanted, copy=True).contiguous()


def _copy_small_files(source: Path, folder: Path, config: dict[str, Any]) -> None:
    """Copy tokenizer, configs, licence, and the SPACE files that config.json names. Code and pickles are left out."""
    drafters = _drafters(config)
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED or file.name.startswith(_COPIED_NAMES) or file.name in drafters
        if file.is_file() and wanted and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in (said := read_object(settings)):
        del said["auto_map"]
        settings.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_adapter_int8(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the gated adapter that `config` names again, in eight bits. Raises ConvertError if `folder` has none."""
    name = (config.get("space") or {}).get("adapter")
    if name is None or not (folder / name).is_file():
        raise ConvertError(
            "--adapter-dtype int8 needs a checkpoint whose space section names an adapter file; "
            f"this one names {name!r}. Leave the flag out."
        )
    hidden_size = int(family.parse_config(dict(config), str(folder)).hidden_size)
    GatedLora.load(folder / name, BaseSpec(hidden_size, torch.float32)).save(folder / name, int8=True)
    (folder / name).chmod(0o644)  # safetensors makes files readable by the owner only


def _drafters(config: dict[str, Any]) -> set[str]:
    space = config.get("space")
    return set(declared_files(space)) if isinstance(space, dict) else set()


def _check_base(source: Checkpoint) -> bool:
    """Return whether the source's adapter declares its base weights; they must be the source's. Raises
    InvalidSpaceSection."""
    space, num_ids = source.config.get("space"), int(source.config["vocab_size"])
    if not isinstance(space, dict) or space.get("base_sha256") is None:
        return False
    section = SpaceSection.parse(source.config, mask_ids=None, num_masks=None, vocab_size=num_ids)
    section.check_base(source.name, source.weights_sha256)
    return section.base_sha256 is not None


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json from older files (tokenizer.model, *.tiktoken, vocab.json and merges.txt), if any."""
    with contextlib.suppress(TokenizerFileError):  # then transformers may know more
        made = tokenizer_json(source)
        if made is not None:
            shutil.copyfile(made, folder / "tokenizer.json")
            return
    if not any((source / name).is_file() for name in _TOKENIZERS):
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False, local_files_only=True)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    except (ValueError, OSError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConvertError(f"The tokenizer of {source} cannot be turned into tokenizer.json: {reason}") from error


def what_is_missing(folder: Path) -> str | None:
    """Return why the converted checkpoint cannot be served yet, and what to do; None if it can."""
    try:
        check_tensors(folder)
    except ModelError as error:
        return str(error)
    if not (folder / "tokenizer.json").is_file():
        return (
            f"it has no tokenizer, for SRC had none of tokenizer.json, {', '.join(_TOKENIZERS)}. Copy tokenizer.json "
            f"and tokenizer_config.json of the same model (or the one it was trained from) to {folder}; from a model's "
            f"repository on the hub: hf download OWNER/NAME tokenizer.json tokenizer_config.json --local-dir {folder}"
        )
    return None
